"""Tests of recipes/grpo.py: rewards from files, their errors, kill and resume, answers by step.

The base is a new Llama of two layers, made by sft.py; the reward is the share of a digit in an answer.
"""

import copy
import inspect
import json
import math
import os
import random
import re
import textwrap
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from conversations import PROMPTS, prepare, save_base, template_of
from helpers import ROOT, SHORT_RUN, STEPS, log_of, read_metrics, refused, refuses, write_rows
from simulations import BF16, FP32, job, real_and_simulated
from tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from trl import GRPOConfig, GRPOTrainer

from accelerate_recipes.args import parse
from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations import objective
from accelerate_recipes.conversations.answers import (
    OWN_FLAGS,
    VALUES,
    AnswerTrainer,
    differ_in_groups,
    give_model_to_trl,
)
from accelerate_recipes.conversations.drawing_trial import draw_answers
from accelerate_recipes.conversations.prompts import (
    HeldoutAnswers,
    end_of_prompt,
    load_prompts,
    room_for_prompts,
    tokenize_prompts,
)
from accelerate_recipes.conversations.rewards import MATH_VERIFY, Reward, load_rewards, reward_problems, tell_of_rewards
from accelerate_recipes.conversations.settings import trl_config
from accelerate_recipes.disk import read_json_lines
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.models.generation import numbers_of
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.report.samples import Samples
from accelerate_recipes.upstream import CACHES

SCRIPT = ROOT / "recipes/grpo.py"
DATA = ROOT / "data/arithmetic"
REWARDS = """
def ones(completions, **columns):
    return [text.count("1") / 6 for text in completions]

def short(prompts, completions, completion_ids, solution):
    assert len(prompts) == len(completions) == len(completion_ids) == len(solution)
    return [None if text == right else -float(len(ids)) for text, ids, right in zip(completions, completion_ids, solution)]

def breaks(completions, **columns):
    return [1 / 0 for _ in completions]

def needs_more(completions, weather, **columns):
    return [0.0 for _ in completions]

async def waits(completions, **columns):
    return [0.0 for _ in completions]

number = 3
"""


@pytest.fixture(scope="module")
def base(forks, tmp_path_factory):
    """Export of a new model that sft.py has trained for two steps, sharded over two processes."""
    out = tmp_path_factory.mktemp("base") / "out"
    sizes = ("hidden_size=32", "intermediate_size=64", "num_attention_heads=2", "initializer_range=0.3")
    preset = ("--config", ROOT / "recipes/configs/sft/arithmetic.yaml", "--max_steps", 2, "--warmup_steps", 0)
    forks.succeed(out, *preset, "--config_overrides", *sizes, script=ROOT / "recipes/sft.py")
    first, *_, last = (record["eval_loss"] for record in read_metrics(out) if "eval_loss" in record)
    assert last < first
    model = AutoModelForCausalLM.from_pretrained(out / "export")
    assert model.config.num_hidden_layers == 2 and model.config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(out / "export").decode([1, 5, 6, 14, 7, 15, 2]) == "<s>12+3=</s>"
    return out / "export"


@pytest.fixture(scope="module")
def rewards_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    file.write_text(REWARDS)
    return file


@pytest.fixture(scope="module")
def arguments(base, rewards_file) -> tuple:
    return (
        "--model_name_or_path", base, "--train_files", DATA / "rl.jsonl", "--eval_files", DATA / "test.jsonl",
        "--rewards", f"{rewards_file}:ones", f"{rewards_file}:short", "--reward_weights", 1, 0.1,
        "--num_eval_prompts", 13, "--max_completion_length", 6, "--num_generations", 8, "--total_batch_size", 32,
        "--per_device_train_batch_size", 16, "--per_device_eval_batch_size", 4, *SHORT_RUN, "--beta", 0.01, "--num_samples", 4,
    )  # fmt: skip


def test_prepare_keeps_the_answers_of_a_run(tmp_path):
    """Who prepares data in the folder of a run does not lose the answers that it has drawn."""
    base = save_base(tmp_path, template_of("qwen3"), "<|im_end|>")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/samples.jsonl").write_text('{"step": 5}\n')
    prepare(base, PROMPTS, name="grpo")
    assert (tmp_path / "out/samples.jsonl").read_text() == '{"step": 5}\n' and (tmp_path / "out/rows.txt").exists()


