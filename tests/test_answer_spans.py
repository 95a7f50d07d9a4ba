"""Tests of answers in conversations: which tokens are targets, with many chat templates, and with none of their marks."""

import re
from pathlib import Path
from typing import Any

import pytest
import trl
from conversations import OTHER_TOOL, runs_of_targets
from helpers import ROOT
from jinja2 import TemplateError
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from accelerate_recipes.conversations.exported import render
from accelerate_recipes.conversations.rendering import HAS_MARKS, Part, Rendering, is_trained, parts_of
from accelerate_recipes.errors import first_line

OF_TRL = Path(trl.__file__).parent / "chat_templates"
# Where generation stops: the texts that the models' own generation_config.json name, by the beginning of a template's name.
STOPS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"], "deepseek": ["<\uff5cend\u2581of\u2581sentence\uff5c>"],
    "diffusion": ["<turn|>", "<|tool_response>"], "gemma4": ["<turn|>", "<|tool_response>"], "gemma": ["<end_of_turn>"],
    "glm": ["<|user|>", "<|observation|>"], "gptoss": ["<|return|>", "<|call|>"], "idefics": ["<end_of_utterance>"],
    "smolvlm": ["<end_of_utterance>"], "llama3": ["<|eot_id|>", "<|eom_id|>"], "muse": ["<|eot|>", "<|eom|>"],
    "phi": ["<|end|>", "<|endoftext|>"], "own": ["</s>"], "mistral": ["</s>"],
}  # fmt: skip
# Templates of kinds that trl has not.
OWN = {
    "own_without_prompt": "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}",
    "own_stripping": (
        "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} </s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "own_system_last": (  # as Mistral's: the system prompt stands in the last message of the user
        "{% set s = messages | selectattr('role', 'eq', 'system') | list %}"
        "{% set last = messages | selectattr('role', 'eq', 'user') | map(attribute='content') | list | last %}"
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'assistant' %} {{ m.content }}</s>{% else %}"
        "[INST] {% if s and m.content == last %}{{ s[0].content }}\n\n{% endif %}{{ m.content }}[/INST]{% endif %}{% endfor %}"
    ),
    "own_strict": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('No.') }}{% endif %}"
        "{{ m.role }}:\n{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
    ),
    "own_open": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
    ),
}
TEMPLATES = OWN | {file.stem: file.read_text() for file in OF_TRL.glob("*.jinja") if "_training" not in file.stem}
OF_IMAGES = {"llava_next", "idefics3", "smolvlm"}  # templates that write no texts, only parts
THOUGHT = {"reasoning_content": "Hm, wait."}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict:
    return {"role": "assistant", "content": text, **more}


CALLS = [{"type": "function", "id": "123456789", "function": {"name": "add", "arguments": {"a": 1}}}]
RESULT = {"role": "tool", "name": "add", "tool_call_id": "123456789", "content": "Result 4"}
CONVERSATIONS = {
    "turns": [user("Ask 1"), answer("Yes, 1."), user("Ask 2"), answer("No, 2."), user("Ask 3"), answer("It is 3.")],
    "system": [{"role": "system", "content": "Ask kindly."}, user("Ask 1"), answer("Yes, 1."), user("Ask 2"), answer("No, 2.")],
    "thoughts": [user("Ask 1"), answer("Yes, 1.", **THOUGHT), user("Ask 2"), answer("No, 2.", **THOUGHT)],
    "thoughts in texts": [user("Ask 1"), answer("<think>\nHm.\n</think>\n\nYes, 1."), user("Ask 2"), answer("No, 2.")],
    "repeated": [user("Ask 1"), answer("Yes, 1."), user("Yes, 1."), answer("Yes, 1.")],
    "unicode": [user("Ask \u00e9\U0001f600"), answer("\U0001f600\u4f60\u597d \u00e9"), user("Ask \u0928\u093f"), answer("\u0928\u093f, 2.")],
    "spaces": [user("Ask 1 "), answer(" Yes,  1. "), user("\nAsk 2"), answer("\n\nNo, 2.\n")],
    "tools": [user("Ask 1"), answer("", tool_calls=CALLS), RESULT, answer("It is 3.")],
    "empty": [user("Ask 1"), answer("Yes, 1."), user("Ask 2"), answer("")],
    "last of the user": [user("Ask 1"), answer("Yes, 1."), user("Ask 2"), answer("No, 2."), user("Ask 3")],
}  # fmt: skip


