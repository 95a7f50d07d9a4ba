"""Tests of recipes/kto.py: rows with a label, the KL divergence of a whole step, kill and resume, and the evaluation."""

import json
import re

import pytest
import torch
from conversations import log_prob, rows_of, save_base_of_sums
from helpers import ROOT, SHORT_RUN, log_of, losses, read_metrics, refuses, write_rows
from simulations import job
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import disable_dropout_in_model

from accelerate_recipes import recipe
from accelerate_recipes.args import parse
from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations.settings import switch_off_dropout
from accelerate_recipes.conversations.unpaired import WithNeighbours, advice_on_weights, judged_answers
from accelerate_recipes.data.rows import rows_of_step
from accelerate_recipes.errors import ConfigError, DataError

SCRIPT = ROOT / "recipes/kto.py"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base_of_sums(tmp_path_factory.mktemp("base"), attention_dropout=0.1)


@pytest.fixture(scope="module")
def arguments(base, tmp_path_factory) -> tuple:
    """Arguments of a run on judged answers of several lengths; two thirds are good."""
    file = tmp_path_factory.mktemp("judged") / "judged.jsonl"
    rows = [{"prompt": f"{a}+7=", "completion": str(a)[0] * (1 + a % 4), "label": a % 3 > 0} for a in range(10, 99)]
    write_rows(file, rows)
    return (
        "--model_name_or_path", base, "--train_files", file, "--heldout_share", 0.2, *SHORT_RUN, "--total_batch_size", 12,
        "--per_device_train_batch_size", 2, "--per_device_eval_batch_size", 3, "--beta", 0.3,
    )  # fmt: skip


def test_kto(killed_and_resumed, forks, arguments, base, tmp_path):
    """A killed run continues bit for bit; the loss does not depend on how a step is divided; its evaluation is the export's."""
    whole, out = killed_and_resumed(SCRIPT, *arguments)
    first, *_, after = read_metrics(whole)
    assert losses(whole)[1] == pytest.approx(0.5, abs=1e-6) and first["eval_loss"] == pytest.approx(0.5, abs=1e-6)
    assert max(record.get("kl", 0) for record in read_metrics(whole)) > 0.1, "else its division would not be seen"
    places = {"alone": {"num_processes": 1, "config": "single"}, "three": {"num_processes": 3, "config": "ddp"}}
    for name, given in places.items():
        size = 12 if name == "alone" else 1
        more = ("--per_device_train_batch_size", size, "--per_device_eval_batch_size", size, "--save_steps", 0)
        forks.succeed(tmp_path / name, *arguments, *more, **given)
        for one, other in zip(read_metrics(whole), read_metrics(tmp_path / name), strict=True):
            asked = ("eval_", "rewards", "loss", "kl", "entropy")
            said = {key: value for key, value in one.items() if key.startswith(asked)}
            assert len(said) > 3 and {key: other[key] for key in said} == pytest.approx(said, rel=2e-5, abs=2e-5), name

    module = shipped.load(SCRIPT)
    args = parse(module.Args, [str(argument) for argument in arguments], world_size=1)
    tokenizer = AutoTokenizer.from_pretrained(base)
    sides = args.sides(args.read_rows_for(tokenizer), "prompt")
    rows = sides["test"].to_list()
    ratios, foreign = [], []
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (out / "export", base)]
    for row, before in zip(rows, rows[-1:] + rows[:-1], strict=True):
        for found, answer in ((ratios, row["completion"]), (foreign, before["completion"])):
            ours, theirs = (log_prob(model, tokenizer, row["prompt"], answer) for model in models)
            found.append(ours - theirs)
    ratios, kl = torch.stack(ratios), torch.stack(foreign).mean().clamp(min=0)
    labels = torch.tensor([row["label"] for row in rows])
    wanted = 1 - torch.sigmoid(0.3 * torch.where(labels, ratios - kl, kl - ratios))
    assert after["eval_loss"] == pytest.approx(wanted.mean().item(), rel=1e-4) and abs(after["eval_loss"] - 0.5) > 0.01
    assert after["eval_kl"] == pytest.approx(kl.item(), rel=1e-4, abs=1e-5)
    assert after["eval_rewards_chosen"] == pytest.approx(0.3 * ratios[labels].mean().item(), rel=1e-4)
    assert after["eval_accuracy"] == pytest.approx(((ratios > kl) == labels).float().mean().item())


def test_a_skipped_step(skips_a_step, arguments):
    skips_a_step(SCRIPT, *arguments)


def test_the_reference_of_adapters(forks, arguments, out):
    """It is the base alone: adapters that say the same at first give a loss of a half."""
    forks.succeed(out, *arguments, "--use_peft", "--lora_r", 2, "--max_steps", 2, "--loss_type", "apo_zero_unpaired")
    assert log_of(out).count("Strategy: FSDP2 full shard") == 1, "no second model"
    first, last = losses(out).values()
    # The script that the tests fork gives adapters a useful size, so they move the model from the first step on.
    assert first != last and all(0.2 < loss < 0.8 for loss in (first, last))


def test_neighbours(arguments):
    """Each prompt is read with the answer of another row of its step; in a step, each answer is read twice."""
    args = parse(shipped.load(SCRIPT).Args, [*map(str, arguments)], world_size=1)
    order = WithNeighbours(50, args, 0, 1)
    for step in range(9):
        own, before = zip(*order.rows(step), strict=True)
        assert list(own) == rows_of_step(step, 12, 50, args.seed)
        assert before == (own[-1], *own[:-1])