def test_grpo(killed_and_resumed, forks, arguments, base, rewards_file, tmp_path):
    """A run of two rewards, sharded over two processes, is killed and continues bit for bit; so do its answers."""
    whole, out = killed_and_resumed(SCRIPT, *arguments)
    records = [record for record in read_metrics(out) if "loss" in record]
    said = r"Rows to train on: [\d,]+ rows; left out \d+; longest \d+; (.|\n)*Step 6/6 Loss: .*, data wait: \d+\.\d%, reward: -?\d\.\d{3}"
    assert re.search(said, log_of(whole))
    for record in records:
        parts = (record["rewards/ones/mean"], record["rewards/short/mean"])
        assert record["reward"] == pytest.approx(parts[0] + 0.1 * parts[1], rel=1e-4)
        assert record["completions/max_length"] <= 6 and record["kl"] >= 0
    assert records[-1]["kl"] > 0.001, "it has moved away from the first model"
    evaluations = [record for record in read_metrics(out) if "eval_reward" in record]
    assert [record["step"] for record in evaluations] == [0, STEPS]
    before, after = evaluations
    assert after["eval_sampled_reward"] > before["eval_sampled_reward"] + 0.1, "it learns"
    assert (out / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == set(range(STEPS + 1))
    drawn = [row for row in rows if row["source"] == "drawn in training"]
    assert len(drawn) == 4 * STEPS and len({row["prompt"] for row in drawn if row["step"] == 2}) > 1
    for row in rows:
        assert row["rewards"]["ones"] == pytest.approx(row["completion"].count("1") / 6, abs=1e-6)
    solutions = dict(re.findall(r'"prompt": "(.*?)", "solution": "(.*?)"', (DATA / "rl.jsonl").read_text()))
    assert all(row["expected"] == solutions[row["prompt"]] for row in drawn)
    page = (out / "samples.html").read_text()
    assert page.count("<tr>") == len(rows) + 1 and page.index(f">{STEPS}</td>") < page.index(">1</td>")
    assert "<th>expected</th><th>ones</th><th>short</th>" in page and page.count(drawn[-1]["prompt"]) >= 1
    report = (out / "report.html").read_text()
    assert report.index("<h3>Reward</h3>") < report.index("<h3>Loss</h3>"), "the reward comes first"
    assert "<th>expected</th><th>ones</th><th>short</th>" in report
    assert (out / "result.png").stat().st_size > 20_000

    # The most likely answers of the exported model, without this project, earn what the last evaluation says.
    model, tokenizer = (k.from_pretrained(out / "export") for k in (AutoModelForCausalLM, AutoTokenizer))
    tests = [json.loads(line) for line in (DATA / "test.jsonl").read_text().splitlines()[:13]]
    ids = tokenizer([row["prompt"] for row in tests], return_tensors="pt", padding_side="left")["input_ids"]
    with torch.no_grad():
        new = model.generate(ids, max_new_tokens=6, do_sample=False)[:, ids.shape[1] :]
    texts = tokenizer.batch_decode(new, skip_special_tokens=True)
    assert sum(text.count("1") / 6 for text in texts) / 13 == pytest.approx(after["eval_rewards/ones"], abs=1e-6)

    # The same on one process: the evaluation before training is that of two, and so are the first answers of training.
    single = tmp_path / "single"
    forks.succeed(single, *arguments, "--max_steps", 1, "--save_steps", 0, config="single")
    for name in ("eval_reward", "eval_sampled_reward"):  # drawn answers too are those of the prompt, not of the rank
        assert read_metrics(single)[0][name] == pytest.approx(before[name], rel=1e-5)
    rows = read_json_lines(single / "samples.jsonl")
    first = [row["completion"] for row in rows if row["source"] == drawn[0]["source"]]
    assert first == [row["completion"] for row in drawn if row["step"] == 1] and len(first) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, prompt, answer, more",
    [(FP32, 11, 9, []), (BF16, 3, 17, ["--use_peft", "--lora_r", "4"])],
    ids=["prompts", "answers and adapters"],  # of which the peak in drawing is
)
def test_a_step_by_trl_is_the_simulated_one(
    forks, simulator, base, rewards_file, tmp_path, flags, prompt, answer, more
):  # fmt: skip
    """It has the same FLOPs, also of all answers, and the same gradients; and its peaks in drawing and in training."""
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    texts = [f"{i % 10:0{prompt - 2 - i % 2}d}="[-prompt + 1 + i % 2 :] for i in range(60)]  # with <s> of two lengths
    write_rows(file, ({"prompt": text, "solution": "1"} for text in texts))
    args = [
        "--model_name_or_path", str(base), "--train_files", str(file), "--rewards", f"{rewards_file}:ones",
        "--max_prompt_length", str(prompt), "--max_completion_length", str(answer), "--num_generations", "2",
        "--total_batch_size", "16", "--per_device_train_batch_size", "2", "--num_eval_prompts", "4", "--max_steps", "5",
        *more,
    ]  # fmt: skip
    whole = ("--generation_kwargs", json.dumps({"min_new_tokens": answer}))  # no answer ends early
    real, simulated = real_and_simulated(forks, simulator, out, "grpo", args, *whole, flags=flags, micro_batches=4)
    peaks = {name: max(peak for peak, _ in segments) for name, segments in simulated.phases}
    drawing = max(peaks[name] for name in ("prompts", "first tokens", "last tokens"))
    assert (drawing == peaks["last tokens"]) == (answer > prompt)
    # A step may have prompts of one length alone, and gloo's threads sometimes let go late of what was exchanged.
    assert min(abs(peak / drawing - 1) for peak in real["drawing"]) < 0.01 and max(real["drawing"]) < 1.02 * drawing
    assert real["peak"] == pytest.approx(simulated.peak, rel=0.005)


@pytest.mark.slow
def test_what_is_simulated_of_answers(simulator, base, rewards_file):
    """An answer has --max_completion_length tokens; one that leaves no room for a prompt is refused."""
    model = ["--model_name_or_path", str(base), "--max_prompt_length", "11"]
    rewards = ["--rewards", f"{rewards_file}:ones", "--train_files", str(DATA / "rl.jsonl")]
    sizes = [*rewards, "--total_batch_size", "8", "--per_device_train_batch_size", "4", "--max_completion_length"]
    short, long = ([str(SCRIPT), *model, *sizes, number] for number in ("5", "1000"))
    found, refused = simulator([job("fsdp_full", command, *FP32, device="cpu") for command in (short, long)])
    assert found.tokens == 4 * 5
    assert isinstance(refused, ConfigError) and "answers of 1000 tokens leave no room" in str(refused)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_presets_run(forks, base, out, name):
    """The presets for sums run as on docs/dpo.md and docs/grpo.md, after that of sft.py, which has made the base."""
    args = (
        "--config", ROOT / f"recipes/configs/{name}/arithmetic.yaml", "--model_name_or_path", base, "--max_steps", 1,
    )  # fmt: skip
    args += ("--num_eval_prompts", 4) if name == "grpo" else ()
    forks.succeed(out, *args, script=ROOT / f"recipes/{name}.py", config="ddp")


