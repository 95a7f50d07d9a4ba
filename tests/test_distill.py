"""Tests of recipes/distill.py: one trajectory under every division, trl's loss and gradients, kill and resume, vocabularies.

The student is a Llama of two layers. The teacher, of another class, is wider, has dropout, and some rows of padding in its
embedding.
"""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conversations import translations
from datasets import Dataset
from helpers import ROOT, SHORT_RUN, STEPS, log_of, read_metrics, refuses, write_rows
from tiny import save_base, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, ModernBertDecoderConfig
from trl import DistillationConfig, DistillationTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import pad

from accelerate_recipes.conversations import distillation
from accelerate_recipes.conversations.heads import check_hidden_suffices
from accelerate_recipes.conversations.supervised import cut
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.losses import count_next_tokens
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer
from recipe_tools.preflight import preflight

SCRIPT = ROOT / "recipes/distill.py"


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """Folder with translations as conversations, a student, and a teacher."""
    folder = tmp_path_factory.mktemp("chats")
    chats, tokenizer = translations(80)
    save_base(folder / "student", tokenizer, seed=1)
    sizes = {"vocab_size": len(tokenizer) + 7, "hidden_size": 48, "num_hidden_layers": 3, "attention_dropout": 0.3}
    save_base(folder / "teacher", tokenizer, model_type="qwen3", seed=2, **sizes)
    write_rows(folder / "chats.jsonl", ({"messages": messages} for messages in chats))
    return folder


@pytest.fixture(scope="module")
def arguments(chats) -> tuple:
    return (
        "--model_name_or_path", chats / "student", "--teacher_model_name_or_path", chats / "teacher",
        "--train_files", chats / "chats.jsonl", "--max_length", 64, *SHORT_RUN, "--total_batch_size", 12,
        "--heldout_share", 0.1, "--per_device_eval_batch_size", 5, "--max_completion_length", 7, "--num_samples", 3,
    )  # fmt: skip


def test_preflight_counts_the_student_alone(arguments, chats):
    """The teacher needs no room in a checkpoint."""
    said, _ = preflight([str(ROOT / "accelerate_configs/single.yaml"), str(SCRIPT), *map(str, arguments)])
    student = AutoModelForCausalLM.from_pretrained(chats / "student")
    assert f"Parameters: {student.num_parameters():,}; " in said


def numbers(out: Path) -> list[float]:
    """List all that a run has measured, in order."""
    names = ("loss", "grad_norm", "entropy")
    items = [item for record in read_metrics(out) for item in record.items()]
    return [value for name, value in items if name in names or name.startswith("eval_")]


def test_any_division(forks, arguments, tmp_path):
    """Losses, gradients and evaluations are the same on 1, 2 and 3 ranks, for any micro-batch; half of the answers are drawn.

    Muon trains the student's matrices, and none of the teacher's.
    """
    found = []
    for config, ranks, size in (("single", 1, 12), ("fsdp_full", 2, 2), ("fsdp_grad_op", 3, 1)):
        given = (*arguments, "--max_steps", 3, "--lmbda", 0.5, "--optim", "muon", "--per_device_train_batch_size", size)
        forks.succeed(tmp_path / config, *given, config=config, num_processes=ranks)
        found.append(numbers(tmp_path / config))
    assert len(found[0]) > 9
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)


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
    loss = distillation.DistillationLoss(args, ours.config, teacher.config)
    loss.use_teacher(distillation.with_access(teacher.eval()))
    collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.3) for model in (distillation.with_access(ours), theirs)]
    generator = torch.Generator().manual_seed(0)
    for step in range(3):
        lengths = [(3, 7), (9, 2), (5, 4)]
        pairs = [[torch.randint(5, 390, (n,), generator=generator) for n in both] for both in lengths]
        batch = collate([distillation.answered(*(ids.tolist() for ids in pair)) for pair in pairs])
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