def stops_of(name: str) -> list[str]:
    return next((stops for start, stops in STOPS.items() if name.startswith(start)), ["<|im_end|>"])


def tokenizer_of(template: str, stops: list[str], kind: str = "bytes") -> PreTrainedTokenizerFast:
    """Make a tokenizer that has the marks of a template as tokens; of one of three kinds, which differ in their offsets."""
    marks = sorted(set(re.findall("<[|\uff5c]?[A-Za-z_/\u2581|\uff5c]+[|\uff5c]?>", template)) | {*stops})
    tokenizer = Tokenizer(BPE(byte_fallback=kind == "sentencepiece"))
    alphabet = []
    if kind == "sentencepiece":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=kind == "trimmed")
        tokenizer.decoder = ByteLevel()
    texts = ["Yes, 1. No, 2. It is 3. Ask kindly. user assistant\n\n assistant\n Yes"] * 9
    first = pre_tokenizers.ByteLevel.alphabet() if kind != "sentencepiece" else []
    trainer = BpeTrainer(
        vocab_size=340, special_tokens=["<s>", "<pad>", *alphabet], initial_alphabet=first, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", eos_token=stops[0])
    made.add_tokens(marks, special_tokens=True)
    made.chat_template = template
    return made


def rows_of(row: dict, tokenizer: PreTrainedTokenizerBase, stops: list[str], **more: Any) -> list[Rendering]:
    settings = {"text_field": "", "completion_only": False, "assistant_only": True} | more
    return render(row, tokenizer, **settings, stops=tokenizer.convert_tokens_to_ids(stops))


def targets_in(row: dict, tokenizer: PreTrainedTokenizerBase, stops: list[str], **more: Any) -> list[list[str]]:
    """Return the targets of each row that a conversation becomes: a text for each run of targets."""
    return [runs_of_targets(row.ids, row.targets, tokenizer) for row in rows_of(row, tokenizer, stops, **more)]


def refuses(tokenizer: PreTrainedTokenizerBase, messages: list[dict], **settings: Any) -> str:
    try:
        tokenizer.apply_chat_template(messages, tokenize=False, **settings)
        return ""
    except (TemplateError, TypeError, ValueError) as error:
        return first_line(error)


@pytest.mark.parametrize("name", sorted(TEMPLATES.keys() - OF_IMAGES))
def test_targets_are_the_answers(name):
    """With each template: each answer once, with its end, and nothing of what users, tools and the system say."""
    stops = stops_of(name)
    tokenizer = tokenizer_of(TEMPLATES[name], stops)
    rendered = 0
    for what, messages in CONVERSATIONS.items():
        row = {"messages": messages, "tools": [OTHER_TOOL] if what == "tools" else None}
        if refuses(tokenizer, messages, tools=row["tools"]):
            continue
        rendered += 1
        runs = [run for part in targets_in(row, tokenizer, stops) for run in part]
        answers = [message for message in messages if is_trained(message)]
        until = max(number for number, message in enumerate(messages) if is_trained(message)) + 1
        if not HAS_MARKS.search(TEMPLATES[name]):
            whole = tokenizer.apply_chat_template(messages[:until], tools=row["tools"], return_dict=True)["input_ids"]
            assert rows_of(row, tokenizer, stops)[-1].ids == whole, what
        assert len(runs) == len(answers), (what, runs)
        for run, message in zip(runs, answers, strict=True):
            said = message["content"].rpartition("</think>")[2].strip()
            assert said in run, (what, run)
            assert "Ask" not in run and "Result" not in run and "user" not in run.replace("to=user", ""), (what, run)
            ends = (run.rstrip() if HAS_MARKS.search(TEMPLATES[name]) else run).endswith(tuple(stops))
            assert ends or name.startswith("glm"), (what, run)
            assert sum(run.count(stop) for stop in stops) <= 1 or "muse" in name, (what, run)
            if said and "<think>" not in run and "reasoning_content" not in message and ends:
                # What is left beside text and end is little: the name of a channel, a space, or a role without a prompt.
                assert len(run) - len(said) - max(map(len, stops)) < 40, (what, run)
    assert rendered >= 4


@pytest.mark.parametrize("kind", ["bytes", "trimmed", "sentencepiece"])
def test_tokens_that_begin_in_the_answer(kind):
    """Where the prompt ends with white space, a token that begins in it is no target, in whichever way offsets are told."""
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = tokenizer_of(template, ["</s>"], kind)
    for text, wanted in (("Yes, 1.", ", 1.</s>"), (" Yes, 1.", " Yes, 1.</s>"), ("\u00e9, 1.", "\u00e9, 1.</s>")):
        ((run,),) = targets_in({"messages": [user("Ask"), answer(text)]}, tokenizer, ["</s>"])
        run = run.replace("<0xC3> <0xA9>", "\u00e9")
        # " Yes" is one token, of which the space stands in the prompt; a space of the answer's own begins in the answer.
        assert re.sub("[\u2581 ]", "", run) == wanted.replace(" ", ""), (kind, text, run)


@pytest.mark.parametrize("kind", ["bytes", "trimmed", "sentencepiece"])
def test_marks_beside_transformers(kind):
    """The tokens and targets of marked answers are those of `apply_chat_template`, in whichever way offsets are told."""
    spaced = OWN["own_stripping"].replace(
        "{{ m.content | trim }} <", "{% generation %}{{ m.content }}{% endgeneration %} <"
    )
    for template, stops in ((spaced, ["</s>"]), ((OF_TRL / "qwen3_training.jinja").read_text(), ["<|im_end|>"])):
        tokenizer = tokenizer_of(template, stops, kind)
        for messages in map(CONVERSATIONS.get, ("turns", "thoughts", "unicode", "spaces")):
            whole = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
            ((ids, targets, _),) = rows_of({"messages": messages}, tokenizer, stops)
            assert (ids, targets) == (whole["input_ids"], [*map(bool, whole["assistant_masks"])]), messages


BEHIND_MARK = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{% generation %}{{ m.content }}{% endgeneration %}END{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("written, found", [
    ("</s>", ["One</s>", "Two</s>"]),
    ("{{ '</s>' if loop.last }}", ["One", "Two</s>"]),
    ("{{ '</s>' if not loop.last }}", ["One", "Two"]),  # it belongs to what follows, as the mark of the next user does
    (" </s>", ["One", "Two"]),
    ("", ["One", "Two"]),
])  # fmt: skip
def test_an_end_directly_behind_a_mark(written, found):
    """It is a target, if the template writes it where the answer is the last message."""
    template = BEHIND_MARK.replace("END", written)
    tokenizer = tokenizer_of(template, ["</s>"])
    asked = [user("Ask"), answer("One"), user("More"), answer("Two")]
    assert targets_in({"messages": asked}, tokenizer, ["</s>"]) == [found]
    assert targets_in({"messages": [*asked, user("Bye")]}, tokenizer, ["</s>"]) in ([found], [[found[0], found[1][:3]]])
    weighed = [asked[0], asked[1] | {"weight": 0}, *asked[2:]]
    assert targets_in({"messages": weighed}, tokenizer, ["</s>"]) == [found[1:]]
    inside = template.replace("{{ m.content }}{% endg", "{{ m.content }}</s>\n{% endg")
    assert targets_in({"messages": asked}, tokenizer_of(inside, ["</s>"]), ["</s>"]) == [["One</s>\n", "Two</s>\n"]]


def parts_by(tokenizer: Any, messages: list[dict], numbers: list[int], stops: list[str]) -> list[Part]:
    """Divide a conversation by its answers `numbers`."""

    def write(messages: list[dict], **more: bool) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, **more)

    return parts_of(messages, numbers, write, stops)


def test_a_row_of_its_own():
    """An answer that later messages change is trained as it was when it was the last; others share one row."""
    stops = ["<|im_end|>"]
    tokenizer = tokenizer_of(TEMPLATES["qwen3"], stops)
    row = {"messages": CONVERSATIONS["thoughts"]}
    first, second = targets_in(row, tokenizer, stops)
    assert first == ["<think>\nHm, wait.\n</think>\n\nYes, 1.<|im_end|>"]
    assert second == ["<think>\nHm, wait.\n</think>\n\nNo, 2.<|im_end|>"]
    parts = parts_by(tokenizer, row["messages"], [1, 3], stops)
    assert "Hm, wait." not in parts[1].text[: parts[1].answers[0][0]], "the later row has dropped the first thought"
    tokenizer = tokenizer_of(TEMPLATES["qwen2_5"], stops)
    assert targets_in(row, tokenizer, stops) == [["Yes, 1.<|im_end|>", "No, 2.<|im_end|>"]]
    tokenizer = tokenizer_of(TEMPLATES["phi3"], ["<|end|>", "<|endoftext|>"])
    tokenizer.eos_token = "<|endoftext|>"  # which ends a row, and so differs after each cut
    assert targets_in(row, tokenizer, ["<|end|>", "<|endoftext|>"]) == [["Yes, 1.<|end|>", "No, 2.<|end|>"]]


def test_an_answer_that_quotes_the_end():
    """The end is behind the content, also where the content has the same text; what follows the end is no target."""
    tokenizer = tokenizer_of(OWN["own_strict"] + "</s>", ["</s>"])
    row = {"messages": [user("Ask"), answer("It is </s>, I say"), user("Ask"), answer("Yes")]}
    assert targets_in(row, tokenizer, ["</s>"]) == [["It is </s>, I say</s>", "Yes</s>"]]


def test_a_prompt_that_opens_a_thought():
    """The answer begins where it parts from the prompt, but not within its text, which may begin as a thought does."""
    tokenizer = tokenizer_of(OWN["own_open"], ["</s>"])
    for text in ("Yes", "<b>Yes</b>", "<thin"):
        ((ids, targets, opened),) = rows_of({"messages": [user("Ask"), answer(text)]}, tokenizer, ["</s>"])
        assert tokenizer.decode([token for token, target in zip(ids, targets, strict=True) if target]) == f"{text}</s>"
        assert opened == "<assistant><think>\n"
    ((*_, opened),) = rows_of({"messages": [user("Ask"), answer("<think>\nHm.</think>Yes")]}, tokenizer, ["</s>"])
    assert not opened
    # Writes <think></think> before such an answer
    tokenizer = tokenizer_of(TEMPLATES["nemotron_3_nano"], ["<|im_end|>"])
    asked = {"messages": [user("Ask"), answer("Yes")]}
    assert targets_in(asked, tokenizer, ["<|im_end|>"]) == [["</think>Yes<|im_end|>"]]


def test_answers_to_nothing():
    """A greeting comes before anything is asked; a template may refuse to render nothing, or a conversation that is cut."""
    greeting = {"messages": [answer("Yes, 1."), user("Ask"), answer("No, 2.")]}
    tokenizer = tokenizer_of(TEMPLATES["qwen2_5"], ["<|im_end|>"])
    assert targets_in(greeting, tokenizer, ["<|im_end|>"]) == [["Yes, 1.<|im_end|>", "No, 2.<|im_end|>"]]
    strict = OWN["own_strict"].replace(
        "assistant:\n{% endif %}",
        "{{ raise_exception('A question!') if messages[-1].content == 'Ask' }}assistant:\n{% endif %}",
    )
    row = {"messages": [user("Ask"), answer("Yes, 1."), user("And?"), answer("No, 2.")]}
    tokenizer = tokenizer_of(strict, ["</s>"])
    assert refuses(tokenizer, row["messages"][:1], add_generation_prompt=True) == "A question!"
    assert targets_in(row, tokenizer, ["</s>"]) == [["Yes, 1.</s>", "No, 2.</s>"]]
    twice = {"messages": [user("Ask"), user("Ask"), answer("Yes, 1.")]}
    with pytest.raises(TemplateError, match=r"No\."):
        targets_in(twice, tokenizer, ["</s>"])


def test_a_tokenizer_that_tells_no_places():
    """One that is written in Python says nothing about its tokens' places; the message names the way out."""
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = OWN["own_strict"]
    row = {"messages": [user("Ask"), answer("Yes")]}
    with pytest.raises(ValueError, match=r"ByT5Tokenizer does not say .* --assistant_only_loss false"):
        rows_of(row, tokenizer, ["</s>"])
    assert all(rows_of(row, tokenizer, ["</s>"], assistant_only=False)[0].targets)


@pytest.mark.parametrize("field", [{"weight": 0}, {"train": False}, {"loss": False}, {"loss": 0}, {"train": 0}])
def test_messages_that_are_no_targets(field):
    """Whatever the field is called; rows without an answer that is trained become none."""
    tokenizer = tokenizer_of(TEMPLATES["qwen2_5"], ["<|im_end|>"])
    row = {"messages": [user("Ask"), answer("Yes, 1.", **field), user("Ask"), answer("No, 2.")]}
    assert targets_in(row, tokenizer, ["<|im_end|>"]) == [["No, 2.<|im_end|>"]]
    assert targets_in({"messages": row["messages"][:2]}, tokenizer, ["<|im_end|>"]) == []
    for messages in ([user("Ask")], [user("Ask"), answer("")], [user("Ask"), answer(" \n")]):
        assert targets_in({"messages": messages}, tokenizer, ["<|im_end|>"]) == []


def test_answers_of_a_completion():
    """Answers in the prompt are none of its targets, whether the template marks them or not."""
    whole = [user("Ask"), answer("Yes, 1."), user("Ask"), answer("No, 2."), user("Ask"), answer("It is 3.")]
    row = {"prompt": whole[:3], "completion": whole[3:]}
    for template in (TEMPLATES["qwen2_5"], (OF_TRL / "qwen2_5_training.jinja").read_text()):
        tokenizer = tokenizer_of(template, ["<|im_end|>"])
        (runs,) = targets_in(row, tokenizer, ["<|im_end|>"], completion_only=True)
        assert [run.strip() for run in runs] == ["No, 2.<|im_end|>", "It is 3.<|im_end|>"]


# How marks differ from the rule, by the texts that they mark more: before an answer, or after its end.
KINDS = {
    "nothing": lambda before, after: not before and not after,
    "white space after the end": lambda before, after: not before and not after.strip(),
    "a second end": lambda before, after: not before and bool(after.strip()),
    "a newline before": lambda before, after: bool(before) and not before.strip(),
    "an opened thought": lambda before, after: "think>" in before and "Assistant" not in before,
    "the role's header": lambda before, after: "assistant" in before.lower(),
}


def kind_of(name: str) -> str:
    """Compare the marks of a template of trl with the rule, in a conversation of one turn."""
    template, stops = (OF_TRL / f"{name}_training.jinja").read_text(), stops_of(name)
    tokenizer = tokenizer_of(template, stops)
    messages = CONVERSATIONS["turns"][:2]

    ((text, ((begin, end),), *_),) = parts_by(tokenizer, messages, [1], stops)
    _, (places,) = render_jinja_template(
        [messages], chat_template=template, return_assistant_tokens_mask=True, **tokenizer.special_tokens_map
    )
    places = [(a, b) for a, b in places if a < b]
    assert places[0][0] <= begin and places[-1][1] >= end
    before, after = text[places[0][0] : begin], text[end : places[-1][1]]
    return next(kind for kind, fits in KINDS.items() if fits(before, after))


def test_the_table_of_marks():
    """The page says how the marks of trl's templates differ from the rule."""
    page = (ROOT / "docs/rows.md").read_text()
    (table,) = re.findall(r"\| marked beside the answer and its end \|.*\n\|[-|]+\n((?:\|.*\n)+)", page)
    told = {}
    for line in table.splitlines():
        kind, names = (cell.strip() for cell in line.strip("|").split("|"))
        told |= dict.fromkeys(re.findall("`(.*?)`", names), kind)
    names = {file.stem.removesuffix("_training") for file in OF_TRL.glob("*_training.jinja")} - OF_IMAGES
    assert told == {name: kind_of(name) for name in names}
