"""Tests of recipes/dpo.py: forms of pairs, what is held out, kill and resume, and what the evaluation measures."""

import inspect
import json
import math
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from accelerate import Accelerator
from conversations import log_prob, rows_of, save_base_of_sums
from helpers import CHILDREN, ROOT, SHORT_RUN, SIGTERM_TO_ALL, log_of, losses, read_metrics, refused, write_rows
from simulations import BF16, FP32, real_and_simulated
from tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOTrainer
from trl.trainer.utils import add_fused_lm_head

from accelerate_recipes import recipe
from accelerate_recipes.args import parse
from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations.preferences import (
    HAVE_DIVERGENCES,
    LOSSES,
    PairLoss,
    keep_values,
    kept_values,
    to_pairs,
    what_decides,
)
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.life import stop

SCRIPT, REFERENCE = ROOT / "recipes/dpo.py", CHILDREN / "reference.py"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base_of_sums(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def arguments(base, tmp_path_factory) -> tuple:
    """Arguments of a run on judged answers: four to each of 60 sums, of which a judge likes short ones best."""
    file = tmp_path_factory.mktemp("judged") / "judged.jsonl"
    answers = [{"completion": ("1", "22", "333", "4444")[wrong], "score": -wrong / 4} for wrong in (3, 2, 0, 1)]
    write_rows(file, ({"prompt": f"{a}+7="} | answer for answer in answers for a in range(10, 70)))
    return (
        "--model_name_or_path", base, "--train_files", file, "--heldout_share", 0.2, *SHORT_RUN, "--total_batch_size", 8,
        "--per_device_train_batch_size", 2, "--per_device_eval_batch_size", 3,
    )  # fmt: skip


def test_sigterm_while_the_first_workers_start(forks, arguments, out):
    """They start for the reference pass, by a loader of trl's: all processes get the signal, and the run stops in good order."""
    args = (*arguments, "--max_length", 63, "--dataloader_num_workers", 1)  # no other run has computed this reference
    starting = SIGTERM_TO_ALL | {"event": "socket.connect", "path": "family=1"}  # to the process that forks workers
    forks.succeed(out, *args, TOY_FAULT=json.dumps(starting))
    status = json.loads((out / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "SIGTERM"), status
    assert not (out / "metrics.jsonl").exists(), "before the first step"


def test_machines_with_caches_of_their_own(forks, arguments, tmp_path):
    """All ranks take one way, whichever machine has the reference's values: none, or the second alone; then all have them."""
    caches = {"TESTED_MACHINES": tmp_path}
    args = (*arguments, "--max_length", 61, "--max_steps", 2, "--save_steps", 2)

    def files(machine: int) -> list[Path]:
        return sorted((tmp_path / f"machine-{machine}").rglob("reference-*.json"))

    forks.succeed(tmp_path / "cold", *args, **caches)
    first, second = files(0), files(1)
    assert len(first) == 2 and [file.name for file in first] == [file.name for file in second]
    for file in first:
        file.unlink()
    whole, damaged = sorted(second, key=lambda file: file.stat().st_size)  # of the rows held out, and of the others
    damaged.write_text(damaged.read_text()[:20])
    values = json.loads(whole.read_text())
    values[0][0] *= 2  # another value shows which were read
    whole.write_text(json.dumps(values))
    forks.succeed(tmp_path / "warm", *args, **caches)
    for one, other in zip(files(0), files(1), strict=True):
        assert one.read_text() == other.read_text()
    cold, warm = [
        next(r["eval_margin"] for r in read_metrics(tmp_path / name) if "eval_margin" in r) for name in ("cold", "warm")
    ]
    # Up to rounding: batches of another size may take other kernels.
    assert abs(cold) < 1e-6 < 1e-2 < abs(warm)


def test_values_that_cannot_be_kept(tmp_path, capsys):
    """A run goes on where the folder of the rows cannot be written to, as that of rows prepared for others."""
    (tmp_path / "no folder").write_text("")
    keep_values(tmp_path / "no folder/reference.json", [[-1.5], [-2.5]])
    assert "The reference's values are not kept" in capsys.readouterr().out
    keep_values(tmp_path / "reference.json", [[-1.5], [-2.5]])
    assert kept_values(tmp_path / "reference.json", 1) == [[-1.5], [-2.5]]


def test_what_decides_the_values_of_the_reference(base, monkeypatch, tmp_path):
    """Values of another precision, or of answers that are cut or weighed otherwise, are not taken; what is trained is no matter."""
    module = shipped.load(SCRIPT)

    def decided(mixed_precision: str = "no", attention: str = "sdpa", ld_alpha: float | None = None, **given) -> str:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", mixed_precision)
        args = module.Args(model_name_or_path=str(base), ld_alpha=ld_alpha, **given)
        device, unwrap_model = torch.device("cpu"), lambda model: model
        accelerator = SimpleNamespace(mixed_precision=mixed_precision, device=device, unwrap_model=unwrap_model)
        model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=attention))
        return repr(what_decides(SimpleNamespace(args=args, accelerator=accelerator, model=model), args))

    lora = {"mixed_precision": "bf16", "use_peft": True}
    changes = (
        {}, {"optim": "adamw_bf16_kahan"}, {"mixed_precision": "bf16"}, lora, lora | {"load_in_4bit": True},
        {"attention": "eager"}, {"ld_alpha": 0.5}, {"max_length": 7}, {"truncation_mode": "keep_end"},
    )  # fmt: skip
    assert len({decided(**change) for change in changes}) == len(changes)
    assert decided() == decided(learning_rate=1e-3, seed=7, beta=0.3, use_peft=True, per_device_train_batch_size=1)
    copy = shutil.copytree(base, tmp_path / "base")
    monkeypatch.setattr(module.Args, "base_model", str(copy))
    before = decided()
    (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
    assert decided() != before, "another model under the same path"


def test_the_chosen_answers_alone(base):
    """--loss_type sft alone has a mean over pairs that is 0, and the mean over the tokens of chosen answers."""
    module = shipped.load(SCRIPT)
    trial = module.trial(module.Args(model_name_or_path=str(base), loss_type=["sft"], max_length=9))
    model = tiny_model(vocab_size=15)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    pairs, tokens, none = trial.loss_fn(model, trial.batch)
    chosen = {name: trial.batch[name][: len(trial.batch[name]) // 2] for name in ("input_ids", "attention_mask")}
    labels = chosen["input_ids"].masked_fill(trial.batch["completion_mask"][: len(chosen["input_ids"])] == 0, -100)
    wanted = model(**chosen, labels=labels).loss * trial.count_fn(trial.batch)[1]
    assert pairs == none == 0 and tokens.item() == pytest.approx(wanted.item(), rel=1e-5)
    (pairs + tokens).backward()


def test_a_skipped_step(skips_a_step, arguments):
    # Another length, so that other tests do not find the reference's values.
    skips_a_step(SCRIPT, *arguments, "--max_length", 30)


def log_probs(folder: Path, pairs: Iterable[dict]) -> dict[str, torch.Tensor]:
    """Compute the log-probability of each chosen and each rejected answer by the whole model in a folder."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    answers = {
        side: [(pair["prompt"], pair[side].removesuffix("</s>")) for pair in pairs] for side in ("chosen", "rejected")
    }
    return {side: torch.stack([log_prob(model, tokenizer, *said) for said in some]) for side, some in answers.items()}


def check_reference(out: Path, base: Path) -> dict:
    """Check that the reference of a run of children/reference.py is the whole base, for each pair; returns what it wrote."""
    found = json.loads((out / "reference.json").read_text())
    for side in ("train", "test"):
        for answer, values in log_probs(base, found[side]).items():
            said = [pair[f"ref_{answer}_logps"] for pair in found[side]]
            assert said == pytest.approx(values.tolist(), rel=1e-6), (side, answer)
    return found


def test_dpo(killed_and_resumed, forks, arguments, base, tmp_path):
    """A run sharded over two processes is killed and continues bit for bit; its evaluation is that of the export.

    The reference is the whole base, of which no process ever holds everything.
    """
    whole, out = killed_and_resumed(REFERENCE, *arguments)
    reference = check_reference(whole, base)
    assert len(reference["train"]) % 4 and len(reference["test"]) % 6, "the last batches must be short"
    assert 0.5 * reference["of"] < reference["held"] < 0.8 * reference["of"]
    assert json.loads((out / "reference.json").read_text())["held"] == 0, "a run that goes on finds the values again"
    assert losses(out)[1] == pytest.approx(math.log(2), abs=1e-6)
    assert re.search(
        r"Rows to train on: \d+ rows; 0 without a target; with an end \d+; left out \d+; cut 0; ", log_of(whole)
    )
    before, after = (record for record in read_metrics(out) if "eval_loss" in record)
    # The margins are 0 but for rounding, which decides the accuracy.
    assert before["eval_loss"] == pytest.approx(math.log(2), abs=1e-6) and abs(before["eval_margin"]) < 1e-5
    assert after["eval_loss"] < 0.6 and after["eval_accuracy"] > 0.8 and after["eval_margin"] > 0.2
    assert (out / "result.png").stat().st_size > 20_000

    module = shipped.load(SCRIPT)
    args = parse(module.Args, [str(argument) for argument in arguments], world_size=1)
    pairs = module.load_pairs(args, AutoTokenizer.from_pretrained(base), set())[0]["test"]
    assert len(pairs) % 6, "the last batch must be short, else padding is not tested"
    first, last = log_probs(base, pairs), log_probs(out / "export", pairs)
    margins = 0.1 * ((last["chosen"] - first["chosen"]) - (last["rejected"] - first["rejected"]))
    assert after["eval_margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
    assert after["eval_accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert after["eval_loss"] == pytest.approx((-torch.nn.functional.logsigmoid(margins)).mean().item(), rel=1e-4)
    assert after["eval_logps_chosen"] == pytest.approx(last["chosen"].mean().item(), rel=1e-4)

    # A second model, sharded like the first, gives the same as the reference that was run beforehand.
    other = tmp_path / "out"
    forks.succeed(other, *arguments, "--precompute_ref_log_probs", "false")
    strategies = re.findall(r"^Strategy(.*): FSDP2 full shard", log_of(other), re.M)
    assert strategies == ["", " of the model that is not trained"]
    assert losses(other) == pytest.approx(losses(out), rel=1e-4)
    assert read_metrics(other)[-1]["eval_loss"] == pytest.approx(after["eval_loss"], rel=1e-4)


def test_the_reference_of_adapters(forks, arguments, base, tmp_path):
    """It is the base alone, also for fewer pairs than the processes have places for."""
    out, files = tmp_path / "out", {"train": 3, "eval": 1}
    for name, number in files.items():
        chosen = range(len(name), len(name) + number)
        rows = [{"prompt": f"{i}+1=", "chosen": f"{i}" * 3, "rejected": "1"} for i in chosen]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    args = (*arguments, *(part for name in files for part in (f"--{name}_files", tmp_path / f"{name}.jsonl")))
    args += ("--total_batch_size", 2, "--per_device_train_batch_size", 1, "--precompute_ref_batch_size", 4)
    args += ("--max_steps", 1, "--use_peft", "--lora_r", 2)
    forks.succeed(out, *args, script=REFERENCE)
    found = check_reference(out, base)
    assert [len(found[side]) for side in ("train", "test")] == [3, 1]
    before, _ = (record for record in read_metrics(out) if "eval_loss" in record)
    assert abs(before["eval_margin"]) > 1e-3, "the adapters say the same, so that they could be in the reference"

    # Weighed, the model that has not moved is still the reference; values that were not weighed are not found again.
    other = tmp_path / "other"
    forks.succeed(other, *args, "--ld_alpha", 0.5, script=SCRIPT, config="single")
    before, _ = (record for record in read_metrics(other) if "eval_loss" in record)
    assert before["eval_margin"] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("flags, more", [
    (FP32, []),
    (BF16, ["--use_peft", "--lora_r", "4", "--precompute_ref_log_probs", "false"]),
], ids=["fp32", "adapters, reference kept"])  # fmt: skip
def test_a_step_by_trl_is_the_simulated_one(forks, simulator, base, tmp_path, flags, more):
    """It has the same FLOPs, gradients and waits, and the peak but for a batch; the reference needs less before."""
    rows = [{"prompt": f"{i % 10}=", "chosen": "1" * 16, "rejected": "2" * 15} for i in range(60)]  # 20 and 19 tokens
    file, out = tmp_path / "pairs.jsonl", tmp_path / "out"
    write_rows(file, rows)
    args = [
        "--model_name_or_path", str(base), "--train_files", str(file), *more, "--max_length", "20", "--max_steps", "4",
        "--total_batch_size", "8", "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2",
    ]  # fmt: skip
    real, simulated = real_and_simulated(forks, simulator, out, "dpo", args, flags=flags, micro_batches=2)
    # Under fakes `tolist` reads each value, and is not seen otherwise; masks are looked at, twice a pass, on a CPU alone.
    flags, masks = 6, 2 * (2 + 2 * ("false" in more))
    assert real["value_reads"] - masks + flags == simulated.value_reads
    batch = 4 * 20 * 3 * 8 + 2 * 2 * 4  # of its other micro-batch
    assert simulated.peak <= real["peak"] <= simulated.peak + batch
    assert ("false" in more) == (real["before"] == 0) and real["before"] < simulated.peak


def test_upstream_needs_it():
    """Where trl believes that FSDP is on, it makes a second model; it hashes all weights on each process."""
    source = inspect.getsource(DPOTrainer.__init__)
    assert "or (args.precompute_ref_log_probs and not self.is_fsdp_enabled):" in source
    assert "hash_module(self.ref_model or self.model) if args.precompute_ref_log_probs else None" in source


def test_forms_of_pairs(capsys):
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    same = {"prompt": "1+1=", "chosen": "2", "rejected": "2"}
    assert to_pairs(rows_of(pair, same), "x", 0).to_list() == [pair], "equal answers are no pair"
    assert "x: 1 of 2 pairs have equal answers" in capsys.readouterr().out
    scored = [pair | {"score_chosen": better, "score_rejected": 1.0} for better in (3.0, 1.5, 1.0, 0.5, None)]
    assert [len(to_pairs(rows_of(*scored), "x", margin)) for margin in (0, 0.5, 1)] == [3, 2, 1]
    assert to_pairs(rows_of({"chosen": "1 2 3", "rejected": "1 2 4"}), "x", 0)[0] == {
        "prompt": "1 2", "chosen": " 3", "rejected": " 4",
    }  # fmt: skip


def test_judged_answers():
    """The best and the worst answer of each prompt make a pair; ties and answers without a score make none."""

    def judged(prompt, *answers):
        return [{"prompt": prompt, "completion": text, "score": score} for text, score in answers]

    rows = [
        *judged("a", ("a1", 1.0), ("a2", 3.0), ("a3", 0.5), ("a4", 3.0)),
        *judged("b", ("b1", 1.0), ("b2", 1.0)),
        *judged("c", ("c1", 1.0)),
        *judged("d", ("d1", None), ("d2", 2.0), ("d3", math.nan), ("d4", 1.75)),
    ]
    wanted = [{"prompt": "a", "chosen": "a2", "rejected": "a3"}, {"prompt": "d", "chosen": "d2", "rejected": "d4"}]
    assert to_pairs(rows_of(*rows), "x", 0).to_list() == wanted
    assert to_pairs(rows_of(*rows), "x", 0.5).to_list() == wanted[:1]
    with pytest.raises(ConfigError, match=r"judge\.jsonl gives no pair .* 1 of 1 prompts .*--min_score_margin 0"):
        to_pairs(rows_of(*judged("c", ("c1", 1.0))), "judge.jsonl", 0)
    # Of a file with whole numbers and fractions, each is as it is written; both are scores.
    text = datasets.Value("string")
    kinds = datasets.Features({"prompt": text, "completion": text, "score": datasets.Json()})
    scored = judged("a", ("a1", 1), ("a2", 2.5), ("a3", 0), ("a4", None))
    found = to_pairs(datasets.Dataset.from_list(scored, features=kinds), "x", 0).to_list()
    assert found == [{"prompt": "a", "chosen": "a2", "rejected": "a3"}]
    with pytest.raises(DataError, match=r"x: 'score' holds .*json.*, not numbers"):
        to_pairs(datasets.Dataset.from_list(judged("a", ("b", 1), ("c", [2])), features=kinds), "x", 0)
    with pytest.raises(DataError, match=r"judge\.jsonl: 'score' holds string, not numbers"):
        to_pairs(rows_of({"prompt": "a", "completion": "b", "score": "good"}), "judge.jsonl", 0)
    with pytest.raises(DataError, match="row 2: 'rejected' is null"):
        to_pairs(rows_of({"chosen": "a", "rejected": "b"}, {"chosen": "a", "rejected": None}), "x", 0)


def test_pairs_of_a_prompt_lie_on_one_side(base, tmp_path):
    module, file = shipped.load(SCRIPT), tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(j)} for j in range(500, 503) for i in range(40)]
    rows += [row | {"rejected": row["chosen"]} for row in rows[:5]]
    write_rows(file, rows)
    argv = ["--model_name_or_path", str(base), "--train_files", str(file), "--heldout_share", "0.3"]
    sides, num_rows, left_out = module.load_pairs(
        parse(module.Args, argv, world_size=1), AutoTokenizer.from_pretrained(base), set()
    )
    train, test = (set(sides[name]["prompt"]) for name in ("train", "test"))
    assert (num_rows, left_out) == (125, 5) and not train & test
    assert 4 < len(test) < 25 and len(sides["test"]) == 3 * len(test)


def test_losses_of_a_micro_batch_are_refused(arguments):
    """They are not sums over pairs, so a step of several micro-batches would be another one."""
    argv, args = [*map(str, arguments), "--loss_type"], shipped.load(SCRIPT).Args
    with refused("--loss_type aot ", " has 4: make"):
        parse(args, [*argv, "aot"], world_size=1)
    parse(args, [*argv, "aot", "--per_device_train_batch_size", "8"], world_size=1)
    with pytest.raises(ConfigError, match="--use_weighting weighs the pairs"):
        parse(args, [*argv, "sft", "--use_weighting", "true", "--per_device_train_batch_size", "8"], world_size=1)
    given = ["aot", "exo_pair", "--use_weighting", "--loss_weights", "1", "2", "3", "--f_divergence_type", "forward_kl"]
    with refused(
        "--loss_type aot sorts the pairs", "has 3 numbers, --loss_type 2 losses", "is not defined for --loss_type aot;",
        "exo_pair divides by --label_smoothing, which is 0",
    ):  # fmt: skip
        parse(args, [*argv, *given, "--per_device_train_batch_size", "8"], world_size=1)


def test_losses_are_those_of_trl():
    source = inspect.getsource(DPOTrainer)
    known = re.search(r"Unknown loss type(.*?)\n\n", source, re.S)
    defined = re.search(r"loss_types = (\{.*?\})", source)
    assert known and {*re.findall(r"'(\w+)'", known[1])} == {*LOSSES}
    assert defined and eval(defined[1]) == {*HAVE_DIVERGENCES}


def test_an_evaluation_of_pairs_stops_between_two_batches(monkeypatch):
    loss = SimpleNamespace(accelerator=Accelerator(cpu=True))
    monkeypatch.setattr(stop, "_asked_by", "SIGTERM")
    with pytest.raises(stop.Stopped, match="SIGTERM"):
        PairLoss.evaluate_pairs(loss, torch.nn.Linear(1, 1), [{}])


def test_prepare(base, arguments, tmp_path, capsys):
    """Pairs are shown without a model; the reference computes nothing."""
    same = [str(part) for part in (SCRIPT, *arguments, "--output_dir", tmp_path / "out")]
    recipe.prepare_data(same)
    shown = capsys.readouterr().out
    assert "row 1, chosen: 8 tokens, 2 targets, 3 of padding left out\n  read   | <s>" in shown
    assert (
        "target | 4|4|4|4|</s>" in shown and "longest 11; targets a row: mean 7.0, most 7; the first are in " in shown
    )
    assert re.search(r"Evaluation\n\n  row 1, chosen: ", shown)
    recipe.prepare_data([*same, "--max_length", "8"])
    said = "with an end 45; left out 0; cut 45; tokens cut off 135; longest 11; targets a row: mean 4.0, most 4;"
    assert said in (shown := capsys.readouterr().out), shown[:900]
    with pytest.raises(ConfigError, match=r"is left to train on: .* within --max_length 4; raise it"):
        recipe.prepare_data([*same, "--max_length", "4"])