def test_a_reward_that_fails_ends_the_run_with_one_message(forks, arguments, rewards_file, out):
    """It fails on every rank at the first held-out answers; rank 0 says where."""
    assert forks.run(out, *arguments, "--rewards", f"{rewards_file}:breaks", "--reward_weights", 1) == 2
    said = log_of(out)
    assert "error: the reward breaks failed: ZeroDivisionError: division by zero" in said, said[-3000:]
    line = REWARDS.splitlines().index("    return [1 / 0 for _ in completions]") + 1
    assert f"({rewards_file}, line {line})" in said and "Traceback" not in said


def test_rewards_are_checked_without_running_them(tmp_path, rewards_file, monkeypatch):
    trap = tmp_path / "trap.py"
    trap.write_text("raise SystemExit('it was run')\ndef reward(completions): ...\n")
    bad = tmp_path / "bad.py"
    bad.write_text("def reward(:\n")
    for specs, said in (
        ([], "--rewards is missing"),
        (["acuracy_reward"], "known are accuracy_reward, think_format_reward; or give my_rewards.py:function"),
        ([f"{tmp_path}/no.py:f"], "no.py: no such file"),
        ([f"{rewards_file}:onse"], "defines no onse; it defines breaks, needs_more, number, ones"),
        ([f"{rewards_file}:"], "defines no function without a name"),
        ([f"{bad}:reward"], "bad.py cannot be read as Python: invalid syntax"),
        ([f"{rewards_file}:ones", f"{trap}:ones"], "defines no ones; it defines reward"),
        ([f"{rewards_file}:ones"] * 2, "--rewards has ones twice"),
    ):  # fmt: skip
        assert said in "\n".join(reward_problems(specs)), specs
    assert reward_problems([f"{trap}:reward", "think_format_reward"]) == []
    assert reward_problems(["/elsewhere/a.py:f"], elsewhere=["/elsewhere"]) == []
    monkeypatch.setattr("accelerate_recipes.conversations.rewards.find_spec", lambda name: None)
    (said,) = reward_problems(["accuracy_reward"])
    assert "pip install math-verify==" in said and MATH_VERIFY in (ROOT / "requirements-dev.txt").read_text().split()


def test_rewards_that_cannot_be_loaded(tmp_path, rewards_file):
    breaks = tmp_path / "breaks.py"
    breaks.write_text("import no_such_module\ndef f(completions): ...\n")
    ends = tmp_path / "ends.py"
    ends.write_text("import sys\ndef f(completions): ...\nsys.exit(0)\n")
    columns = ["prompt", "solution"]
    for spec, said in (
        (f"{ends}:f", "failed when it was loaded: SystemExit: 0 .*line 3"),
        (f"{rewards_file}:number", "number is int; it must be a plain function"),
        (f"{rewards_file}:waits", "it must be a plain function"),
        (f"{rewards_file}:needs_more", "needs weather; the data have the columns prompt, solution"),
        (f"{breaks}:f", r"failed when it was loaded: ModuleNotFoundError: No module named 'no_such_module' .*line 1"),
    ):
        refuses(said, load_rewards, [spec], columns)


def test_what_a_reward_gives_is_checked(rewards_file):
    (ones,) = load_rewards([f"{rewards_file}:ones"], ["prompt"])
    assert ones(["a", "b"], ["111111", ""], weather=["sun", "rain"]) == [1.0, 0.0]
    nothing = Reward("nothing", lambda completions: [torch.tensor(1), None, True][: len(completions)])
    assert nothing(["a"] * 3, ["x"] * 3, solution=["y"] * 3) == [1.0, None, 1.0]
    for reward, number, said in (
        (Reward("few", lambda completions: [1.0]), 2, "the reward few gave 1 values for 2 answers"),
        (Reward("infinite", lambda completions: [math.inf]), 1, "the reward infinite is inf for 'x'"),
        (Reward("one", lambda completions: {"a": 1}), 1, "the reward one gave a dict for 1 answers"),
        (Reward("one", lambda completions: {1.0}), 1, "the reward one gave a set for 1 answers"),
        (Reward("one", lambda completions: "1"), 1, "the reward one gave a str for 1 answers"),
        (Reward("large", lambda completions: [1e308]), 1, r"is 1e\+308 .*; give a number of at most 1e\+16, or None"),
        (Reward("word", lambda completions: ["good"]), 1, "the reward word failed: ValueError"),
    ):
        refuses(said, reward, ["a"] * number, ["x"] * number)


