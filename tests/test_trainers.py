"""Tests of the recipes on trl's trainers: one trajectory under every sharding, kill and resume, export, as for the others.

The base is a Llama of two layers, with weights of a useful size; a run is 6 steps and saves after 3.
"""

import contextlib
import json
import math
import os
import re
import shutil
from collections import defaultdict
from dataclasses import fields
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from accelerate import PartialState
from datasets import Features, List, Value
from helpers import CHILDREN, IN_STEP_5, ROOT, STEPS, evaluations, log_of, losses, read_metrics
from peft import PeftModel
from safetensors.torch import load_file
from tiny import save_base
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainingArguments
from trl import DPOConfig, GRPOConfig, SFTConfig
from trl.trainer.utils import add_fused_lm_head

from accelerate_recipes import recipe
from accelerate_recipes.args import TrainArgs, parse, resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint.files import complete_checkpoints
from accelerate_recipes.checkpoint.resume import changed_arguments, check_arguments
from accelerate_recipes.chess import rules
from accelerate_recipes.chess.preferences import is_worse
from accelerate_recipes.chess.rewards import REWARDS, stockfish_reward
from accelerate_recipes.data.heldout import beginning
from accelerate_recipes.data.rows import rows_of_step
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.launch.preflight import preflight
from accelerate_recipes.models.tokenizers import new_bpe_tokenizer, new_word_tokenizer
from accelerate_recipes.posttraining.settings import trl_config
from accelerate_recipes.posttraining.supervised import load_sides
from accelerate_recipes.posttraining.trained_rows import check_same_targets
from accelerate_recipes.posttraining.whole_steps import WholeSteps, num_whole_steps
from accelerate_recipes.run import Run

