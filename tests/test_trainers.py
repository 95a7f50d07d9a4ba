"""Tests of the recipes on trl's trainers: one trajectory under every sharding, kill and resume, export, as for the others.

The base is a Llama of two layers, with weights of a useful size; a run is 6 steps and saves after 3.
"""

import json
import re
from collections import defaultdict
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate import PartialState
from conversations import TEMPLATE, translations
from datasets import Features, List, Value
from helpers import (
    CHILDREN,
    IN_STEP_5,
    ROOT,
    SHORT_RUN,
    STEPS,
    evaluations,
    log_of,
    losses,
    read_metrics,
    refused,
    refuses,
    write_rows,
)
from peft import PeftModel
from tiny import save_base
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, TrainingArguments
from trl import DPOConfig, GRPOConfig, SFTConfig
from trl.trainer.utils import add_fused_lm_head

from accelerate_recipes import recipe
from accelerate_recipes.args import TrainArgs, parse, resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint.files import complete_checkpoints
from accelerate_recipes.checkpoint.resume import changed_arguments, settle_arguments
from accelerate_recipes.conversations.settings import trl_config
from accelerate_recipes.conversations.supervised import check_same_rendering, load_sides
from accelerate_recipes.conversations.whole_steps import WholeSteps, num_whole_steps
from accelerate_recipes.data.heldout import beginning
from accelerate_recipes.data.rows import rows_of_step
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.run import Run
from recipe_tools.preflight import preflight

SFT = SCRIPT = ROOT / "recipes/sft.py"
# One rank and its worker get the signal when the rank would log step 3. The shell that sends it is one of them.
STOP_AFTER_STEP_3 = {"TOY_FAULT": json.dumps({
    "event": "open", "path": "/out/metrics.jsonl", "count": 6, "rank": 0,
    "command": "trap '' TERM; pkill -TERM -P $PPID; kill -TERM $PPID",
})}  # fmt: skip


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> Path:
    """Folder with translations as conversations, and with bases with and without dropout."""
    folder = tmp_path_factory.mktemp("chats")
    chats, tokenizer = translations(120)
    save_base(folder / "base", tokenizer)
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": f"Tools. {TEMPLATE}"}
    save_base(folder / "base_with_dropout", tokenizer, attention_dropout=0.1)
    save_base(folder / "experts", tokenizer, model_type="mixtral")
    write_rows(folder / "chats.jsonl", ({"messages": messages} for messages in chats))
    return folder


@pytest.fixture(scope="module")
def arguments(chats) -> tuple:
    return (
        "--train_files", chats / "chats.jsonl", "--max_length", 64, *SHORT_RUN, "--total_batch_size", 8,
        "--heldout_share", 0.1, "--per_device_eval_batch_size", 5, "--assistant_only_loss", "false",
    )  # fmt: skip


@pytest.mark.parametrize("name, config_class", [("sft", SFTConfig), ("dpo", DPOConfig), ("grpo", GRPOConfig)])
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


FAST = ("padded", "packed", "sigmoid", "kto", "dapo")


@pytest.mark.parametrize("name, flags", [
    pytest.param(name, flags, id=f"{name}-{case}", marks=() if case in FAST else pytest.mark.slow)
    for name, cases in BESIDE_TRL.items() for case, flags in cases.items()
])  # fmt: skip
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
    forks.succeed(tmp_path / "out", *given, script=CHILDREN / "beside_trl.py", config="single", RECIPE=name)
    found = json.loads((tmp_path / "out/beside.json").read_text())
    # The models are in float64, but trl and we compute the losses in fp32, in each of ten steps; that of SFT by two functions.
    most = 5e-5 if name == "sft" else 1e-5
    assert found["moved"] > 1e-3 and found["apart"] < most and found["norms"] < 1e-5, found
    if EXPERTS in flags:  # trl would let the exported model compute router logits
        config = json.loads((tmp_path / "out/export/config.json").read_text())
        assert (config["output_router_logits"], config["router_aux_loss_coef"]) == (False, 0.001)


def test_whole_steps():
    """DPO and GRPO take whole steps alone; a prompt has its answers side by side, in the steps that use them."""
    args = {
        "seed": 1, "per_device_train_batch_size": 2, "total_batch_size": 4, "max_steps": -1, "num_train_epochs": 1.5,
    }  # fmt: skip
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
    ids = {key: value for key, value in trial.batch.items() if key.endswith("_ids")}
    batch = trial.batch | {k: torch.randint(5, 90, value.shape, generator=generator) for k, value in ids.items()}
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
    found = {"judged": [], "pairs": [], "prompts": []}
    for number, ((question, answer), (_, other)) in enumerate(pairwise(rows)):
        found["judged"].append({"messages": [question, answer if number % 3 else other], "label": bool(number % 3)})
        if answer != other:
            found["pairs"].append({"prompt": [question], "chosen": [answer], "rejected": [other]})
            found["prompts"].append({"prompt": question["content"][:40]})
    for name, some in found.items():
        write_rows(chats / f"{name}.jsonl", some)
    reward = "def short(completions, **_):\n    return [-len(text) / 9 for text in completions]\n"
    (chats / "rewards.py").write_text(reward)
    return chats