def test_a_reward_changes_nothing_of_the_run(tmp_path, monkeypatch):
    """Neither what it was given, nor what is drawn next; what it draws follows from the seed and the step alone."""

    def careless(prompts, completions, words, **_):
        drawn.append(draw())
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        completions.pop()[0]["content"] = words[0].pop()
        change()
        return [1.0] * len(prompts)

    def draw() -> tuple:
        return random.random(), np.random.rand(), torch.rand(()).item()

    def change():
        os.chdir("/")
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)

    def state() -> tuple:
        return os.getcwd(), torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()

    file = tmp_path / "changes.py"
    changes = textwrap.dedent(inspect.getsource(change))
    file.write_text(f"import os, torch\n{changes}\nchange()\ndef ones(completions): ...\n")
    monkeypatch.chdir(tmp_path)
    at_first = state()
    load_rewards([f"{file}:ones"], [])
    assert state() == at_first
    reward, drawn, expected = Reward("careless", careless), [], []
    given = [["a"] * 2, [[{"role": "assistant", "content": "x"}] for _ in "ab"]]
    before = copy.deepcopy(given)
    for with_reward in (False, True):
        set_seed(5)
        for step in (1, 2, 1):
            if with_reward:
                words = [["b"]] * 2
                reward(*given, words=words, trainer_state=SimpleNamespace(global_step=step))
                assert given == before and words == [["b"]] * 2
            expected.append(draw())
        assert state() == at_first
    assert expected[:3] == expected[3:] and len({*expected}) == 3
    assert drawn[0] == drawn[2] != drawn[1] and not {*drawn} & {*expected}


def test_built_in_rewards_take_texts_and_messages():
    (think,) = load_rewards(["think_format_reward"], ["prompt"])
    texts = ["<think>a</think>b", "b"]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert think(["q"] * 2, texts) == think([[{"role": "user", "content": "q"}]] * 2, messages) == [1.0, 0.0]


def test_thoughts_that_the_prompt_has_opened(base):
    """An answer is whole with the `<think>` before it, which a template or a user has written, and which it may not repeat."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    asked, texts = [{"role": "user", "content": "q"}], ["a</think>b", "<think>a</think>b", "b"]
    template = (
        "{%% for m in messages %%}{{ m.content }}{%% endfor %%}{%% if add_generation_prompt %%}A: %s{%% endif %%}"
    )
    for opening, wanted in (("<think>\n", [1.0, 0.0, 0.0]), ("", [0.0, 1.0, 0.0])):
        tokenizer.chat_template = template % opening
        tokenizer.add_tokens(["<think>", "</think>", "A", ":", " ", "\n", "q"])
        (think,) = load_rewards(["think_format_reward"], ["prompt"], end_of_prompt(tokenizer, asked, {}))
        assert think([asked] * 3, texts) == wanted
        assert think([f"q{opening}"] * 3, texts) == wanted, "a text"
        begun = [*asked, {"role": "assistant", "content": f"So: {opening}"}]
        assert think([begun] * 3, texts) == wanted, "a begun answer"
    tokenizer.chat_template = template % "<think>\n\n</think>\n\n"
    with pytest.raises(ConfigError, match="no answer has a thought"):
        load_rewards(["think_format_reward"], ["prompt"], end_of_prompt(tokenizer, asked, {}))


def test_built_in_accuracy_of_mathematics():
    with pytest.raises(ConfigError, match="accuracy_reward needs solution; the data have the columns prompt"):
        load_rewards(["accuracy_reward"], ["prompt"])
    (accuracy,) = load_rewards(["accuracy_reward"], ["prompt", "solution"])
    answers = [r"It is $\boxed{\frac{2}{4}}$.", r"It is $\boxed{\frac{1}{3}}$."]
    assert accuracy(["q"] * 2, answers, solution=["$0.5$"] * 2) == [1.0, 0.0]
    assert accuracy(["q"] * 3, ["2", "", answers[0]], solution=["$2$", "$2$", "?"]) == [0.0, 0.0, None]
    numbers, boxed = [58, 58.0, 1e-7, 2.5], [r"\boxed{58}", r"\boxed{58}", r"\boxed{0.0000001}", r"\boxed{\frac{5}{2}}"]
    assert accuracy(["q"] * 4, boxed, solution=numbers) == [1.0] * 4
    assert accuracy(["q"] * 3, boxed[:3], solution=[None, True, float("nan")]) == [None] * 3
    assert accuracy(["q"] * 4, [r"\boxed{5} no, \boxed{4}", "4", "$4$", r"$5$, so \boxed{4}"], solution=["4"] * 4) == [
        0.0, 0.0, 0.0, 1.0,
    ]  # fmt: skip


def test_solutions_that_cannot_be_read_are_told_before_training(base):
    """They are counted, and the first is shown; if none can be read, the run ends."""
    tokenizer, said = AutoTokenizer.from_pretrained(base), []
    run: Any = SimpleNamespace(print=said.append)
    (accuracy,) = load_rewards(["accuracy_reward"], ["solution"])
    sides = {"train": ["58", "seven", "$7$", ""], "evaluate": ["1", "2"]}
    tables = {use: datasets.Dataset.from_dict({"solution": golds}) for use, golds in sides.items()}
    tell_of_rewards(run, tokenizer, tables, [accuracy])
    assert re.search(r"2 of the 4 solutions to train on, .* row 2, 'seven'", said[-1])
    number = len(said)
    tell_of_rewards(run, tokenizer, {"train": datasets.Dataset.from_dict({"solution": [58, 7]})}, [accuracy])
    assert len(said) in (number, number + 1) and "solutions" not in "".join(said[number:])
    none = {"train": datasets.Dataset.from_dict({"solution": ["a", "b"]})}
    refuses(r"2 of the 2 solutions to train on, .* row 1, 'a'", tell_of_rewards, run, tokenizer, none, [accuracy])
    own = Reward("accuracy_reward", lambda completions, **others: [0.0] * len(completions))
    tell_of_rewards(run, tokenizer, {"train": datasets.Dataset.from_dict({"prompt": ["a"]})}, [own])
    assert not any("2 of the 2" in line for line in said)
    tell_of_rewards(run, tokenizer, none, [own, accuracy])
    assert re.search(r"2 of the 2 solutions .*other rewards alone count", said[-1])


def test_marks_that_are_special_tokens(base):
    """Answers are decoded without them, as by trl; a reward that names the texts with them gets these, and no other."""
    tokenizer, said = AutoTokenizer.from_pretrained(base), []
    tokenizer.add_tokens(["a", "b", "<other>"])
    tokenizer.add_tokens(["<think>", "</think>", "<step>"], special_tokens=True)
    texts = ["<think>a</think>b</s>", "a</think>b</s>", "<other><think>a</think>b</s>", "<think>a<think>b</think>"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    plain, prompts = tokenizer.batch_decode(ids, skip_special_tokens=True), ["q"] * 4
    assert plain[0] == "ab"
    (think,) = load_rewards(["think_format_reward"], ["prompt"], "", tokenizer)
    assert think(prompts, plain, completion_ids=ids) == [1.0, 0.0, 0.0, 0.0]
    assert think(["q<think>"] * 4, plain, completion_ids=ids) == [0.0, 1.0, 0.0, 0.0]
    seen = []

    def asks(completions, completions_with_special_tokens):
        seen.extend([completions, completions_with_special_tokens])
        return [0.0] * 4

    Reward("asks", asks, tokenizer=tokenizer)(prompts, plain, completion_ids=ids)
    assert seen == [plain, texts]
    all_of_them = Reward("others", lambda **given: seen.append(given) or [0.0] * 4, tokenizer=tokenizer)
    all_of_them(prompts, plain, completion_ids=ids)
    assert seen[-1].keys() == {"prompts", "completions", "completion_ids"}
    tell_of_rewards(SimpleNamespace(print=said.append), tokenizer, {}, [think])
    assert "<think> </think> <step>;" in said[0] and "<other>" not in said[0] and "</s>" not in said[0]


def test_arithmetic_reward_and_data(tmp_path):
    """Each unordered pair of numbers lies in one part; make.py writes exactly the files that are here."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("make", DATA / "make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    make.write(tmp_path)
    seen = {}
    for part in ("sft", "rl", "test"):
        assert (tmp_path / f"{part}.jsonl").read_bytes() == (DATA / f"{part}.jsonl").read_bytes()
        for line in (DATA / f"{part}.jsonl").read_text().splitlines():
            row = json.loads(line)
            a, b = map(int, row["prompt"].rstrip("=").split("+"))
            assert seen.setdefault(frozenset((a, b)), part) == part
            assert int(row.get("solution") or row["completion"]) == a + b
    assert len(seen) == 90 * 91 // 2
    assert (tmp_path / "tokenizer/tokenizer.json").read_bytes() == (DATA / "tokenizer/tokenizer.json").read_bytes()
    (reward,) = load_rewards([f"{ROOT / 'recipes/rewards/arithmetic.py'}:is_correct"], ["prompt", "solution"])
    assert reward(["1+1="] * 3, ["2", "22", ""], solution=["2"] * 3) == [1.0, 0.0, 0.0]