def test_killed_and_resumed(killed_and_resumed, arguments, chats):
    """A run continues bit for bit, with its answers; the teacher is loaded, and never written."""
    before = {file.name: file.read_bytes() for file in (chats / "teacher").iterdir()}
    whole, out = killed_and_resumed(SCRIPT, *arguments, "--beta", 0.5, "--per_device_train_batch_size", 3)
    assert before == {file.name: file.read_bytes() for file in (chats / "teacher").iterdir()}
    assert (out / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0] * 3 + [STEPS] * 3 and all(row["expected"] for row in rows)
    first, last = (record for record in read_metrics(out) if "eval_loss" in record)
    for name in ("eval_forward_kl", "eval_reverse_kl", "eval_drawn_forward_kl", "eval_drawn_reverse_kl"):
        assert 0 < last[name] < 0.8 * first[name], name
    # The exported student and the teacher, without this project, diverge as the last evaluation says.
    student, teacher = (AutoModelForCausalLM.from_pretrained(path) for path in (out / "export", chats / "teacher"))
    tokenizer = AutoTokenizer.from_pretrained(out / "export")
    for row in rows[3:]:
        ids = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
        begin, answer = ids.shape[1], tokenizer(row["completion"], add_special_tokens=False, return_tensors="pt")
        ids = torch.cat([ids, answer["input_ids"]], 1)
        with torch.no_grad():
            logits = [model.eval()(ids).logits[0, begin - 1 : -1, : len(tokenizer)] for model in (student, teacher)]
            ours, theirs = (values.log_softmax(-1) for values in logits)
        if len(ours) == 7:  # texts of broken characters are tokenised otherwise than they were drawn
            found = (ours.exp() * (ours - theirs)).sum(-1).mean().item()
            assert found == pytest.approx(row["rewards"]["reverse_kl"], abs=2e-4)


PROMPTS = """
def length(completions, solution, **_):
    return [float(len(text) + 0 * len(right)) for text, right in zip(completions, solution)]
"""


def test_prompts_alone(forks, arguments, chats, tmp_path):
    """Rows of GRPO need no answers; a reward measures the held-out ones that the student draws. With adapters."""
    (tmp_path / "reward.py").write_text(PROMPTS)
    rows = [json.loads(line)["messages"][:1] for line in (chats / "chats.jsonl").read_text().splitlines()]
    write_rows(tmp_path / "rows.jsonl", ({"prompt": row, "solution": "x"} for row in rows))
    given = (*arguments, "--train_files", tmp_path / "rows.jsonl", "--rewards", f"{tmp_path}/reward.py:length")
    out = tmp_path / "out"
    adapters = ("--use_peft", "--lora_r", 4, "--merge_adapter", "true")
    forks.succeed(out, *given, *adapters, "--per_device_train_batch_size", 6, "--eval_steps", 3, config="ddp")
    found = [record for record in read_metrics(out) if "eval_drawn_reward" in record]
    assert [record["step"] for record in found] == [0, 3, STEPS]
    assert found[-1]["eval_drawn_reverse_kl"] < found[0]["eval_drawn_reverse_kl"] and "eval_loss" not in found[0]
    shown = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert {row["expected"] for row in shown} == {"x"}
    assert shown[0]["rewards"].keys() == {"length", "forward_kl", "reverse_kl"}
    refused = {
        "no answers for the share that the student does not draw": (*given, "--lmbda", 0.5),
        "has answers, but --rewards is for prompts alone": (*arguments, *given[-2:]),
        "no prompt before its targets": (*arguments, "--assistant_only_loss", "false"),
        "leave room for": (*arguments, "--max_completion_length", 2048 - 10),
    }
    for number, (said, args) in enumerate(refused.items()):
        out = tmp_path / f"refused-{number}"
        assert forks.run(out, *args, "--per_device_train_batch_size", 6) == 2, said
        assert said in log_of(out), log_of(out)[-2000:]


def test_a_skipped_step(skips_a_step, arguments):
    skips_a_step(SCRIPT, *arguments, "--lmbda", 0.5, "--per_device_train_batch_size", 3)


def test_models_with_layers_behind_their_hidden_states_are_refused(chats, tmp_path):
    """The divergence is computed from hidden states and output layer, and would leave what lies between them untrained."""
    ModernBertDecoderConfig().save_pretrained(tmp_path)
    check_hidden_suffices([chats / "student"])
    with pytest.raises(ConfigError, match=rf"{tmp_path}: the divergence .* without lm_head.dense.weight; give another"):
        check_hidden_suffices([chats / "student", tmp_path])


