"""Tests of recipes/distill.py: one trajectory under every division, trl's loss and gradients, kill and resume, vocabularies.

The student is a Llama of two layers. The teacher is wider, has dropout, and some rows of padding in its embedding.
"""

import json
from itertools import islice
from pathlib import Path

import pytest
from helpers import ROOT, STEPS, log_of, losses, read_metrics
from tiny import tiny_model

from accelerate_recipes.models.tokenizers import new_bpe_tokenizer

SCRIPT = ROOT / "recipes/distill.py"
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {% generation %}{{ m['content'] }}</s>{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """Folder with translations as conversations, a student, and a teacher."""
    folder = tmp_path_factory.mktemp("chats")
    with (ROOT / "data/en_fr/libreoffice.jsonl").open() as lines:
        pairs = [json.loads(line)["translation"] for line in islice(lines, 80)]
    tokenizer = new_bpe_tokenizer([text for pair in pairs for text in pair.values()], 400)
    tokenizer.chat_template = TEMPLATE
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    size = {"vocab_size": len(tokenizer), "initializer_range": 0.1}
    models = {
        "student": size,
        "teacher": size | {"vocab_size": len(tokenizer) + 7, "hidden_size": 48, "num_hidden_layers": 3, "attention_dropout": 0.3},
    }
    for name, sizes in models.items():
        tiny_model(seed=len(name), **ids, **sizes).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    with (folder / "chats.jsonl").open("w") as file:
        for pair in pairs:
            messages = [{"role": "user", "content": pair["en"]}, {"role": "assistant", "content": pair["fr"]}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return folder


@pytest.fixture(scope="module")
def arguments(chats) -> tuple:
    return (
        "--model_name_or_path", chats / "student", "--teacher_model_name_or_path", chats / "teacher",
        "--train_files", chats / "chats.jsonl", "--max_length", 64, "--max_steps", STEPS, "--save_steps", 3,
        "--logging_steps", 1, "--total_batch_size", 12, "--learning_rate", 1e-2, "--async_save", "false",
        "--heldout_share", 0.1, "--per_device_eval_batch_size", 5, "--max_completion_length", 7, "--num_samples", 3,
    )  # fmt: skip


def numbers(out: Path) -> list[float]:
    """List all that a run has measured, in order."""
    names = ("loss", "grad_norm", "entropy")
    return [
        value for record in read_metrics(out) for name, value in record.items() if name in names or name.startswith("eval_")
    ]


@pytest.mark.parametrize("lmbda", [0, 0.5])
def test_any_division(forks, arguments, tmp_path, lmbda):
    """Losses, gradients and evaluations are the same on 1, 2 and 3 ranks, for any micro-batch."""
    divisions = {"single": (1, 12), "fsdp_full": (2, 2), "ddp": (2, 3), "fsdp_grad_op": (3, 1)}
    found = {}
    for config, (ranks, size) in divisions.items():
        out = tmp_path / config
        given = (*arguments, "--max_steps", 3, "--lmbda", lmbda, "--per_device_train_batch_size", size)
        forks.succeed(out, *given, config=config, num_processes=ranks)
        found[config] = numbers(out)
    assert len(found["single"]) > 9
    for other in found.values():
        assert other == pytest.approx(found["single"], rel=1e-5)