def test_rows(tmp_path, base):
    """A prompt on both sides, prompts that are too long, and rows without prompts are errors that say what to do."""
    module, tokenizer = shipped.load(SCRIPT), AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)

    def load(rows: list[dict], heldout: list[dict] | None, room: int = 20):
        return load_all(rows, heldout, room)[0]

    def load_all(rows: list[dict], heldout: list[dict] | None, room: int = 20):
        argv = ["--model_name_or_path", str(base), "--rewards", "think_format_reward", "--heldout_share", "0.5"]
        argv += ["--max_prompt_length", str(room), "--max_completion_length", "8"]
        for name, content in (("train_files", rows), ("eval_files", heldout)):
            if content is not None:
                write_rows(tmp_path / f"{name}.jsonl", content)
                argv += [f"--{name}", str(tmp_path / f"{name}.jsonl")]
        return load_prompts(parse(module.Args, argv, world_size=1), tokenizer, model)

    rows = [{"prompt": f"{i}+{j}=", "other": i} for i in range(9) for j in (0, 1)]
    sides = load(rows, None)
    assert set(sides["train"]["prompt"]).isdisjoint(sides["test"]["prompt"])
    assert len(sides["train"]) + len(sides["test"]) == 18 and sides["train"].column_names == ["prompt", "other"]
    assert load(rows, [{"prompt": "99+1="}])["test"]["prompt"][:] == ["99+1="]
    sides, counts = load_all([*rows, {"prompt": "1" * 30, "other": 0}], [{"prompt": "99+1="}])
    assert len(sides["train"]) == 18 and counts == {"left out": 1, "longest": 31}
    # What goes to rewards is no message, and stays as it is written.
    solutions = [5, 2.5, 7, 12345678901234567890123, "5", 0.7, None, 1e-12, True]
    others = [{"solution": value, "tests": [{"in": value, "out": None, "content": ["a"]}], "at": {"x": value, "y": None}}
              for value in solutions]  # fmt: skip
    written = [{"prompt": f"{i}+1="} | other for i, other in enumerate(others)]
    sides = load(written, [{"prompt": "99+1=", "solution": 2}])
    assert [*map(json.dumps, sides["train"])] == [*map(json.dumps, written)]
    refuses("no prompt is left: all 18 have over 3 tokens", load, rows, None, room=3)
    wrong = [({"completions": "x"}, "has the column completions"), ({"prompt": ""}, "row 19: 'prompt' has no token")]
    for more, said in wrong:
        tokenizer.add_bos_token = False
        refuses(said, load, [*rows, rows[0] | more], [{"prompt": "1+1="}], error=(ConfigError, DataError))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ raise_exception('no') if m.role == 'x' else m.content }}{% endfor %}"
    )
    for message, said in (
        ({"role": "x", "content": "1"}, "row 2, cannot be rendered by the chat template: no"),
        ({"role": "user", "content": ""}, "row 2: 'prompt' has no token"),
    ):
        with pytest.raises(DataError, match=said):
            load([{"prompt": [{"role": "user", "content": "1"}]}, {"prompt": [message]}], None)
    # As a cell of a CSV file holds messages, with keys in any order; a JSON text about other things stays a text.
    asked = [json.dumps([{"content": f"{i}+1=", "role": "user"}]) for i in range(9)]
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    sides = load([{"prompt": text, "other": i} for i, text in enumerate(asked)], None)
    assert {"content": "1+1=", "role": "user"} in [message for side in sides.values() for (message,) in side["prompt"]]
    with pytest.raises(DataError, match="row 2: 'prompt' is '1', not messages as JSON"):
        load([{"prompt": asked[0]}, {"prompt": "1"}], None)
    texts = [json.dumps({"value": i}) for i in range(9)]
    assert {*load([{"prompt": text} for text in texts], None)["train"]["prompt"]} < {*texts}
    args = SimpleNamespace(base_model="base", max_prompt_length=0, max_completion_length=64)
    with pytest.raises(ConfigError, match=r"answers of 64 tokens leave no room .* 20 positions of base"):
        room_for_prompts(args, LlamaConfig(max_position_embeddings=20))