def test_other_vocabularies_are_refused(forks, arguments, chats, tmp_path, out):
    """By ids, before a model is loaded."""
    texts = [json.loads(line)["messages"][1]["content"] for line in (chats / "chats.jsonl").read_text().splitlines()]
    other = new_bpe_tokenizer(texts, 380)
    known = AutoTokenizer.from_pretrained(chats / "student")
    names = ("the student", "the teacher")
    distillation.check_vocabularies(known, known, names)
    said = r"has 400 tokens, the teacher 380, and \d+ differ: token \d+ is '.+' in the student, and '.+' in the teacher"
    refuses(said, distillation.check_vocabularies, known, other, names)
    known.add_tokens(["<think>"])
    more = copy.deepcopy(known)
    more.add_tokens(["</think>"])
    with pytest.raises(ConfigError, match=r"1 differ: token 401 is None in the student, and '</think>' in the teacher"):
        distillation.check_vocabularies(known, more, names)
    folder = tmp_path / "teacher"
    other.save_pretrained(folder)
    (folder / "config.json").write_text((chats / "teacher/config.json").read_text())
    (folder / "model.safetensors").write_bytes((chats / "teacher/model.safetensors").read_bytes())
    assert forks.run(out, *arguments, "--teacher_model_name_or_path", folder, config="single") == 2
    assert f"in {folder}. The teacher must judge the student's tokens" in log_of(out), log_of(out)[-2000:]


def test_own_answers_continue_their_prompts(chats):
    """A share of the rows of a step gets answers to their own prompts, others in each step; the others keep theirs."""
    tokenizer, model = (k.from_pretrained(chats / "student") for k in (AutoTokenizer, AutoModelForCausalLM))
    model.lm_head.weight.data *= 20  # so that answers are not much alike
    train = [{"input_ids": [5, 6, 7 + i, 8, 9], "labels": [-100, 6, -100, 8, -100]} for i in range(30)]
    size = 5
    args = SimpleNamespace(
        seed=1, lmbda=0.5, temperature=1.0, max_completion_length=6, num_eval_prompts=2, total_batch_size=20,
        per_device_train_batch_size=size, per_device_eval_batch_size=3, data_only=False, max_prompt_length=0, rewards=[],
        reward_weights=None, base_model="student", teacher_model_name_or_path=chats / "student",
    )  # fmt: skip
    run = SimpleNamespace(
        args=args, accelerator=Accelerator(cpu=True), model=model, is_first=False, print=print, total_steps=9,
        data_rank=0, data_world_size=1,
    )  # fmt: skip
    collate = DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)
    sides = (cut(Dataset.from_list(rows)) for rows in (train, train[:4]))
    rows = SimpleNamespace(**dict(zip(("train", "heldout"), sides, strict=True)), collate=collate)
    own = distillation.OwnAnswers(run, tokenizer, rows, model, None)
    assert own.begins.tolist() == [3] * 30 and own.prompts == [[5, 6, 7], [5, 6, 8]]
    numbers = torch.arange(20).reshape(4, size)
    numbers[-1, -1] = -1

    def drawn(step: int) -> list[tuple[list[int], list[int]]]:
        batches = own.draw(step, [{"row": row} for row in numbers])
        read = [
            zip(b["input_ids"].tolist(), b["labels"].tolist(), b["attention_mask"].sum(1), strict=True) for b in batches
        ]
        return [(ids[:number], labels[:number]) for batch in read for ids, labels, number in batch]

    first, second = drawn(0), drawn(1)
    assert first == drawn(0)
    kept = [[row["input_ids"], row["labels"]] for row in train]
    shares = []
    for found in (first, second):
        assert [*found[-1]] == [[0], [-100]], "no row is left for the last place"
        is_own = [[*row] != kept[i] for i, row in enumerate(found[:-1])]
        assert 5 < sum(is_own) < 15 and is_own not in shares
        shares.append(is_own)
        for i, (ids, labels) in enumerate(found[:-1]):
            assert ids[:3] == [5, 6, 7 + i] and (not is_own[i] or (labels[:3] == [-100] * 3 and labels[3:] == ids[3:]))
    args.lmbda = 1.0
    whole = drawn(0)[:-1]
    assert sum(one != other for one, other in zip(whole, drawn(1), strict=False)) > 9, "numbers of a step are its own"
    assert len({tuple(ids[3:]) for ids, _ in whole}) > 9, "and so are those of an answer"
    args.temperature = 1e-4
    for ids, _ in drawn(2)[:-1]:  # the most likely answers
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, 2:-1]
        assert logits.argmax(-1).tolist() == ids[3:]
        assert len(ids) == 9 or ids[-1] == tokenizer.eos_token_id
