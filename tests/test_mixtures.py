"""Mixtures of finite sources: what their file says, which rows each step trains on, and runs that are killed and resumed."""

import json
from itertools import islice
from pathlib import Path

import pytest
from helpers import ROOT, log_of, losses, read_metrics
from tiny import tiny_model

from accelerate_recipes.data.files import falls_under
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer

SCRIPT = ROOT / "recipes/sft.py"
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {% generation %}{{ m['content'] }}</s>{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
MIXTURE = """
sources:
- {{name: chats, weight: 5, train_files: [{folder}/chats.jsonl]}}
- {{name: alpaca, weight: 3, train_files: [{folder}/alpaca.csv], columns: [instruction=asked, output=said]}}
- {{name: few, weight: 2, train_files: [{folder}/few.parquet], max_epochs: 1.5, heldout_share: 0.3}}
"""


def write_mixture(folder: Path, text: str = MIXTURE, name: str = "mixture") -> Path:
    (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    return folder / f"{name}.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with a base, and with sources of three forms in three kinds of files: 80 rows, 60 rows, and 10 rows."""
    import pandas

    folder = tmp_path_factory.mktemp("sources")
    with (ROOT / "data/en_fr/libreoffice.jsonl").open() as lines:
        pairs = [json.loads(line)["translation"] for line in islice(lines, 200)]
    tokenizer = new_bpe_tokenizer([text for pair in pairs for text in pair.values()], 400)
    tokenizer.chat_template = TEMPLATE
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tiny_model(vocab_size=len(tokenizer), initializer_range=0.1, attention_dropout=0.1, **ids).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    said = [[{"role": "user", "content": p["en"]}, {"role": "assistant", "content": p["fr"]}] for p in pairs]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in said[:80]))
    pandas.DataFrame([{"asked": p["fr"], "said": p["en"]} for p in pairs[80:140]]).to_csv(folder / "alpaca.csv", index=False)
    turns = [
        [{"from": "human", "value": p["en"]}, {"from": "gpt", "value": p["fr"]}]
        for p in pairs[140:160]
    ]
    pandas.DataFrame({"conversations": turns[:10]}).to_parquet(folder / "few.parquet")
    write_mixture(folder)
    return folder


@pytest.fixture(scope="module")
def arguments(folder) -> tuple:
    return (
        "--model_name_or_path", folder / "base", "--mixture", folder / "mixture.yaml", "--max_length", 64, "--max_steps", 6,
        "--save_steps", 3, "--logging_steps", 1, "--total_batch_size", 8, "--per_device_train_batch_size", 2,
        "--learning_rate", 1e-2, "--async_save", "false", "--heldout_share", 0.1, "--assistant_only_loss", "false",
    )  # fmt: skip


def test_first(forks, folder, arguments, tmp_path):
    print(forks.succeed(tmp_path / "out", *arguments))
    print(read_metrics(tmp_path / "out"))
    print((tmp_path / "out/rows.txt").read_text())
    print((tmp_path / "out/checkpoint-6/data.json").read_text())
    raise 1