@pytest.mark.parametrize(
    "adapters",
    [(), pytest.param(("--use_peft", "--lora_r", 4, "--merge_adapter"), marks=pytest.mark.slow)],
    ids=["full", "lora"],
)
def test_sft_is_interrupted_and_resumed(forks, arguments, chats, tmp_path, adapters):
    """After SIGKILL or an orderly stop, with dropout, a run continues bit for bit; its export has the last evaluation's loss."""
    base = ("--model_name_or_path", chats / "base_with_dropout")
    args = (*arguments, "--per_device_train_batch_size", 2, *base, *adapters)
    whole, out = tmp_path / "whole" / "out", tmp_path / "killed" / "out"
    for folder in (whole, out):
        folder.parent.mkdir()
    forks.succeed(whole, *args)
    if adapters:
        forks.succeed(out, *args, "--dataloader_num_workers", 1, **STOP_AFTER_STEP_3)
        status = json.loads((out / "status.json").read_text())
        assert (status["state"], status["step"], status["reason"]) == ("stopped", 4, "SIGTERM")
    else:
        assert re.search(r"Strategy: FSDP2 full shard \| 2 x cpu(.|\n)*Step 6/6 Loss: \d.*, data wait", log_of(whole))
        assert forks.run(out, *args, **IN_STEP_5) == -9, log_of(out)[-3000:]
        assert sorted(losses(out)) == [1, 2, 3, 4]
        rows = (chats / "chats.jsonl").read_text()
        (chats / "chats.jsonl").write_text("".join(reversed(rows.splitlines(keepends=True))))
        assert forks.run(out, *args) != 0
        (chats / "chats.jsonl").write_text(rows)
        said = log_of(out).rpartition("arguments that differ")[2]
        assert "the training data are others than the checkpoint's" in said and "Strategy: " not in said, "not at once"
    assert complete_checkpoints(out)[-1].name == ("checkpoint-4" if adapters else "checkpoint-3")
    forks.succeed(out, *args)
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
def test_what_trl_changes_is_exported(forks, arguments, chats, plain_base, tmp_path, out, source):
    """Template, end token and the embedding's new rows are exported as they were trained, also after a resume."""
    args = (*arguments, "--model_name_or_path", plain_base, "--chat_template_path", chats / source)
    args += ("--per_device_train_batch_size", 2)
    if source == "chat.jinja":
        args += ("--eos_token", "<|end|>")
    forks.succeed(out, *args, **STOP_AFTER_STEP_3)
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


def loss_of(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, out: Path) -> float:
    """Compute a model's loss in one process, in nats per token, on the rows that the run held out."""
    module = shipped.load(SFT)
    args = parse(module.Args, ["--config", str(out / "args.yaml")], world_size=2)
    loss_sum, num_targets = 0.0, 0
    for row in load_sides(args, tokenizer, set())[0]["test"]:
        ids = torch.tensor([tokenizer.apply_chat_template(row["messages"], return_dict=True)["input_ids"][:64]])
        with torch.no_grad():
            loss_sum += model.eval()(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        num_targets += ids.shape[1] - 1
    return loss_sum / num_targets


@pytest.mark.slow
def test_ranks_share_rows(forks, arguments, chats, tmp_path):
    """Two ranks that share each row, of any length, train and evaluate as one process does."""
    args = (
        *arguments, "--packing", "true", "--max_length", 131, "--model_name_or_path", chats / "base", "--max_steps",
        3,
    )  # fmt: skip
    args += ("--attn_implementation", "documents", "--per_device_train_batch_size", 2, "--save_steps", 0)
    found = {}
    for config in ("single", "fsdp_long"):
        forks.succeed(tmp_path / config, *args, config=config)
        norms = [record["grad_norm"] for record in read_metrics(tmp_path / config) if "grad_norm" in record]
        found[config] = [*losses(tmp_path / config).values(), *norms, *evaluations(tmp_path / config)]
    assert found["fsdp_long"] == pytest.approx(found["single"], rel=1e-5)
    assert "rows shared by 2" in log_of(tmp_path / "fsdp_long")


def test_all_problems_at_once(at_the_root):
    command = (
        "accelerate_configs/fsdp_full.yaml", "recipes/sft.py", "--gradient_checkpointing", "true", "--bf16",
        "--save_strategy", "no", "--pakcing", "true", "--use_peft", "--lora_r", "0", "--total_batch_size", "7",
        "--packing_strategy", "bfd", "--train_files", "no.jsonl", "--chat_template_path", "no.jinja", "--padding_free",
    )  # fmt: skip
    with refused(
        "--gradient_checkpointing (on the command line) is not an argument of the recipe: set `fsdp_activation_checkp",
        "--bf16 (on the command line) is not an argument of the recipe: set `mixed_precision: bf16` in",
        "--save_steps, --eval_steps and --logging_steps say when", "unknown argument 'pakcing' on the command line; did "
        "you mean 'packing'?", "--lora_r is 0", "--total_batch_size 7 is not a multiple", "no.jsonl: no such file",
        "--chat_template_path no.jinja: no such file", "--model_name_or_path is missing",
        "--padding_free without --packing would not cut rows",
    ):  # fmt: skip
        preflight([*command])


def test_held_out_by_hash(chats, tmp_path):
    """Rows that begin alike lie on one side, in any order and among any other rows; an empty side is an error."""
    module, tokenizer = shipped.load(SFT), AutoTokenizer.from_pretrained(chats / "base")

    def asked(i: int) -> list[dict]:
        return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"Question {i}"}]

    formats = {
        "text": lambda i, copy: {"text": f"Text {i}".upper() if copy else f" Text  {i}\n"},
        "prompt": lambda i, copy: {"prompt": f"Question {i}", "completion": f"{copy}"},
        "chat": lambda i, copy: {"messages": [*asked(i), {"role": "assistant", "content": f"Answer {copy}"}]},
        "greeting": lambda i, copy: {"messages": [{"role": "assistant", "content": f"Good morning {i}"}]},
    }

    def sides(name: str, rows: list[dict]) -> tuple[list[str], list[str]]:
        file = write_rows(tmp_path / f"{name}.jsonl", rows)
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
    with pytest.raises(
        ConfigError, match=r"none of 3 rows is left to (train|evaluate) on: .* 0.3\) divides .*--eval_files"
    ):
        sides("one", [{"text": "alike"}] * 3)


