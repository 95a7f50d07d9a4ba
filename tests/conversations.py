"""Conversations with tools, pairs and prompts made of them, and bases to train on them."""

import json
import re
from collections.abc import Iterable
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import trl
from datasets import Dataset
from helpers import CHILDREN, ROOT, refuses
from helpers import write_rows as write
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from accelerate_recipes import engine, recipe
from accelerate_recipes.conversations import supervised_loss
from accelerate_recipes.models.tokenizers import load_tokenizer, new_bpe_tokenizer
from accelerate_recipes.run import DataReady, Run


def tool(name: str, description: str, **types: str) -> dict:
    properties = {field: {"type": kind} for field, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": [*types]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOL, OTHER_TOOL = tool("weather", "Look at the sky.", town="string"), tool("add", "Add.", a="integer")


def call(name: str, **arguments) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def conversation(number: int, *, tools: bool, system: bool) -> dict:
    """Make a conversation of several turns; every second one has other tools, and so another schema."""
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    messages += [{"role": "user", "content": f"Question {number}?"}, {"role": "assistant", "content": "Yes."}]
    messages += [{"role": "user", "content": f"And {number + 1}?"}]
    if not tools:
        return {"messages": [*messages, {"role": "assistant", "content": f"No, {number}."}]}
    used = call("weather", town="Bern") if number % 2 else call("add", a=number)
    messages += [used, {"role": "tool", "content": "4"}, {"role": "assistant", "content": f"It is {number}."}]
    return {"messages": messages, "tools": json.dumps([TOOL]) if number % 2 else json.dumps([OTHER_TOOL])}


def save_base(folder: Path, template: str | None, end: str = "</s>", spare_rows: int = 0, **config) -> Path:
    """Save a small Llama with a tokenizer that knows the template's special tokens."""
    marks = sorted(set(re.findall("<[|\uff5c]?[A-Za-z_\u2581|\uff5c]+[|\uff5c]?>", template or "")) - {"</s>", "<s>"})
    tokenizer = new_bpe_tokenizer(["Be brief. Question 12? Yes. And? No. It is."] * 9, 300)
    tokenizer.add_tokens([*marks, end], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template = end, template
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer) + spare_rows, eos_token_id=tokenizer.eos_token_id, **sizes, **config)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {% generation %}{{ m['content'] }}</s>{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


# As its authors describe it.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def translations(number: int) -> tuple[list[list[dict]], PreTrainedTokenizerBase]:
    """Return real translations as conversations, and a tokenizer of their texts, whose TEMPLATE marks the answers."""
    with (ROOT / "data/en_fr/libreoffice.jsonl").open() as lines:
        pairs = [json.loads(line)["translation"] for line in islice(lines, number)]
    tokenizer = new_bpe_tokenizer([text for pair in pairs for text in pair.values()], 400)
    tokenizer.chat_template = TEMPLATE
    return [[{"role": "user", "content": p["en"]}, {"role": "assistant", "content": p["fr"]}] for p in pairs], tokenizer


def save_base_of_sums(folder: Path, **config) -> Path:
    """Save a tiny Llama with the tokenizer of data/arithmetic."""
    sizes = {"initializer_range": 0.3, "max_position_embeddings": 32, "num_attention_heads": 2}
    return tiny.save_base(folder, load_tokenizer(str(ROOT / "data/arithmetic/tokenizer")), **sizes | config)


def rows_of(*rows: dict) -> Dataset:
    return Dataset.from_list([*rows])


@torch.no_grad()
def log_prob(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> torch.Tensor:
    """Compute the log-probability of an answer with its end."""
    ids, begin = tokenizer(prompt + answer)["input_ids"] + [tokenizer.eos_token_id], len(tokenizer(prompt)["input_ids"])
    found = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return found[range(begin - 1, len(ids) - 1), ids[begin:]].sum()


def runs_of_targets(ids: list[int], targets: Iterable[bool], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a text for each run of targets."""
    runs = groupby(zip(ids, targets, strict=True), key=itemgetter(1))
    return [tokenizer.decode([token for token, _ in run]) for is_target, run in runs if is_target]


LENGTHS = {
    "sft": ("--max_length", "2000"),
    "dpo": ("--max_length", "2000"),
    "kto": ("--max_length", "2000"),
    "grpo": ("--rewards", f"{CHILDREN}/rewards.py:short", "--max_completion_length", "8"),
}


def prepare(folder: Path, rows: list[dict], *flags: str, name: str = "sft") -> None:
    """Prepare rows for the base in `folder`, as every run of a recipe does before its first step."""
    file = write(folder / "rows.jsonl", rows)
    where = ("--train_files", str(file), "--heldout_share", "0.3", "--output_dir", str(folder / "out"))
    script = str(ROOT / f"recipes/{name}.py")
    recipe.prepare_data([script, "--model_name_or_path", str(folder), *where, *LENGTHS[name], *flags])


def refuse(said: str, *given: Any, **named: Any) -> None:
    """Check that a run that would `prepare` this ends with a message, before its first step."""
    refuses(said, prepare, *given, **named)


def heldout_batches(folder: Path, rows: list[dict], *flags: str) -> list[dict]:
    """Return the batches to evaluate on that recipes/sft.py makes of rows."""
    found = []

    def stop(run: Any, loader: Any, *, evaluate_fn: Any, **given: Any) -> None:
        found.extend(evaluate_fn(0)["loss"])
        raise DataReady

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "show_rows", lambda *args: None)
        patch.setattr(engine, "train", stop)
        patch.setattr(supervised_loss, "evaluate_loss", lambda accelerator, model, batches, *rest: [*batches])
        prepare(folder, rows, *flags)
    return found


def template_of(name: str) -> str:
    return (Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text()


ROWS_WITH_TOOLS = [conversation(i, tools=True, system=True) for i in range(30)]


def pair(number: int) -> dict:
    """Make a pair of answers to a conversation with tools; every second one has other tools, and other fields in a call."""
    *messages, answer = ROWS_WITH_TOOLS[number]["messages"]
    other = {"role": "assistant", "content": f"I do not know {number}."}
    return ROWS_WITH_TOOLS[number] | {"prompt": messages, "chosen": [answer], "rejected": [other], "messages": None}


PAIRS = [{name: value for name, value in pair(i).items() if value} for i in range(30)]


PROMPTS = [{"prompt": conversation(i, tools=False, system=True)["messages"][:-1]} for i in range(30)]