def test_samples_of_an_interrupted_run(tmp_path):
    """Answers after the checkpoint's step are dropped, also half a line; the page shows text as text."""
    samples = Samples(tmp_path, None)
    for step in (0, 3, 4):
        messages = [{"role": "user", "content": "<b>1</b>"}]
        sample = {"prompt": messages, "completion": "é\n2\u2028\x85", "rewards": {"right": None}}
        samples.add(step, "held out", [sample])
    with samples.path.open("a") as file:
        file.write('{"step": 3, "prom')
    again = Samples(tmp_path, tmp_path / "checkpoint-3")
    again.write_page()
    kept = [(row["step"], row["completion"]) for row in read_json_lines(again.path)]
    assert kept == [(step, "é\n2\u2028\x85") for step in (0, 3)]
    page = again.page.read_text()
    assert "<td>&lt;b&gt;1&lt;/b&gt;</td>" in page and '<td class="number">-</td>' in page
    assert ">3</td>" in page and ">4</td>" not in page
    Samples(tmp_path, None).write_page()
    assert not samples.path.read_text()


def test_problems_of_the_arguments(rewards_file):
    given = {"max_new_tokens": 9, "num_beams": 2, "min_new_tokens": 1, "heat": 1, "top_p": 0.5}
    argv = ["--rewards", f"{rewards_file}:ones", "--reward_weights", "1", "2", "--total_batch_size", "36"]
    argv += ["--chat_template_kwargs", "{no", "--generation_kwargs", json.dumps(given)]
    argv += ["--steps_per_generation", "2", "--eval_files", "no.jsonl", "--num_iterations", "3"]
    with refused(
        "--reward_weights has 2 numbers, --rewards 1 names", "--total_batch_size 36 is not a multiple of --num_generati",
        "--steps_per_generation (on the command line) is not an argument", "no.jsonl: no such file",
        "--save_steps 500 is not a multiple of --num_iterations 3",
        "--chat_template_kwargs is '{no'; it must be a JSON object",
        "--generation_kwargs has max_new_tokens, which is --max_completion_length", "has num_beams, which does not draw",
        "--generation_kwargs has heat, which is no setting of `generate`", "has top_p, which is --top_p",
        "give one of --dataset_name and --train_files", "--model_name_or_path is missing",
    ) as caught:  # fmt: skip
        parse(shipped.load(SCRIPT).Args, argv, world_size=1)
    assert "min_new_tokens" not in str(caught.value)