@pytest.mark.parametrize("name, names", [
    ("dpo", {"max_length", "truncation_mode"}),
    ("grpo", {"max_prompt_length", "num_generations", "num_iterations"}),
    ("sft", {"dataset_text_field", "chat_template_path", "eos_token", "truncation_mode", "shuffle_dataset", "max_length"}),
])  # fmt: skip
def test_what_a_resume_must_not_change(name, names):
    """What decides which rows a step trains on, or their content, is fixed; test_checkpoint.py has what becomes of a change."""
    assert names <= shipped.load(ROOT / f"recipes/{name}.py").Args.fixed_on_resume()


def test_a_resume_keeps_its_targets(chats, arguments, tmp_path):
    """Left open, --assistant_only_loss is that of the checkpoint, which earlier versions wrote as a bool; what it means counts."""
    module = shipped.load(SFT)
    argv = [*map(str, arguments), "--model_name_or_path", str(chats / "base")]
    messages = Features({"messages": List({"role": Value("string"), "content": Value("string")})})
    texts = Features({"text": Value("string")})
    tokenizer = AutoTokenizer.from_pretrained(chats / "base")
    tokenizer.save_pretrained(tmp_path)
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
        settle_arguments(tmp_path, args)
        run: Any = SimpleNamespace(args=args, resumed_from=tmp_path)
        if resumes:
            check_same_rendering(run, tokenizer, features)
            assert args.assistant_only_loss == resumes
        else:
            with pytest.raises(ConfigError, match=rf"was trained on .*; give {saved is not False}".lower()):
                check_same_rendering(run, tokenizer, features)


@pytest.mark.parametrize("flags, said", [
    ((), r"--eos_token '<\|nothing\|>' .*--new_tokens '<\|nothing\|>'"),
    (("--chat_template_path",), r"--eos_token '<\|nothing\|>' .* give one"),  # the model's tokenizer may bring the token
], ids=["by us", "by trl"])  # fmt: skip
def test_an_end_that_is_no_token_is_one_message(arguments, chats, tmp_path, flags, said):
    args = (*arguments, "--output_dir", tmp_path / "out", "--model_name_or_path", chats / "base")
    args = (*args, "--eos_token", "<|nothing|>", *flags, *[chats / "base" for _ in flags])
    refuses(said, recipe.prepare_data, [str(word) for word in (SFT, *args)])


def test_rows_that_take_too_long_to_tokenise(chats, arguments, at_the_root, tmp_path):
    """Other processes wait for them in a collective; a dataset's files count as those of --train_files do."""
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


def test_preflight(chats, arguments, at_the_root, tmp_path):
    args = [*map(str, arguments), "--model_name_or_path", str(chats / "base"), "--output_dir", str(tmp_path / "out")]
    said, _ = preflight(["accelerate_configs/fsdp_full.yaml", "recipes/sft.py", *args])
    assert re.search(r"Ready: fsdp_full.yaml with 2 processes; 8 sequences a step(.|\n)*Parameters: [\d,]+;", said)
    module = shipped.load(SFT)
    for template, needed in (("other/model", ["other/model"]), ("a.jinja", [])):
        named, _ = resolve(module.Args, [*args, "--chat_template_path", template], world_size=1)
        needs = [need.name for need in module.requirements(named).needs]
        assert needs == [str(chats / "base"), *needed], "downloaded beforehand"
