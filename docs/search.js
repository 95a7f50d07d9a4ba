// Searches sections, in place of the theme's search, which names pages by the alphabet. A section is found on a page that has all
// words; first come those with the words in their titles, and with rare words. A word is found at the begin of words, stemmed.
document.addEventListener("DOMContentLoaded", () => {
  const script = document.head.appendChild(document.createElement("script"))
  script.src = "_static/sections.js" // a script, since a browser fetches no file from a folder
  const loaded = new Promise(done => script.onload = done)
  const stemmer = new Stemmer()
  const asked = query => query.toLowerCase().match(/[\p{L}\p{N}]+([_.][\p{L}\p{N}]+)*/gu) ?? []
  const pattern = word => {
    const stem = stemmer.stemWord(word)
    const begin = [stem, stem.slice(0, -1)].find(part => part.length > 2 && word.startsWith(part)) ?? word
    return new RegExp(`(?<![a-z0-9])${begin.replaceAll(".", "\\.")}${begin.length < 3 ? "(?![a-z0-9])" : ""}`, "gi")
  }
  const count = (text, word) => text.match(word)?.length ?? 0

  // "learning rate" also stands in --learning_rate.
  const phrase_of = words => new RegExp(words.map(word => word.source).join("[a-z]*[\\s_-]+").replaceAll(/(?!^)\(\?<!.*?\)/g, ""), "gi")

  function rank(words) {
    const texts = {}
    for (const [address, page, title, text] of SECTIONS) {
      const name = address.split("#")[0]
      texts[name] = `${texts[name] ?? page} ${title} ${text}`
    }
    const pages = new Set(Object.keys(texts).filter(name => words.every(word => count(texts[name], word))))
    const weights = words.map(word => {
      const holding = SECTIONS.filter(([, , title, text]) => count(`${title} ${text}`, word)).length
      return Math.log(1 + SECTIONS.length / (1 + holding))
    })
    const phrase = phrase_of(words)
    const share = (text, word) => { const often = count(text, word); return often / (often + 1 + text.length / 1000) }
    const scored = SECTIONS.map(section => {
      const [address, page, title, text] = section, here = words.map(word => count(`${title} ${text}`, word) > 0)
      const parts = words.map((word, number) => weights[number] * (
        share(text, word) + (count(title, word) ? 1 + 6 / (5 + title.length) : 0) + (count(page, word) ? 0.5 : 0)
        + (words.length > 1 ? share(`${title} ${text}`, phrase) : 0)
      ))
      // Less for history, and for lists of everything.
      const apart = /^(CHANGELOG|CONTRIBUTING|benchmarks|docs.development)/.test(address) ? 0.4 : /^docs.(arg|func)/.test(address) ? 0.7 : 1
      const score = apart * parts.reduce((sum, part) => sum + part, 0) * (here.filter(Boolean).length / words.length) ** 2
      return {section, score: pages.has(address.split("#")[0]) ? score : 0}
    })
    return scored.filter(({score}) => score).sort((one, other) => other.score - one.score).map(({section}) => section)
  }

  function summary(text, words) {
    const places = [phrase_of(words), ...words].map(word => text.search(word)), first = places.find(place => place >= 0) ?? 0
    const begin = first < 80 ? 0 : text.indexOf(" ", first - 80) + 1, end = begin + 240
    const shown = document.createElement("p"), marked = new RegExp(words.map(word => `${word.source}[a-z]*`).join("|"), "gi")
    let rest = begin
    shown.className = "context"
    shown.append(begin ? "... " : "")
    for (const {0: word, index} of text.slice(0, end).matchAll(marked)) {
      if (index < rest) continue
      const mark = document.createElement("span")
      mark.className = "highlighted"
      mark.textContent = word
      shown.append(text.slice(rest, index), mark)
      rest = index + word.length
    }
    shown.append(text.slice(rest, end), text.length > end ? " ..." : "")
    return shown
  }

  Search.performSearch = async query => {
    await loaded
    const all = asked(query), telling = all.filter(word => !stopwords.has(word))
    const words = (telling.length ? telling : all).map(pattern), found = words.length ? rank(words) : []
    localStorage.setItem("sphinx_highlight_terms", telling.join(" "))
    const out = document.getElementById("search-results"), list = document.createElement("ul")
    list.className = "search"
    for (const [address, page, title, text] of found.slice(0, 60)) {
      const item = list.appendChild(document.createElement("li")), link = item.appendChild(document.createElement("a"))
      link.href = address
      link.textContent = page == title ? title : `${page}: ${title}`
      item.append(summary(text, words))
    }
    const heading = document.createElement("h2")
    heading.textContent = `${found.length || "No"} section${found.length == 1 ? "" : "s"} with ${all.join(" ")}`
    out.replaceChildren(heading, list)
  }
})