PAIRS_OF_LABELS = [
    ("up", "down"), ("like", "dislike"), ("Thumbs up", "Thumbs down"), ("thumbs_up", "thumbs_down"), ("thumbs-up", "thumbs-down"),
    ("yes", "No"), ("good", "bad"), (1, -1), (1.0, -1.0), ("1", "-1"),
]  # fmt: skip


def test_labels(capsys):
    """Labels are bools, numbers or texts, as CSV files have them, of which one pair stands in all rows; others are refused."""
    row = {"prompt": "1+1=", "completion": "2"}
    for good, bad in ((True, False), (1, 0), (1.0, 0.0), ("True", "false"), ("1", "0")):
        found = judged_answers(rows_of(row | {"label": good}, row | {"label": bad}), "x")
        assert found["label"][:] == [True, False], (good, bad)
    assert not capsys.readouterr().out
    for good, bad in PAIRS_OF_LABELS:
        found = judged_answers(rows_of(*(row | {"label": label} for label in (good, bad, good))), "x")
        assert found["label"][:] == [True, False, True], (good, bad)
        said = capsys.readouterr().out
        assert said.index("good") < said.index("bad") and said.startswith("x: ")
        assert str(bad).split(".")[0].lower()[-2:] in said

    def refuse(said: str, *labels: object) -> None:
        refuses(said, judged_answers, rows_of(*(row | {"label": label} for label in labels)), "x", error=DataError)

    for wrong, beside in (("up", "dislike"), ("ok", "up"), ("0", "-1")):
        refuse(rf"x, row \d: 'label' is '({wrong}|{beside})', '({wrong}|{beside})' in row \d", beside, wrong)
    for right, wrong in (("1", None), ("1", "good"), (1.0, 0.5), (1, 2)):
        refuse(rf"row 2: 'label' is '{str(wrong).lower()}', '1' in row 1; it must", right, wrong)


def test_the_last_answer_of_a_conversation_is_judged():
    user, answer = ({"role": role, "content": role} for role in ("user", "assistant"))
    found = judged_answers(rows_of({"messages": [user, answer, user, answer, answer], "label": 1}), "x")
    assert found.to_list() == [{"label": True, "prompt": [user, answer, user], "completion": [answer, answer]}]
    for messages in ([user], [answer], [user, answer, user], []):
        with pytest.raises(DataError, match="x, row 2: 'messages' must be a question and end with the answer"):
            judged_answers(rows_of({"messages": [user, answer], "label": 1}, {"messages": messages, "label": 0}), "x")


def test_what_is_refused(arguments, tmp_path, capsys):
    argv, module = [str(part) for part in arguments], shipped.load(SCRIPT)
    with pytest.raises(ConfigError, match=r"--total_batch_size 1: KTO reads each prompt with the answer of another"):
        parse(module.Args, [*argv, "--total_batch_size", "1", "--per_device_train_batch_size", "1"], world_size=1)
    refuses(
        r"--packing .* is not an argument of the recipe: rem", parse, module.Args, [*argv, "--packing"], world_size=1
    )
    args = parse(module.Args, argv, world_size=1)
    for weight, good, kind in (("desirable", 7, "good"), ("undesirable", 0, "bad")):
        said = rf"all 7 answers to train on are {kind}, and with --{weight}_weight 0"
        refuses(said, advice_on_weights, parse(module.Args, [*argv, f"--{weight}_weight", "0"], world_size=1), good, 7)
    assert advice_on_weights(args, 4, 7) == "", "a third more good answers than bad ones"
    assert advice_on_weights(args, 3, 7).endswith("--desirable_weight 1.33 to 1.78")
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "completion": "2", "kto_tag": True}) + "\n")
    with pytest.raises(ConfigError, match="prompt and completion, with a label: prompt, completion, label"):
        recipe.prepare_data([str(SCRIPT), *argv[:2], "--train_files", str(file), "--output_dir", str(tmp_path)])
    (text := tmp_path / "text.csv").write_text("text,label\nQ: 2+2? A: 4,up\nQ: 2+2? A: 5,down\n")
    with pytest.raises(ConfigError, match=r"columns text, label; .*a text .* prompt and completion"):
        recipe.prepare_data([str(SCRIPT), *argv[:2], "--train_files", str(text), "--output_dir", str(tmp_path)])
    recipe.prepare_data([str(SCRIPT), *argv, "--output_dir", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert re.search(r"answers to train on, \d+ of them good; \d+ held out; good ones count \d\.\d+ times", shown)
    assert "target | 1|1|1|1|</s>" in shown or "target | 2|2|2|2|</s>" in shown, shown[:3000]


def test_upstream_needs_it(base):
    """trl leaves the dropout of attention, which is a number of most models, as it is."""
    model = AutoModelForCausalLM.from_pretrained(base)
    disable_dropout_in_model(model)
    rates = [layer.self_attn.attention_dropout for layer in model.model.layers]
    switch_off_dropout(model)
    assert set(rates) == {0.1} and {layer.self_attn.attention_dropout for layer in model.model.layers} == {0.0}
    assert model.config.attention_dropout == 0.1, "the export has that of the base"


@pytest.mark.slow
def test_plan(simulator, base, arguments):
    """A step reads three rows for each that it trains, without gradients: the reference twice, and the model once.

    APO-zero reads one; a row alone has no padding, and no mask.
    """
    argv = [str(SCRIPT), *map(str, arguments), "--max_length", "32"]
    ways = (), ("--loss_type", "apo_zero_unpaired", "--per_device_train_batch_size", "1")
    kto, apo = simulator([job("fsdp_full", [*argv, *flags], device="cpu", micro_batches=2) for flags in ways])
    assert not isinstance(kto, Exception), kto
    assert kto.flops / apo.flops == pytest.approx(6 / 4, rel=0.02)