SFT = SCRIPT = ROOT / "recipes/sft.py"
DPO, GRPO = ROOT / "recipes/chess_dpo.py", ROOT / "recipes/chess_grpo.py"
ENGINE = CHILDREN / "chess_engine.py"
STOCKFISH = shutil.which("stockfish", path=os.environ["PATH"] + ":/usr/games")
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}: {% generation %}{{ m['content'] }}</s>{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
# One rank and its worker get the signal when the rank would log step 3. The shell that sends it is one of them.
STOP_AFTER_STEP_3 = {
    "TOY_FAULT": json.dumps(
        {
            "event": "open", "path": "/out/metrics.jsonl", "count": 6, "rank": 0,
            "command": "trap '' TERM; pkill -TERM -P $PPID; kill -TERM $PPID",
        }
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """Folder with translations as conversations, and with bases with and without dropout."""
    folder = tmp_path_factory.mktemp("chats")
    with (ROOT / "data/en_fr/libreoffice.jsonl").open() as lines:
        pairs = [json.loads(line)["translation"] for line in islice(lines, 120)]
    tokenizer = new_bpe_tokenizer([text for pair in pairs for text in pair.values()], 400)
    tokenizer.chat_template = TEMPLATE
    save_base(folder / "base", tokenizer)
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": f"Tools. {TEMPLATE}"}
    save_base(folder / "base_with_dropout", tokenizer, attention_dropout=0.1)
    save_base(folder / "experts", tokenizer, model_type="mixtral")
    with (folder / "chats.jsonl").open("w") as file:
        for pair in pairs:
            messages = [{"role": "user", "content": pair["en"]}, {"role": "assistant", "content": pair["fr"]}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return folder


@pytest.fixture(scope="module")
def arguments(chats) -> tuple:
    return (
        "--train_files", chats / "chats.jsonl", "--max_length", 64, "--max_steps", STEPS, "--save_steps", 3,
        "--logging_steps", 1, "--total_batch_size", 8, "--learning_rate", 1e-2, "--async_save", "false",
        "--heldout_share", 0.1, "--per_device_eval_batch_size", 5, "--assistant_only_loss", "false",
    )  # fmt: skip


@pytest.mark.parametrize(
    "name, config_class", [("sft", SFTConfig), ("chess_dpo", DPOConfig), ("chess_grpo", GRPOConfig)]
)
def test_one_process_trains_on_one_gpu(name, config_class, tmp_path, monkeypatch):
    """One process trains on one of four GPUs; transformers would count them all, and trl refuses more than one.

    The name in --push_to_hub, which transformers would take for true, does not reach its trainer.
    """
    given = {"model_name_or_path": "x", "output_dir": str(tmp_path / "out"), "push_to_hub": "me/tiny"}
    args = shipped.load(ROOT / f"recipes/{name}.py").Args(**given)
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    PartialState()
    accelerator = SimpleNamespace(device=torch.device("cuda"), mixed_precision="no", num_processes=1)
    try:
        config = trl_config(Run(args, accelerator), config_class)
        assert config.n_gpu == 1 and config.push_to_hub is False
    finally:
        PartialState._reset_state()


EXPERTS = "experts"  # stands for the folder of a mixture of experts
PACKED = ("--packing", "true", "--max_length", 200)
ARITHMETIC = ROOT / "data/arithmetic"
BESIDE_TRL = {
    "sft": {
        "padded": (),
        "packed": PACKED,
        "completion-only": ("--train_files", ARITHMETIC / "sft.jsonl", "--completion_only_loss", "true"),
        "answers": ("--assistant_only_loss", "auto"),
        "dft": ("--loss_type", "dft"),
        # The loss that balances experts depends on the micro-batch, so that is the step.
        "experts": ("--model_name_or_path", EXPERTS, "--per_device_train_batch_size", 8, "--router_aux_loss_coef", 0.5),
    },
    "dpo": {
        "sigmoid": (),
        "sigmoid and sft": ("--loss_type", "sigmoid", "sft", "--loss_weights", 1, 0.3),
        "ipo": ("--loss_type", "ipo"),
        "reference kept": ("--precompute_ref_log_probs", "false"),
    },
    "kto": {
        "kto": ("--undesirable_weight", 0.7),
        "apo": ("--loss_type", "apo_zero_unpaired", "--beta", 0.5),
        "experts": ("--model_name_or_path", EXPERTS, "--per_device_train_batch_size", 8, "--router_aux_loss_coef", 0.5),
    },
    "grpo": {
        "grpo": ("--loss_type", "grpo"),
        "dapo": ("--loss_type", "dapo", "--beta", 0.02),
        "dr_grpo": ("--loss_type", "dr_grpo", "--num_iterations", 2, "--save_steps", 4),
    },
}


@pytest.mark.parametrize(
    "name, flags",
    [
        pytest.param(name, flags, id=f"{name}-{case}")
        for name, cases in BESIDE_TRL.items()
        for case, flags in cases.items()
    ],
)
def test_weights_are_those_of_trl(forks, arguments, pairs, chats, tmp_path, name, flags):
    """After ten steps the weights are those of trl's own trainer and loop, though it takes each step as one micro-batch."""
    base = ("--model_name_or_path", chats / "base", "--max_steps", 10, "--per_device_train_batch_size", 4)
    more = {
        "sft": (),
        "dpo": ("--train_files", pairs / "pairs.jsonl", "--learning_rate", 1e-3),
        "kto": ("--train_files", pairs / "judged.jsonl", "--learning_rate", 1e-3),
        "grpo": (
            "--train_files", pairs / "prompts.jsonl", "--rewards", f"{pairs}/rewards.py:short", "--num_generations", 4,
            "--max_completion_length", 8, "--num_eval_prompts", 2, "--learning_rate", 1e-3,
        ),
    }[name]  # fmt: skip
    common = arguments if name == "sft" else arguments[:-2]  # without --assistant_only_loss
    given = [*common, *base, *more, *(chats / flag if flag == EXPERTS else flag for flag in flags)]
    if name == "grpo":
        place = given.index("--max_length")
        del given[place : place + 2]
    assert forks.run(tmp_path / "out", *given, script=CHILDREN / "beside_trl.py", config="single", RECIPE=name) == 0, (
        log_of(tmp_path / "out")[-3000:]
    )
    found = json.loads((tmp_path / "out/beside.json").read_text())
    # The models are in float64, but trl and we round the losses to fp32, in each of ten steps.
    assert found["moved"] > 1e-3 and found["apart"] < 1e-5 and found["norms"] < 1e-5, found
    if EXPERTS in flags:  # trl would let the exported model compute router logits
        config = json.loads((tmp_path / "out/export/config.json").read_text())
        assert (config["output_router_logits"], config["router_aux_loss_coef"]) == (False, 0.001)


def test_whole_steps():
    """DPO and GRPO take whole steps alone; a prompt has its answers side by side, in the steps that use them."""
    args = {
        "seed": 1,
        "per_device_train_batch_size": 2,
        "total_batch_size": 4,
        "max_steps": -1,
        "num_train_epochs": 1.5,
        "exclude_rows": "",
    }
    pairs = SimpleNamespace(**args, num_generations=1, num_iterations=1)
    order = [row for batch in WholeSteps(7, pairs, 0, 1) for row in batch]
    assert order == [row for step in range(2) for row in rows_of_step(step, 4, 7, 1)]
    assert num_whole_steps(pairs, 7) == 2  # 10 rows
    answers = SimpleNamespace(**args, num_generations=2, num_iterations=3)
    found = [[row for batch in WholeSteps(7, answers, rank, 2) for row in batch] for rank in range(2)]
    steps = [list(a + b) for a, b in zip(*(zip(*[iter(rows)] * 2, strict=True) for rows in found), strict=True)]
    wanted = [[row for row in rows_of_step(block, 2, 7, 1) for _ in range(2)] for block in range(5)]
    assert steps == [rows for rows in wanted for _ in range(3)] and num_whole_steps(answers, 7) == 15
    with pytest.raises(ConfigError, match=r"--num_train_epochs 0\.1 of 20 rows are 2, .* 4"):
        num_whole_steps(SimpleNamespace(**vars(pairs) | {"num_train_epochs": 0.1}), 20)


def rows_of(name: str, batch: dict[str, torch.Tensor], rows: list[int]) -> dict[str, torch.Tensor]:
    """Return some rows of a batch; of DPO, the chosen answers come first, then the rejected ones."""
    wanted = torch.tensor(rows + [row + 4 for row in rows])
    return {key: value[wanted] if name == "dpo" and len(value) == 8 else value[rows] for key, value in batch.items()}


@pytest.mark.parametrize(
    "name, given", [("sft", {}), ("dpo", {}), ("grpo", {}), ("grpo", {"importance_sampling_level": "sequence"})]
)
def test_logged_values_do_not_depend_on_micro_batches(chats, name, given):
    """A mean over tokens or pairs is that of the whole step, however it is divided: rows have 2 to 5 targets."""
    module = shipped.load(ROOT / f"recipes/{name}.py")
    sizes = {"max_prompt_length": 5, "max_completion_length": 6, "beta": 0.1} if name == "grpo" else {"max_length": 11}
    args = module.Args(model_name_or_path=str(chats / "base"), per_device_train_batch_size=4, **sizes, **given)
    trial = module.trial(args)
    trainer, generator = trial.loss_fn.__self__, torch.Generator().manual_seed(0)
    batch = {
        key: torch.randint(5, 90, value.shape, generator=generator) if key.endswith("_ids") else value
        for key, value in trial.batch.items()
    }
    kept = torch.arange(6) < torch.arange(2, 6)[:, None]
    if name == "sft":
        batch["labels"][:, 5:] = batch["input_ids"][:, 5:].masked_fill(~kept, -100)
        batch["labels"][:, :5] = -100
    elif name == "dpo":
        batch["completion_mask"][:, :5] = 0
        batch["completion_mask"][:, 5:] = torch.cat([kept, kept.flip(0)])
    else:
        batch |= {"completion_mask": kept.long(), "advantages": torch.tensor([1.0, -1, 2, -2])}
        shape = batch["completion_ids"].shape
        batch |= {f"{of}_per_token_logps": -5 - torch.rand(shape, generator=generator) for of in ("old", "ref")}
    model = AutoModelForCausalLM.from_pretrained(chats / "base")
    model.lm_head.weight.data *= 10  # else tokens are equally probable everywhere
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    found = []
    for division in ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[2], [0], [3], [1]]):
        if name == "sft":
            for rows in division:
                trial.loss_fn(model, rows_of(name, batch, rows))
            found.append(trainer.values(1))
            continue
        trainer.counted, trainer._metrics = [], {"train": defaultdict(list)}
        for rows in division:
            trainer.sum_and_count(model, rows_of(name, batch, rows))
        trainer.weigh()
        gathered = {key: sum(values) / len(values) for key, values in trainer._metrics["train"].items()}
        found.append({key: value for key, value in gathered.items() if key != "num_tokens"})
    assert len(found[0]) > 1 and found[0]["entropy"] > 0.1, found
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("name, config", [("sft", SFTConfig), ("dpo", DPOConfig), ("grpo", GRPOConfig)])
def test_flags_of_trl_are_kept_or_refused_by_name(name, config):
    """The page names each field of trl's own that is refused, and of those of transformers the ones that a loss would use."""
    page = (ROOT / "docs/names.md").read_text().partition("## Flags of trl")[2].partition("\n## ")[0]
    named = set(re.findall(r"`--(\w+)`", page))
    args = shipped.load(ROOT / f"recipes/{name}.py").Args
    inherited = {field.name for field in fields(TrainingArguments)}
    own = {field.name for field in fields(config)} - inherited
    assert own & args.owned_elsewhere.keys() <= named
    for field in named & inherited - set(TrainArgs.__dataclass_fields__):
        with pytest.raises(ConfigError, match=rf"--{field} .* is not an argument of the recipe: it is of the loop"):
            parse(args, [f"--{field}", "1"], world_size=1)


def test_flags_of_sft_are_read():
    """No trainer of trl is made for SFT, so what only its constructor reads would be ignored without a word."""
    files = [ROOT / "recipes/sft.py", *(ROOT / "src").rglob("*.py")]
    code = "".join(file.read_text() for file in files)
    flags = {field.name for field in fields(SFTConfig)} - {field.name for field in fields(TrainingArguments)}
    flags -= shipped.load(files[0]).Args.owned_elsewhere.keys()
    assert "max_length" in flags and flags - {*re.findall(r"\b(?:args|config|self)\.(\w+)", code)} == set()


@pytest.fixture(scope="module")
def pairs(chats) -> Path:
    """Folder with pairs of translations, of different lengths, with prompts alone, and with a reward."""
    rows = [json.loads(line)["messages"] for line in (chats / "chats.jsonl").read_text().splitlines()]
    files = (chats / f"{name}.jsonl" for name in ("judged", "pairs", "prompts"))
    with contextlib.ExitStack() as opened:
        judged, pairs, prompts = (opened.enter_context(file.open("w")) for file in files)
        for number, ((question, answer), (_, other)) in enumerate(pairwise(rows)):
            said = [question, answer if number % 3 else other]
            judged.write(json.dumps({"messages": said, "label": bool(number % 3)}) + "\n")
            if answer != other:
                pairs.write(json.dumps({"prompt": [question], "chosen": [answer], "rejected": [other]}) + "\n")
                prompts.write(json.dumps({"prompt": question["content"][:40]}) + "\n")
    (chats / "rewards.py").write_text(
        "def short(completions, **_):\n    return [-len(text) / 9 for text in completions]\n"
    )
    return chats


@pytest.mark.slow
def test_sft_in_4_bits(forks, arguments, chats, tmp_path):
    args = (*arguments, "--per_device_train_batch_size", 4, "--model_name_or_path", chats / "base")
    args = (*args, "--use_peft", "--lora_r", 4, "--lora_dropout", 0, "--load_in_4bit")
    for name, config in (("one", "single"), ("two", "fsdp_full")):
        assert forks.run(tmp_path / name, *args, config=config, FOUR_BITS_ON_CPU=1) == 0, log_of(tmp_path / name)[
            -3000:
        ]
    before, after = evaluations(tmp_path / "one")
    assert evaluations(tmp_path / "two") == pytest.approx([before, after], rel=1e-5) and after < before - 0.1
    for tensor in load_file(tmp_path / "two/export/adapter_model.safetensors").values():
        assert tensor.dtype == torch.float32 and not torch.equal(tensor, tensor.bfloat16().float())


@pytest.mark.parametrize(
    "adapters",
    [(), pytest.param(("--use_peft", "--lora_r", 4, "--merge_adapter"), marks=pytest.mark.slow)],
    ids=["full", "lora"],
)
def test_sft_is_interrupted_and_resumed(forks, arguments, chats, tmp_path, adapters):
    """After SIGKILL or an orderly stop, with dropout, a run continues bit for bit; its export has the last evaluation's loss."""
    args = (*arguments, "--per_device_train_batch_size", 2, "--model_name_or_path", chats / "base_with_dropout")
    args = (*args, *adapters)
    whole, out = tmp_path / "whole" / "out", tmp_path / "killed" / "out"
    for folder in (whole, out):
        folder.parent.mkdir()
    if adapters:
        assert forks.run(whole, *args) == 0, log_of(whole)[-3000:]
        assert forks.run(out, *args, "--dataloader_num_workers", 1, **STOP_AFTER_STEP_3) == 0, log_of(out)[-3000:]
        status = json.loads((out / "status.json").read_text())
        assert (status["state"], status["step"], status["reason"]) == ("stopped", 4, "SIGTERM")
    else:
        assert forks.run(whole, *args) == 0, log_of(whole)[-3000:]
        assert re.search(
            r"Strategy: FSDP2 full shard \| 2 x cpu.*\n(.|\n)*Step 6/6 Loss: \d.*, data wait", log_of(whole)
        )
        assert forks.run(out, *args, **IN_STEP_5) == -9, log_of(out)[-3000:]
        assert sorted(losses(out)) == [1, 2, 3, 4]
        rows = (chats / "chats.jsonl").read_text()
        (chats / "chats.jsonl").write_text("".join(reversed(rows.splitlines(keepends=True))))
        assert forks.run(out, *args) != 0
        (chats / "chats.jsonl").write_text(rows)
        said = log_of(out).rpartition("arguments that differ")[2]
        assert "the training data are others than the checkpoint's" in said and "Strategy: " not in said, "not at once"
    assert complete_checkpoints(out)[-1].name == ("checkpoint-4" if adapters else "checkpoint-3")
    assert forks.run(out, *args) == 0, log_of(out)[-3000:]
    assert "Resumed" in log_of(out)
    assert losses(out) == losses(whole) and evaluations(out) == evaluations(whole)
    assert json.loads((out / "status.json").read_text())["state"] == "finished"

    export = out / "export"
    model, tokenizer = (kind.from_pretrained(export) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.use_cache, "trl's settings for training are not the model's"
    assert tokenizer.chat_template == {"default": TEMPLATE, "tool_use": f"Tools. {TEMPLATE}"}
    assert loss_of(model, tokenizer, out) == pytest.approx(evaluations(out)[-1], rel=1e-5)
    if adapters:
        plain = AutoModelForCausalLM.from_pretrained(chats / "base_with_dropout")
        assert loss_of(plain, tokenizer, out) == pytest.approx(evaluations(out)[0], rel=1e-5)
        with_adapter = PeftModel.from_pretrained(plain, export / "adapter")
        assert loss_of(with_adapter, tokenizer, out) == pytest.approx(evaluations(out)[-1], rel=1e-5)


@pytest.fixture(scope="module")
def plain_base(chats) -> Path:
    """Base without a chat template, with a token that may end a turn; and a tokenizer with a template and more tokens."""
    tokenizer = AutoTokenizer.from_pretrained(chats / "base")
    tokenizer.chat_template = None
    tokenizer.add_tokens(["<|end|>"])
    folder = save_base(chats / "plain", tokenizer)
    other = AutoTokenizer.from_pretrained(chats / "base")
    other.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|stop|>"], "eos_token": "<|stop|>"})
    other.chat_template = TEMPLATE.replace("</s>", "<|stop|>").replace("<s>", "<|user|>")
    other.save_pretrained(chats / "other")
    (chats / "chat.jinja").write_text(TEMPLATE.replace("</s>", "<|end|>"))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("source", ["chat.jinja", "other"])
def test_what_trl_changes_is_exported(forks, arguments, chats, plain_base, tmp_path, source):
    """Template, end token and the embedding's new rows are exported as they were trained, also after a resume."""
    args = (*arguments, "--model_name_or_path", plain_base, "--chat_template_path", chats / source)
    args += ("--per_device_train_batch_size", 2)
    if source == "chat.jinja":
        args += ("--eos_token", "<|end|>")
    out = tmp_path / "out"
    assert forks.run(out, *args, **STOP_AFTER_STEP_3) == 0, log_of(out)[-3000:]
    assert forks.run(out, *args) == 0 and "Resumed" in log_of(out), log_of(out)[-3000:]
    tokenizer, model = (kind.from_pretrained(out / "export") for kind in (AutoTokenizer, AutoModelForCausalLM))
    wanted = chats / source if source == "chat.jinja" else chats / source / "chat_template.jinja"
    assert tokenizer.chat_template == wanted.read_text()
    assert tokenizer.eos_token == ("<|end|>" if source == "chat.jinja" else "<|stop|>")
    assert model.config.eos_token_id == tokenizer.eos_token_id
    ends = model.generation_config.eos_token_id
    assert tokenizer.eos_token_id in (ends if isinstance(ends, list) else [ends])
    assert model.config.use_cache and model.config.vocab_size == model.get_input_embeddings().num_embeddings
    assert loss_of(model, tokenizer, out) == pytest.approx(evaluations(out)[-1], rel=1e-5)
    if source == "other":  # adapters would belong to another model than they were trained in
        refused, said = (tmp_path / "lora", "--use_peft"), "error: --chat_template_path"
    else:
        (chats / source).write_text(TEMPLATE.replace("</s>", " <|end|>"))
        refused, said = (out, "--max_steps", STEPS + 1), "checkpoint-6 was trained with another chat template"
    assert forks.run(refused[0], *args, *refused[1:], config="single") == 2
    assert said in log_of(refused[0]), log_of(refused[0])[-3000:]


def loss_of(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, out: Path, side: str = "test") -> float:
    """Compute a model's loss in one process, in nats per token, on the rows that the run held out, or trained on."""
    module = shipped.load(SFT)
    args = parse(module.Args, ["--config", str(out / "args.yaml")], world_size=2)
    loss_sum, num_targets = 0.0, 0
    for row in load_sides(args, tokenizer, set())[0][side]:
        ids = torch.tensor([tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"][:64]])
        with torch.no_grad():
            loss_sum += model.eval()(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        num_targets += ids.shape[1] - 1
    return loss_sum / num_targets


def test_packed_rows_do_not_see_each_other(forks, arguments, chats, tmp_path):
    """The losses of training and of held-out rows are the same when each row is alone, whatever the kernel."""
    args = (*arguments, "--model_name_or_path", chats / "base", "--max_length", 1024, "--max_steps", 1)
    runs = {
        "apart": ("--packing", "false"),
        "packed": ("--packing", "true"),
        "documents": ("--packing", "true", "--attn_implementation", "documents"),
    }
    for name, flags in runs.items():
        assert forks.run(tmp_path / name, *args, *flags, config="single") == 0, log_of(tmp_path / name)[-3000:]
    before = {name: evaluations(tmp_path / name)[0] for name in runs}
    assert before["documents"] == pytest.approx(before["packed"], rel=1e-5)
    assert before["packed"] == pytest.approx(before["apart"], rel=1e-5)
    assert losses(tmp_path / "documents") == pytest.approx(losses(tmp_path / "packed"), rel=1e-5)
    grad_norms = [read_metrics(tmp_path / name)[1]["grad_norm"] for name in ("documents", "packed")]
    assert grad_norms[0] == pytest.approx(grad_norms[1], rel=1e-5)


def test_ranks_share_rows(forks, arguments, chats, tmp_path):
    """Two ranks that share each row, of any length, train and evaluate as one process does."""
    args = (
        *arguments, "--packing", "true", "--max_length", 131, "--model_name_or_path", chats / "base", "--max_steps",
        3,
    )  # fmt: skip
    args += ("--attn_implementation", "documents", "--per_device_train_batch_size", 2, "--save_steps", 0)
    found = {}
    for config in ("single", "fsdp_long"):
        assert forks.run(tmp_path / config, *args, config=config) == 0, log_of(tmp_path / config)[-3000:]
        norms = [record["grad_norm"] for record in read_metrics(tmp_path / config) if "grad_norm" in record]
        found[config] = [*losses(tmp_path / config).values(), *norms, *evaluations(tmp_path / config)]
    assert found["fsdp_long"] == pytest.approx(found["single"], rel=1e-5)
    assert "rows shared by 2" in log_of(tmp_path / "fsdp_long")


@pytest.fixture(scope="module")
def chess(tmp_path_factory) -> tuple:
    """Arguments for both chess recipes: a few real games, and a model that only knows the names of moves."""
    folder = tmp_path_factory.mktemp("chess")
    games = pq.read_table(ROOT / "data/chess/games_20k.parquet").slice(0, 60).to_pylist()
    (folder / "games.jsonl").write_text("".join(json.dumps({"Moves": game["Moves"]}) + "\n" for game in games))
    base = save_base(folder / "base", new_word_tokenizer(rules.all_uci_moves()))
    return (
        "--model_name_or_path", base, "--train_files", folder / "games.jsonl", "--heldout_share", 0.2,
        "--num_positions", 12, "--data_cache_dir", folder / "cache", "--max_steps", STEPS, "--save_steps", 3,
        "--logging_steps", 1, "--learning_rate", 1e-2, "--async_save", "false", "--per_device_eval_batch_size", 4,
    )  # fmt: skip


def test_rewards():
    prompts, completions = ["", "e2e4", "e2e4", "e2e4", "e2e4"], ["e2e4 e7e5", "e7e5", "e2e4", "e9e5", ""]
    found = [reward(prompts=prompts, completions=completions, move=["e2e4"] * 5) for reward in REWARDS]
    assert found == [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0]]


def test_reward_by_an_engine():
    prompts, completions = ["", "", "", "", "d2d4"], ["e2e4 e7e5", "a2a3", "f2f3", "e2e5", "d7d5"]
    with stockfish_reward(str(ENGINE), nodes=1) as reward:
        found = reward(prompts=prompts, completions=completions, move=["e2e4"] * 5)
    assert found == pytest.approx([1, 0.5, 0, 0, 1 - 50 / 300])


@pytest.mark.skipif(STOCKFISH is None, reason="Stockfish is not installed")
def test_reward_by_stockfish():
    """Stockfish sees a mate in one, always with the same result, and a lost queen."""
    prompts = ["f2f3 e7e5 g2g4", "f2f3 e7e5 g2g4", "e2e4 e7e5", "e2e4 e7e5 d1h5 g8f6"]
    completions = ["d8h4", "a7a6", "g1f3", "h5f7"]
    with stockfish_reward(STOCKFISH, nodes=10_000) as reward:
        found = reward(prompts=prompts, completions=completions)
        assert found == reward(prompts=prompts, completions=completions)
    mate, missed, developed, queen = found
    assert (mate, missed, queen) == (1, 0, 0) and developed > 0.9


def test_which_moves_make_a_pair():
    position = {"prefix": ["e2e4"], "move": "e7e5"}
    moves = ["e7e5", "c7c5", "e2e4", "no move", ""]
    assert [is_worse(position, move, "illegal") for move in moves] == [False, False, True, True, True]
    assert [is_worse(position, move, "not_played") for move in moves] == [False, True, True, True, True]


def whole_run(forks, tmp_path_factory, script: Path, *args: object) -> tuple[tuple, Path]:
    """Return arguments and output of a run that two tests use."""
    out = tmp_path_factory.mktemp(script.stem) / "out"
    forks.succeed(out, *args, script=script)
    return args, out


@pytest.fixture(scope="module")
def dpo(forks, chess, tmp_path_factory) -> tuple[tuple, Path]:
    sizes = ("--num_train_positions", 60, "--total_batch_size", 8, "--per_device_train_batch_size", 2)
    return whole_run(forks, tmp_path_factory, DPO, *chess, *sizes)


@pytest.fixture(scope="module")
def grpo(forks, chess, tmp_path_factory) -> tuple[tuple, Path]:
    sizes = ("--num_train_positions", 60, "--total_batch_size", 64, "--per_device_train_batch_size", 16)
    rewards = ("--num_generations", 16, "--stockfish", ENGINE)
    return whole_run(forks, tmp_path_factory, GRPO, *chess, *sizes, *rewards)


@pytest.mark.slow
@pytest.mark.parametrize("script", [DPO, GRPO], ids=["dpo", "grpo"])
def test_killed(killed_and_resumed, request, script):
    """The export is that of the run that was not killed; tests/test_dpo.py and tests/test_grpo.py kill others."""
    args, whole = request.getfixturevalue("dpo" if script == DPO else "grpo")
    _, out = killed_and_resumed(script, *args, whole=whole)
    exported, wanted = (load_file(folder / "export/model.safetensors") for folder in (out, whole))
    assert exported.keys() == wanted.keys() and all(torch.equal(exported[name], wanted[name]) for name in wanted)


def test_dpo(forks, dpo, chess, tmp_path):
    args, whole = dpo
    assert re.search(r"Rows to train on: \d+ rows; 0 without a target; left out 0; cut 0; ", log_of(whole))
    assert re.search(r"Evaluation\n\n  row 1: \d+ tokens, 0 targets\n", (whole / "rows.txt").read_text())
    # Policy and reference are the same model before the first step, on all ranks.
    assert losses(whole)[1] == pytest.approx(math.log(2), abs=1e-6)
    assert losses(whole)[STEPS] < 0.66

    # If a run is killed while it makes pairs, in the middle of a line, the pairs are the same.
    other = tmp_path / "out"
    (file,) = whole.glob("pairs-*.jsonl")
    partial = other / file.with_suffix(".partial").name
    fault = {"event": "open", "path": partial.name, "count": 2, "rank": 0, "everyone": True}
    assert forks.run(other, *args, script=DPO, TOY_FAULT=json.dumps(fault)) == -9, log_of(other)[-3000:]
    lines = partial.read_text().splitlines(keepends=True)
    assert 0 < len(lines) < len(file.read_text().splitlines())
    partial.write_text("".join(lines[:-1]) + lines[-1][:20])
    single = {"num_processes": 1, "config": "single"}
    assert forks.run(other, *args, script=DPO, **single) == 0, log_of(other)[-3000:]
    assert (other / file.name).read_text() == file.read_text()
    assert losses(other) == pytest.approx(losses(whole), rel=1e-5), "one trajectory"
    tokenizer = AutoTokenizer.from_pretrained(whole / "export")
    pairs = [json.loads(line) for line in file.read_text().splitlines()]
    for pair in pairs:
        assert pair["chosen"] in tokenizer.get_vocab() and pair["chosen"] != pair["rejected"]

    # The exported model prefers the chosen moves, after the begin token alone.
    base, exported = (AutoModelForCausalLM.from_pretrained(p) for p in (chess[1], whole / "export"))
    start = torch.tensor([[tokenizer.bos_token_id]])
    chosen, rejected = (
        torch.tensor([tokenizer.convert_tokens_to_ids(pair[name] or "</s>") for pair in pairs])
        for name in ("chosen", "rejected")
    )
    margins = []
    for model in (base, exported):
        with torch.no_grad():
            logits = model(start).logits[0, -1]
        margins.append((logits[chosen] - logits[rejected]).mean().item())
    assert margins[1] > margins[0] + 0.5


def test_chess_pairs_are_not_prepared(chess, tmp_path, capsys):
    """The model makes them; where only data are wanted, the positions of the evaluation are shown."""
    arguments = (*chess, "--num_train_positions", 30, "--output_dir", tmp_path / "out")
    recipe.prepare_data([str(part) for part in (DPO, *arguments)])
    assert re.search(r"Evaluation\n\n  row 1: \d+ tokens, 0 targets\n", capsys.readouterr().out)


@pytest.mark.slow
def test_dpo_of_adapters(forks, chess, tmp_path):
    """Policy and reference are the same model before the first step here too, and no reference stays in memory."""
    out = tmp_path / "out"
    args = ("--num_train_positions", 30, "--total_batch_size", 8, "--per_device_train_batch_size", 4)
    args = (*chess, *args, "--use_peft", "--lora_r", 4, "--lora_dropout", 0, "--max_steps", 2, "--reject", "not_played")
    assert forks.run(out, *args, script=DPO) == 0, log_of(out)[-3000:]
    assert losses(out)[1] == pytest.approx(math.log(2), abs=1e-6)
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(chess[1]), out / "export")


def test_grpo(grpo, chess):
    _, out = grpo
    records = [record for record in read_metrics(out) if "loss" in record]
    assert re.search(r"Rows to train on: \d+ rows; left out \d+; longest \d+; ", log_of(out))
    assert re.search(r"Evaluation\n\n  row 1: \d+ tokens, 0 targets\n", (out / "rows.txt").read_text())
    assert any(record["grad_norm"] > 0.01 for record in records), "no group had different rewards"
    for record in records:
        names = [*(reward.__name__ for reward in REWARDS), "is_good_move"]
        weighted = [w * record[f"rewards/{name}/mean"] for w, name in zip((0.2, 1.0, 0.5, 1.0), names, strict=True)]
        assert record["reward"] == pytest.approx(sum(weighted), rel=1e-5)
        assert 0 <= record["rewards/is_good_move/mean"] <= record["rewards/is_legal_move/mean"]
        assert record["completions/max_length"] == 1, "one move"
    assert re.search(r"Step 6/6 Loss: .*, data wait: \d+\.\d%, reward: \d\.\d{3}", log_of(out))
    base, exported = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (chess[1], out / "export"))
    assert all(not torch.equal(base[name], exported[name]) for name in base if "proj" in name)


def test_all_problems_at_once(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError) as caught:
        preflight(
            ["accelerate_configs/fsdp_full.yaml", "recipes/sft.py", "--gradient_checkpointing", "true", "--bf16",
             "--save_strategy", "no", "--pakcing", "true", "--use_peft", "--lora_r", "0", "--total_batch_size", "7",
             "--packing_strategy", "bfd", "--train_files", "no.jsonl", "--chat_template_path", "no.jinja", "--padding_free"]
        )  # fmt: skip
    said = str(caught.value)
    for problem in (
        "--gradient_checkpointing (on the command line) is not an argument of the recipe: set `fsdp_activation_checkp",
        "--bf16 (on the command line) is not an argument of the recipe: set `mixed_precision: bf16` in",
        "--save_steps, --eval_steps and --logging_steps say when", "unknown argument 'pakcing' on the command line; did "
        "you mean 'packing'?", "--lora_r is 0", "--total_batch_size 7 is not a multiple", "no.jsonl: no such file",
        "--chat_template_path no.jinja: no such file", "--model_name_or_path is missing",
        "--padding_free without --packing would not cut rows",
    ):  # fmt: skip
        assert problem in said, said
    with pytest.raises(ConfigError) as caught:
        preflight(
            ["accelerate_configs/fsdp_full.yaml", "recipes/chess_grpo.py", "--model_name_or_path", "no/model",
             "--steps_per_generation", "2", "--num_generations", "3", "--reward_weights", "1", "--num_iterations", "3",
             "--stockfish", "no-engine",
             "--train_files", "data/chess/games_20k.parquet"]
        )  # fmt: skip
    said = str(caught.value)
    for problem in (
        "--steps_per_generation (on the command line) is not an argument of the recipe", "--save_steps 500 is not a mult",
        "--total_batch_size 128 is not a multiple of --num_generations 3", "--reward_weights has 1 numbers; there are 4",
        "--stockfish no-engine: there is no such program; install it",
    ):  # fmt: skip
        assert problem in said, said


def test_held_out_by_hash(chats, tmp_path):
    """Rows that begin alike lie on one side, in any order and among any other rows; an empty side is an error."""
    module, tokenizer = shipped.load(SFT), AutoTokenizer.from_pretrained(chats / "base")
    formats = {
        "text": lambda i, copy: {"text": f"Text {i}".upper() if copy else f" Text  {i}\n"},
        "prompt": lambda i, copy: {"prompt": f"Question {i}", "completion": f"{copy}"},
        "chat": lambda i, copy: {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": f"Question {i}"},
                {"role": "assistant", "content": f"Answer {copy}"},
            ]
        },
        "greeting": lambda i, copy: {"messages": [{"role": "assistant", "content": f"Good morning {i}"}]},
    }

    def sides(name: str, rows: list[dict]) -> tuple[list[str], list[str]]:
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        argv = ("--model_name_or_path", str(chats / "base"), "--train_files", str(file), "--heldout_share", "0.3")
        split, _ = load_sides(parse(module.Args, argv, world_size=1), tokenizer, set())
        (asked,) = {"text", "prompt", "messages"} & set(rows[0])
        return tuple([beginning(row, asked) for row in split[side]] for side in ("train", "test"))

    for name, row in formats.items():
        train, test = sides(name, [row(i, copy) for copy in range(3) for i in range(100)])
        same = {" ".join(text.casefold().split()) for text in test}
        assert not same & {" ".join(text.casefold().split()) for text in train}, name
        assert 15 <= len(same) <= 45 and len(test) == 3 * len(same), name
        again = sides(f"{name}-reversed", [row(i, 0) for i in reversed(range(-5, 100))])[1]
        assert same <= {" ".join(text.casefold().split()) for text in again}
        with pytest.raises(ConfigError, match=r"none of 3 rows is left to (train|evaluate) on: rows that begin alike"):
            sides(f"{name}-one", [row(1, copy) for copy in range(3)])


def test_what_a_resume_must_not_change(chess, chats, arguments, tmp_path):
    """Arguments that decide which rows a step trains on, or their content, must not change on a resume."""
    for script, args, changes in (
        (DPO, chess, {"max_length": "20"}),
        (GRPO, chess, {"max_prompt_length": "20", "num_generations": "4"}),
        (SFT, (*arguments, "--model_name_or_path", chats / "base"),
         {"dataset_text_field": "story", "chat_template_path": "no/model", "eos_token": "</s>", "truncation_mode": "keep_end",
          "shuffle_dataset": "true", "max_length": "20"}),
    ):  # fmt: skip
        module = shipped.load(script)
        argv = [str(arg) for arg in args]
        parse(module.Args, argv, world_size=1).save(tmp_path / "args.yaml")
        changed = [part for name, value in changes.items() for part in (f"--{name}", value)]
        with pytest.raises(ConfigError) as caught:
            check_arguments(tmp_path, parse(module.Args, [*argv, *changed], world_size=1))
        assert set(re.findall(r"- --(\w+) was", str(caught.value))) == changes.keys(), script


def test_machines_with_other_rows_to_evaluate_on(forks, chats, arguments, tmp_path):
    """They are refused before the model is sharded: with unequal numbers of rows, ranks would wait for each other."""
    rows = (chats / "chats.jsonl").read_text().splitlines(keepends=True)
    for machine, number in enumerate((9, 2)):
        folder = tmp_path / f"machine-{machine}"
        folder.mkdir()
        (folder / "train.jsonl").write_text("".join(rows[9:]))
        (folder / "eval.jsonl").write_text("".join(rows[:number]))
    out, files = tmp_path / "out", ("--train_files", "train.jsonl", "--eval_files", "eval.jsonl")
    args = (*arguments, "--model_name_or_path", chats / "base", *files)
    assert forks.run(out, *args, TESTED_MACHINES=tmp_path) == 2, log_of(out)[-3000:]
    assert "the checksum of the rows is " in log_of(out) and "Strategy: " not in log_of(out)


def test_a_resume_keeps_its_targets(chats, arguments, tmp_path):
    """Left open, --assistant_only_loss is that of the checkpoint, which earlier versions wrote as a bool; what it means counts."""
    module = shipped.load(SFT)
    argv = [*map(str, arguments), "--model_name_or_path", str(chats / "base")]
    messages = Features({"messages": List({"role": Value("string"), "content": Value("string")})})
    texts = Features({"text": Value("string")})
    for saved, given, features, resumes in (
        (False, "auto", messages, "false"), (True, "auto", messages, "true"), ("auto", "true", messages, "true"),
        (False, "auto", texts, "false"), (False, "true", messages, None), ("auto", "false", messages, None),
    ):  # fmt: skip
        parse(module.Args, argv, world_size=1).save(tmp_path / "args.yaml")
        values = yaml.safe_load((tmp_path / "args.yaml").read_text())
        (tmp_path / "args.yaml").write_text(yaml.safe_dump(values | {"assistant_only_loss": saved}))
        args = parse(module.Args, [*argv, "--assistant_only_loss", given], world_size=1)
        if given == "auto":
            assert changed_arguments(tmp_path, args) == {}, "the same command, which goes on wherever it began"
        check_arguments(tmp_path, args)
        if resumes:
            check_same_targets(args, features, tmp_path)
            assert args.assistant_only_loss == resumes
        else:
            with pytest.raises(ConfigError, match=rf"was trained on .*; give {saved is not False}".lower()):
                check_same_targets(args, features, tmp_path)


def test_fewer_rows_than_a_step(forks, arguments, chats, tmp_path):
    """One epoch of them is one step, in which each row counts once."""
    out = tmp_path / "out"
    size = ("--total_batch_size", 200, "--per_device_train_batch_size", 50, "--max_steps", -1, "--num_train_epochs", 1)
    assert forks.run(out, *arguments, *size, "--model_name_or_path", chats / "base") == 0, log_of(out)[-3000:]
    (step,) = (record for record in read_metrics(out) if "loss" in record)
    model, tokenizer = (kind.from_pretrained(chats / "base") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert step["loss"] == pytest.approx(loss_of(model, tokenizer, out, "train"), rel=1e-5)


@pytest.mark.parametrize(
    "flags, said",
    [
        ((), r"--eos_token '<\|nothing\|>' .*--new_tokens '<\|nothing\|>'"),
        (("--chat_template_path",), r"--eos_token '<\|nothing\|>' .* give one"),
    ],
    ids=["by us", "by trl"],  # a model whose template is taken may bring the token
)
def test_an_end_that_is_no_token_is_one_message(forks, arguments, chats, tmp_path, flags, said):
    args = (*arguments, "--model_name_or_path", chats / "base", "--eos_token", "<|nothing|>")
    args = (*args, *flags, *[chats / "base" for _ in flags])
    assert forks.run(tmp_path / "out", *args, config="single") == 2
    assert re.search(f"\nerror: {said}", log_of(tmp_path / "out")), log_of(tmp_path / "out")[-3000:]


def test_rows_that_take_too_long_to_tokenise(chats, arguments, monkeypatch, tmp_path):
    """Other processes wait for them in a collective; a dataset's files count as those of --train_files do."""
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "rows"
    folder.mkdir()
    with (folder / "large.jsonl").open("w") as file:
        file.truncate(7_200_000_000)  # a hole, which takes no space
    base = ["--model_name_or_path", str(chats / "base"), "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]

    def said(recipe: str, *args: str) -> str:
        return preflight(["accelerate_configs/fsdp_full.yaml", f"recipes/{recipe}.py", *base, *args])[0]

    files = ("--train_files", str(folder / "large.jsonl"))
    line = "7.2 GB of rows take about 120 minutes"
    assert re.search(rf"{line} .* 1800 s \(--ddp_timeout\)", said("sft", *files))
    assert line in said("dpo", *files) and line in said("sft", "--dataset_name", str(folder))
    assert line not in said("sft", *files, "--ddp_timeout", "7201")
    assert line not in said("sft", *files, "--dataset_num_proc", "8")
    assert "to tokenise" not in said("sft", *map(str, arguments))


def test_preflight_and_help(chats, arguments, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    args = [*map(str, arguments), "--model_name_or_path", str(chats / "base"), "--output_dir", str(tmp_path / "out")]
    said, _ = preflight(["accelerate_configs/fsdp_full.yaml", "recipes/sft.py", *args])
    assert re.search(r"Ready: fsdp_full.yaml with 2 processes; 8 sequences a step(.|\n)*Parameters: [\d,]+;", said)
    module = shipped.load(SFT)
    for template, needed in (("other/model", ["other/model"]), ("a.jinja", [])):
        named, _ = resolve(module.Args, [*args, "--chat_template_path", template], world_size=1)
        needs = [need.name for need in module.requirements(named).needs]
        assert needs == [str(chats / "base"), *needed], "downloaded beforehand"
    with pytest.raises(SystemExit):
        parse(shipped.load(SFT).Args, ["--help"], world_size=1)
    shown = capsys.readouterr().out
    assert "--packing" in shown and "--total_batch_size" in shown
    assert "--gradient_checkpointing" not in shown and "--save_strategy" not in shown