def test_a_begun_answer_goes_on(tmp_path):
    """A prompt that ends with a message of the assistant is neither closed nor followed by another turn, anywhere."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{{ '<|im_start|>assistant ' if add_generation_prompt }}"
    )
    tokenizer = AutoTokenizer.from_pretrained(save_base(tmp_path, template, "<|im_end|>"))
    asked = [[{"role": "user", "content": f"{i}?"}] for i in range(9)]
    prompts = [asked[0], [*asked[1], {"role": "assistant", "content": "So: <think> 1 "}], asked[2]]
    trainer: Any = SimpleNamespace(processing_class=tokenizer)
    trainer.run = SimpleNamespace(args=SimpleNamespace(template_settings={}, template_date=""))
    ids, *_ = AnswerTrainer._tokenize_prompts(trainer, prompts)
    assert ids == tokenize_prompts(tokenizer, prompts, trainer.run.args)
    assert [text.partition("?<|im_end|><|im_start|>")[2] for text in tokenizer.batch_decode(ids)] == [
        "assistant ", "assistant So: <think> 1 ", "assistant ",
    ]  # fmt: skip
    assert end_of_prompt(tokenizer, prompts[1], {}) == end_of_prompt(tokenizer, asked[1], {})
    (think,) = load_rewards(["think_format_reward"], ["prompt"], "")
    parts = [[*asked[1], {"role": "assistant", "content": [{"type": "text", "text": "So: <think> 1 "}]}]]
    for one in (prompts[1:2], parts):
        assert think(one * 2, ["+ 1 </think> 2", "+ 1 <think> </think> 2"]) == [1.0, 0.0]
    prepare(tmp_path, [{"prompt": [*prompt, {"role": "assistant", "content": "It"}]} for prompt in asked], name="grpo")
    assert "begun answers 9" in (tmp_path / "out/rows.txt").read_text()
    with pytest.raises(DataError, match=r"row \d+: 'prompt' ends with an answer that is empty"):
        prepare(tmp_path, [{"prompt": [*asked[0], {"role": "assistant", "content": ""}]}] * 9, name="grpo")
    with pytest.raises(DataError, match=r"row 2.* final message"):
        tokenizer.chat_template = "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}"
        tokenize_prompts(tokenizer, prompts, trainer.run.args)


def step_of(tmp_path, monkeypatch, rows: list[dict], rewards: list, *flags: object, **config) -> tuple[Any, Any, Any]:
    """Return what draws and trains on answers of 3 tokens to these rows; a GPT-2, and the reference."""
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %} {{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer(str(save_base(tmp_path, template)))
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64} | config
    model, other = tiny_model("gpt2", seed=1, **sizes), tiny_model("gpt2", seed=2, **sizes).eval()
    argv = [
        "--model_name_or_path", tmp_path, "--train_files", tmp_path / "config.json", "--rewards", "think_format_reward",
        "--total_batch_size", len(rows), "--per_device_train_batch_size", len(rows), "--max_completion_length", 3,
        "--template_date", "2024-02-29", *flags,
    ]  # fmt: skip
    args = parse(shipped.load(SCRIPT).Args, [str(word) for word in argv], world_size=1)
    run: Any = SimpleNamespace(
        args=args, accelerator=Accelerator(cpu=True), adapter=None, model=model, total_steps=9, print=print
    )
    run.shard_reference = lambda reference: reference
    monkeypatch.setattr(objective, "make_model", lambda _: other)
    given = {"reward_funcs": rewards, "train_dataset": datasets.Dataset.from_list(rows)}
    trainer = give_model_to_trl(run, trl_config(run, GRPOConfig), model, tokenizer, **given)
    trainer.use_sharded_model()
    trainer.add_reference()
    return trainer, model, other


def test_a_step_of_answers(tmp_path, monkeypatch):
    """trl renders its prompts on the day of the rows; its passes, and those of the reference, count positions in a row.

    Dropout is on, but not while answers are drawn and log-probabilities computed.
    """
    texts = ["12?"] * 2 + ["And 12 12 12?"] * 2
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    flags = ("--beta", 0.1, "--num_iterations", 2, "--save_steps", 2, "--num_generations", 2, "--entropy_coef", 0.5)
    rates, reward = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.5), lambda completions, **_: [1.0] * 4
    flags += ("--disable_dropout", "false")
    trainer, model, other = step_of(tmp_path, monkeypatch, rows, [reward], *flags, **rates)
    tokenizer, args = trainer.processing_class, trainer.run.args
    assert (trainer.beta, trainer.entropy_coef) == (0.1, 0.5)
    model.train()
    (drawn,) = trainer.draw(0, [{"rows": rows, "row": torch.arange(4)}])
    assert all(module.training for module in model.modules())
    model.eval()
    masks, prompts = drawn["prompt_mask"].bool(), drawn["prompt_ids"]
    assert "29 Feb 2024" in tokenizer.decode(prompts[0][masks[0]]) and not masks.all()
    entropy = 0.0
    for alone, name in ((other, "ref_per_token_logps"), (model, "old_per_token_logps")):
        for number in range(4):
            answer = drawn["completion_ids"][number][drawn["completion_mask"][number].bool()]
            ids = torch.cat([prompts[number][masks[number]], answer])[None]
            with torch.no_grad():
                logps = alone(ids).logits[0, -len(answer) - 1 : -1].log_softmax(-1)
            wanted = logps[range(len(answer)), answer]
            assert torch.allclose(drawn[name][number][: len(answer)], wanted, atol=1e-5), name
            if alone is model:  # each token is the first at which the sum of probabilities exceeds its number
                sums = logps.double().exp().cumsum(-1)
                numbers = numbers_of(args.seed, 0, [number], 3)[0, : len(answer), None]
                assert torch.equal(torch.searchsorted(sums, numbers, right=True)[:, 0], answer)
            entropy -= (logps.exp() * logps).sum().item() if alone is model else 0
    _, with_entropy = trainer.sum_parts(model, drawn)
    trainer.entropy_coef = 0.0
    _, without = trainer.sum_parts(model, drawn)
    assert (without - with_entropy).item() == pytest.approx(0.5 * entropy, rel=1e-4), "it counts once"


@pytest.mark.parametrize("flags", [(), ("--multi_objective_aggregation", "normalize_then_sum")], ids=["sum", "each"])
def test_equal_rewards_move_nothing(tmp_path, monkeypatch, flags):
    """A group whose answers earn the same has the advantage 0 to the last bit; the others have that of trl."""
    same, other = [0.1] * 7, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    parts = [same + other + same + [None] * 7, [0.35] * 7 + same + other[::-1] + [0.7] * 7]
    rewards = [Reward(name, lambda part=part, **_: part) for name, part in zip("ab", parts, strict=True)]
    rows = [{"prompt": [{"role": "user", "content": f"{i // 7}?"}]} for i in range(28)]
    trainer, model, _ = step_of(tmp_path, monkeypatch, rows, rewards, "--num_generations", 7, *flags)
    (drawn,) = trainer.draw(0, [{"rows": rows, "row": torch.arange(28)}])
    found = drawn["advantages"].view(4, 7)
    shares = {name: trainer._metrics["train"][f"rewards/{name}/none"] for name in "ab"}
    assert shares == {"a": [0.25], "b": [0.0]}
    assert not found[0].any() and not found[3].any() and found.dtype == torch.float32
    wanted = torch.arange(7.0) - 3
    assert torch.allclose(found[1] / found[1, -1], wanted / 3, atol=1e-5)
    assert torch.allclose(found[2], -found[1], atol=1e-5)
    alone = {key: it[:7] if isinstance(it, torch.Tensor) and it.dim() else it for key, it in drawn.items()}
    trainer.sum_parts(model, alone).sum().backward()
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_held_out_answers_are_drawn_as_training_draws(tmp_path, monkeypatch):
    rows = [{"prompt": [{"role": "user", "content": "12?"}]}] * 4
    flags = ("--top_k", 7, "--top_p", 0.9, "--min_p", 0.1, "--repetition_penalty", 1.3, "--temperature", 0.7)
    flags += ("--generation_kwargs", '{"min_new_tokens": 2, "typical_p": 0.9}', "--num_generations", 2)
    trainer, *_ = step_of(tmp_path, monkeypatch, rows, [lambda completions, **_: [0.0] * 4], *flags)
    given = trainer.run.args.sampling
    assert {*given} == {*OWN_FLAGS, "min_new_tokens", "typical_p"}
    assert {name: getattr(trainer.generation_config, name) for name in given} == given


def test_an_evaluation_tells_rewards_its_step(tmp_path, monkeypatch, capsys):
    """And it says which reward is None for how many answers, if others are not."""
    rows = [{"prompt": [{"role": "user", "content": "12?"}]}] * 4
    steps, nothing = [], Reward("nothing", lambda prompts, **_: [None] * len(prompts))

    def schedule(prompts, trainer_state):
        steps.append(trainer_state.global_step / trainer_state.max_steps)
        return [1.0, *[None] * (len(prompts) - 1)]

    rewards = [Reward("schedule", schedule), nothing]
    trainer, *_ = step_of(tmp_path, monkeypatch, rows, rewards, "--num_generations", 2)
    tokenizer, table = trainer.processing_class, datasets.Dataset.from_list(rows)
    measured = HeldoutAnswers(trainer.run, tokenizer, table, rewards, None).evaluate(3)
    trainer.draw(6, [{"rows": rows, "row": torch.arange(4)}])
    assert steps == [3 / 9, 6 / 9]
    assert measured["rewards/schedule/none"] == 0.75 and measured["rewards/nothing/none"] == 1.0
    assert "nothing gave None for all 4 " in capsys.readouterr().out


def test_which_rewards_differ():
    """Sums that differ by the rounding of their parts are equal; what differs in fp32 differs."""
    rewards = torch.tensor([[0.1, 0.4], [0.3, 0.2], [0.1, 0.2], [0.3, 0.0], [1.0, 1.0], [1.0, 1.0 + 1e-6]])
    nothing = torch.tensor([[torch.nan, torch.nan], [torch.nan, 5.0]])
    rewards = torch.cat([rewards, nothing]).double()
    pairs = {each: differ_in_groups(rewards, torch.ones(2), 2, each)[::2].tolist() for each in (False, True)}
    # Normalized, parts that change places are 1 and -1: their sums are equal.
    assert pairs == {False: [False, False, True, False], True: [False, False, True, False]}
    constant = torch.stack([torch.full((7,), 1e6 + 0.1), torch.arange(7.0)], 1).double()
    opposite = torch.tensor([[i / 10, 1 - i / 10] for i in range(7)]).double()
    assert [differ_in_groups(one, torch.ones(2), 7, True).all().item() for one in (constant, opposite)] == [True, False]


def test_values_are_those_of_trl():
    for name, values in VALUES.items():
        said = GRPOConfig.__dataclass_fields__[name].metadata["help"]
        assert {*re.findall(r"'(\w+)'", said)} >= {*values}
    asked = " ".join(re.findall(r"self\.loss_type (?:==|in) (.*):", inspect.getsource(GRPOTrainer)))
    assert {*re.findall(r'"(\w+)"', asked)} == {*VALUES["loss_type"]}


def test_a_simulated_answer_is_drawn_with_a_cache():
    """The prompts are read once; then one token at a time, after all others."""
    model, read, begun = tiny_model(), [], []

    def see(_: object, __: tuple, inputs: dict) -> None:
        (cache,) = (inputs[name] for name in CACHES & inputs.keys())
        read.append((*inputs["input_ids"].shape, cache and cache.get_seq_length()))

    model.model.register_forward_pre_hook(see, with_kwargs=True)
    draw_answers({}, torch.ones(6, 13, dtype=torch.int64), 8, 2, model, lambda *begin: begun.append(begin))
    assert read == [(6, 5, None), (6, 1, 5), (6, 1, 11)]
    assert begun == [("prompts", 2), ("first tokens", 8), ("tokens between", 0), ("last tokens", 6)]
