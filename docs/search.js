// Changes the search of the theme: names are found by whole words, and files of a folder show where the words stand.
document.addEventListener("DOMContentLoaded", () => {
  // "rate" is not in accelerate_recipes.
  const find = Search.performObjectSearch
  const words = name => `.${name.toLowerCase().replace("accelerate_recipes.", "").replaceAll("_", ".")}.`
  Search.performObjectSearch = (term, terms) =>
    find(term, terms).filter(([, name]) => words(name).includes(words(term)))
  // A word that stands on pages is searched in no longer words of titles.
  const findPages = Search.performTermsSearch
  Search.performTermsSearch = (terms, excluded) => {
    for (const term of terms) if (Object.hasOwn(Search._index.terms, term)) Search._index.titleterms[term] ??= []
    return findPages(terms, excluded)
  }
  // A summary shows the place where a word begins, and not the first one of its letters.
  const summarise = Search.makeSearchSummary
  Search.makeSearchSummary = (page, terms, anchor) => {
    const text = Search.htmlToText(page, anchor)
    const placed = [...terms].map(term => text.match(new RegExp(`(?<![a-z])${term}[^]{0,20}`, "i"))?.[0] ?? term)
    return summarise(page, placed, anchor)
  }
  // A browser fetches no other file from a folder, but runs a script that holds the texts of all pages.
  if (location.protocol !== "file:") return
  const script = document.head.appendChild(document.createElement("script"))
  const loaded = new Promise(done => script.onload = done)
  script.src = "_static/texts.js"
  window.fetch = async page => ({text: () => loaded.then(() => `<p role="main">${TEXTS[page.replace("./", "")]}</p>`)})
})
