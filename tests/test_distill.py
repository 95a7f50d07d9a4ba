"""Tests of recipes/distill.py: one trajectory under every division, trl's loss and gradients, kill and resume, vocabularies.

The student is a Llama of two layers. The teacher is wider, has dropout, and some rows of padding in its embedding.
"""

import copy
import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from helpers import ROOT, STEPS, read_metrics
from tiny import tiny_model
from transformers import AutoTokenizer
from trl import DistillationConfig, DistillationTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import pad

from accelerate_recipes.losses import count_next_tokens
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer
from accelerate_recipes.posttraining.distillation import DistillationLoss, answered, with_access

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
        "teacher": size
        | {"vocab_size": len(tokenizer) + 7, "hidden_size": 48, "num_hidden_layers": 3, "attention_dropout": 0.3},
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
        value
        for record in read_metrics(out)
        for name, value in record.items()
        if name in names or name.startswith("eval_")
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


@pytest.mark.parametrize(
    "beta, temperature, architecture", [(0.0, 1.0, "llama"), (1.0, 0.7, "gemma2"), (0.3, 1.0, "cohere")]
)
def test_loss_and_gradients_are_those_of_trl(chats, tmp_path, beta, temperature, architecture):
    """Step by step, on the same answers of different lengths; also where logits are scaled or capped.

    Not by Adam, which makes of the rounding of a gradient near zero a step of full length.
    """
    tokenizer = AutoTokenizer.from_pretrained(chats / "student")
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {"vocab_size": len(tokenizer), "initializer_range": 0.2, **ids}
    ours = tiny_model(architecture, **sizes)
    teacher = tiny_model("llama", **sizes | {"hidden_size": 48, "attention_dropout": 0.3})
    theirs = copy.deepcopy(ours)
    made = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    config = DistillationConfig(str(tmp_path), beta=beta, temperature=temperature, **made)
    rows = Dataset.from_dict({"prompt": ["x"]})
    given = {"train_dataset": rows, "processing_class": tokenizer, "teacher_model": copy.deepcopy(teacher)}
    trainer = DistillationTrainer(theirs, args=config, **given)
    args = SimpleNamespace(beta=beta, temperature=temperature)
    loss = DistillationLoss(args, ours.config, teacher.config)
    loss.teacher = with_access(teacher.eval())
    collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (with_access(ours), theirs)]
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        lengths = [(3, 7), (9, 2), (5, 4)]
        pairs = [[torch.randint(5, 390, (n,), generator=generator) for n in both] for both in lengths]
        batch = collate([answered(*(ids.tolist() for ids in pair)) for pair in pairs])
        number = count_next_tokens(batch)
        value = loss.sum_parts(ours, batch) / number
        inputs = {"num_items_in_batch": number}
        for name, side, parts in zip(
            ("prompt", "completion"), ("left", "right"), zip(*pairs, strict=True), strict=True
        ):
            inputs[f"{name}_ids"] = pad([*parts], tokenizer.pad_token_id, side)
            inputs[f"{name}_mask"] = pad([torch.ones_like(ids) for ids in parts], 0, side)
        expected = trainer.compute_loss(trainer.model, inputs)
        assert value.item() == pytest.approx(expected.item(), rel=1e-5) and value.item() > 0.01
        for one in (value, expected):
            one.backward()
        gradients = [torch.cat([p.grad.flatten() for p in model.parameters()]) for model in (ours, theirs)]
        assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm(), step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in teacher.parameters())
