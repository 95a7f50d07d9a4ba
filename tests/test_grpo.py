"""Tests of recipes/grpo.py: rewards from files, their errors, kill and resume, answers by step.

The base is a new Llama of two layers, made by sft.py; the reward is the share of a digit in an answer.
"""

import copy
import inspect
import json
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
from helpers import CHILDREN, ROOT, STEPS, log_of, read_metrics
from simulations import BF16, FP32, job
from tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from trl import GRPOConfig, GRPOTrainer

from accelerate_recipes.args import parse
from accelerate_recipes.arguments import shipped
from accelerate_recipes.chess.next_moves import longest_move
from accelerate_recipes.disk import read_json_lines
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.models.tokenizers import load_tokenizer
from accelerate_recipes.posttraining import objective
from accelerate_recipes.posttraining.answers import VALUES, RewardTrainer, give_model_to_trl
from accelerate_recipes.posttraining.drawing_trial import draw_answers
from accelerate_recipes.posttraining.prompts import end_of_prompt, load_prompts, room_for_prompts, tokenize_prompts
from accelerate_recipes.posttraining.rewards import MATH_VERIFY, Reward, load_rewards, reward_problems
from accelerate_recipes.posttraining.settings import trl_config
from accelerate_recipes.report.samples import Samples
from accelerate_recipes.upstream import CACHES

SFT = ROOT / "recipes/sft.py"
SCRIPT = ROOT / "recipes/grpo.py"
DATA = ROOT / "data/arithmetic"
REWARDS = """
import math

def ones(completions, **columns):
    return [text.count("1") / 6 for text in completions]

def short(prompts, completions, completion_ids, solution):
    assert len(prompts) == len(completions) == len(completion_ids) == len(solution)
    return [None if text == right else -float(len(ids)) for text, ids, right in zip(completions, completion_ids, solution)]

def breaks(completions, **columns):
    return [1 / 0 for _ in completions]

def few(completions, **columns):
    return [1.0]

def infinite(completions, **columns):
    return [math.inf for _ in completions]

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
    assert forks.run(out, *preset, "--config_overrides", *sizes, script=SFT) == 0, log_of(out)[-3000:]
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
        "--per_device_train_batch_size", 16, "--per_device_eval_batch_size", 4, "--max_steps", STEPS, "--save_steps", 3,
        "--learning_rate", 1e-2, "--logging_steps", 1, "--async_save", "false", "--beta", 0.01, "--num_samples", 4,
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

    # The same on one process: the evaluation before training is that of two.
    single = tmp_path / "single"
    assert forks.run(single, *arguments, "--max_steps", 1, "--save_steps", 0, config="single") == 0, log_of(single)[
        -3000:
    ]
    for name in ("eval_reward", "eval_sampled_reward"):  # drawn answers too are those of the prompt, not of the rank
        assert read_metrics(single)[0][name] == pytest.approx(before[name], rel=1e-5)


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
    file.write_text("".join(json.dumps({"prompt": text, "solution": "1"}) + "\n" for text in texts))
    args = [
        "--model_name_or_path", str(base), "--train_files", str(file), "--rewards", f"{rewards_file}:ones",
        "--max_prompt_length", str(prompt), "--max_completion_length", str(answer), "--num_generations", "2",
        "--total_batch_size", "16", "--per_device_train_batch_size", "2", "--num_eval_prompts", "4", "--max_steps", "5",
        *more,
    ]  # fmt: skip
    whole = ("--generation_kwargs", json.dumps({"min_new_tokens": answer}))  # no answer ends early
    script = CHILDREN / "ledger_of_grpo.py"
    assert forks.run(out, *args, *whole, "--heldout_share", 0.2, script=script, flags=flags) == 0, log_of(out)[-3000:]
    real = json.loads((out / "ledger.json").read_text())
    (simulated,) = simulator([job("fsdp_full", [str(SCRIPT), *args], *flags, device="cpu", micro_batches=4)])
    assert real["flops"] == simulated.flops
    scattered = "reduce_scatter_base 2"
    assert real["collectives"][scattered] == simulated.collectives[scattered]
    peaks = {name: max(peak for peak, _ in segments) for name, segments in simulated.phases}
    drawing = max(peaks[name] for name in ("prompts", "first tokens", "last tokens"))
    assert (drawing == peaks["last tokens"]) == (answer > prompt)
    # A step may have prompts of one length alone, and gloo's threads sometimes let go late of what was exchanged.
    assert min(abs(peak / drawing - 1) for peak in real["drawing"]) < 0.01 and max(real["drawing"]) < 1.02 * drawing
    assert real["peak"] == pytest.approx(simulated.peak, rel=0.005)


@pytest.mark.slow
def test_what_is_simulated_of_answers(simulator, base, rewards_file):
    """A chess model's answer is as long as the longest move; one that leaves no room for a prompt is refused."""
    model = ["--model_name_or_path", str(base), "--max_prompt_length", "11"]
    moves = [
        str(ROOT / "recipes/chess_grpo.py"), *model, "--total_batch_size", "8", "--per_device_train_batch_size", "4",
    ]  # fmt: skip
    rewards = ["--rewards", f"{rewards_file}:ones", "--train_files", str(DATA / "rl.jsonl")]
    long = [str(SCRIPT), *model, *rewards, "--max_completion_length", "1000"]
    found, refused = simulator([job("fsdp_full", command, *FP32, device="cpu") for command in (moves, long)])
    assert found.tokens == 4 * longest_move(AutoTokenizer.from_pretrained(base))
    assert isinstance(refused, ConfigError) and "answers of 1000 tokens leave no room" in str(refused)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_conversations(forks, base, rewards_file, tmp_path, name):
    """Prompts and answers may be messages; rewards get messages, and the page shows them."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{{ '</s>' if m['role'] == 'assistant' }}{% endfor %}"
    )
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    (tmp_path / "r.py").write_text(
        "def ones(completions, **_):\n    return [c[0]['content'].count('1') for c in completions]\n"
    )
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(64):
            row = {"prompt": [{"role": "user", "content": f"{i}+1="}]}
            if name == "dpo":
                row |= {
                    side: [{"role": "assistant", "content": f"{i + n}"}] for side, n in (("chosen", 1), ("rejected", 2))
                }
            file.write(json.dumps(row) + "\n")
    args = ("--model_name_or_path", tmp_path / "chat", "--train_files", tmp_path / "rows.jsonl", "--max_steps", 2)
    args += ("--total_batch_size", 8, "--per_device_train_batch_size", 4, "--logging_steps", 1, "--heldout_share", 0.2)
    if name == "grpo":
        args += ("--rewards", f"{tmp_path}/r.py:ones", "--max_completion_length", 5, "--learning_rate", 1e-3)
    out = tmp_path / "out"
    assert forks.run(out, *args, script=ROOT / f"recipes/{name}.py") == 0, log_of(out)[-3000:]
    if name == "grpo":
        rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
        assert {row["step"] for row in rows} == {0, 1, 2}
        page = (out / "samples.html").read_text()
        assert "user: " not in page and "assistant: " not in page, "a message alone needs no role"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_presets_run(forks, base, tmp_path, name):
    """The presets for sums run as on docs/dpo.md and docs/grpo.md, after that of sft.py, which has made the base."""
    args = (
        "--config", ROOT / f"recipes/configs/{name}/arithmetic.yaml", "--model_name_or_path", base, "--max_steps", 1,
    )  # fmt: skip
    args += ("--num_eval_prompts", 4) if name == "grpo" else ()
    out = tmp_path / "out"
    assert forks.run(out, *args, script=ROOT / f"recipes/{name}.py", config="ddp") == 0, log_of(out)[-3000:]


def test_a_reward_that_fails_ends_the_run_with_one_message(forks, arguments, rewards_file, tmp_path):
    """It fails on every rank at the first held-out answers; rank 0 says where."""
    out = tmp_path / "out"
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
        ([f"{rewards_file}:onse"], "defines no onse; it defines breaks, few, infinite, math, needs_more, number, ones"),
        ([f"{rewards_file}:"], "defines no function without a name"),
        ([f"{bad}:reward"], "bad.py cannot be read as Python: invalid syntax"),
        ([f"{rewards_file}:ones", f"{trap}:ones"], "defines no ones; it defines reward"),
        ([f"{rewards_file}:ones"] * 2, "--rewards has ones twice"),
    ):  # fmt: skip
        assert said in "\n".join(reward_problems(specs)), specs
    assert reward_problems([f"{trap}:reward", "think_format_reward"]) == []
    assert reward_problems(["/elsewhere/a.py:f"], elsewhere=["/elsewhere"]) == []
    monkeypatch.setattr("accelerate_recipes.posttraining.rewards.find_spec", lambda name: None)
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
        with pytest.raises(ConfigError, match=said):
            load_rewards([spec], columns)


def test_what_a_reward_gives_is_checked(rewards_file):
    few, infinite, ones = load_rewards([f"{rewards_file}:{name}" for name in ("few", "infinite", "ones")], ["prompt"])
    with pytest.raises(ConfigError, match="the reward few gave 1 values for 2 answers"):
        few(["a", "b"], ["1", "2"])
    with pytest.raises(ConfigError, match="the reward infinite is inf for '1'"):
        infinite(["a"], ["1"])
    assert ones(["a", "b"], ["111111", ""], weather=["sun", "rain"]) == [1.0, 0.0]
    nothing = Reward("nothing", lambda completions: [torch.tensor(1), None, True][: len(completions)])
    assert nothing(["a"] * 3, ["x"] * 3, solution=["y"] * 3) == [1.0, None, 1.0]
    for given, said in (({"a": 1}, "a dict"), ({1.0}, "a set"), ("1", "a str")):
        with pytest.raises(ConfigError, match=f"the reward one gave {said} for 1 answers"):
            Reward("one", lambda completions, given=given: given)(["a"], ["x"])
    with pytest.raises(ConfigError, match=r"is 1e\+308 for 'x'; give a number of at most 1e\+16, or None"):
        Reward("large", lambda completions: [1e308])(["a"], ["x"])
    with pytest.raises(ConfigError, match="the reward word failed: ValueError"):
        Reward("word", lambda completions: ["good"])(["a"], ["x"])


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
    file.write_text(
        f"import os, torch\n{textwrap.dedent(inspect.getsource(change))}\nchange()\ndef ones(completions): ...\n"
    )
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
        assert think([[*asked, {"role": "assistant", "content": f"So: {opening}"}]] * 3, texts) == wanted, (
            "a begun answer"
        )
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


@pytest.mark.slow
def test_a_run_on_mathematics(forks, tmp_path):
    """Answers to problems in LaTeX get numbers in training, on two ranks, and in the evaluation."""
    folder = save_base(tmp_path / "base", None)
    file, out = tmp_path / "problems.jsonl", tmp_path / "out"
    rows = [{"prompt": rf"What is $\frac{{{i}}}{{2}}$?", "solution": rf"$\frac{{{i}}}{{2}}$"} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("--model_name_or_path", folder, "--train_files", file, "--heldout_share", 0.2, "--max_steps", 2)
    arguments += (
        "--rewards", "accuracy_reward", "think_format_reward", "--max_completion_length", 5, "--logging_steps", 1,
    )  # fmt: skip
    assert forks.run(out, *arguments, "--total_batch_size", 8, "--per_device_train_batch_size", 4) == 0, log_of(out)[
        -3000:
    ]
    records = read_metrics(out)
    trained = [record["rewards/accuracy_reward/mean"] for record in records if "loss" in record]
    measured = [record["eval_rewards/accuracy_reward"] for record in records if "eval_reward" in record]
    assert len(trained) == len(measured) == 2 and all(0 <= value <= 1 for value in trained + measured)


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
                (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
                argv += [f"--{name}", str(tmp_path / f"{name}.jsonl")]
        return load_prompts(parse(module.Args, argv, world_size=1), tokenizer, model)

    rows = [{"prompt": f"{i}+{j}=", "other": i} for i in range(9) for j in (0, 1)]
    sides = load(rows, None)
    assert set(sides["train"]["prompt"]).isdisjoint(sides["test"]["prompt"])
    assert len(sides["train"]) + len(sides["test"]) == 18 and sides["train"].column_names == ["prompt", "other"]
    assert load(rows, [{"prompt": "99+1="}])["test"]["prompt"][:] == ["99+1="]
    sides, counts = load_all([*rows, {"prompt": "1" * 30, "other": 0}], [{"prompt": "99+1="}])
    assert len(sides["train"]) == 18 and counts == {"left out": 1, "longest": 31}
    with pytest.raises(ConfigError, match=r"2 of 2 rows of --eval_files begin as rows of"):
        load(rows, [{"prompt": "1+1="}] * 2)
    with pytest.raises(ConfigError, match="no prompt is left: all 18 have over 3 tokens"):
        load(rows, None, room=3)
    for more, said in (
        ({"completions": "x"}, "has the column completions"),
        ({"prompt": ""}, "row 19: 'prompt' has no token"),
    ):
        tokenizer.add_bos_token = False
        with pytest.raises((ConfigError, DataError), match=said):
            load([*rows, rows[0] | more], [{"prompt": "1+1="}])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ raise_exception('no') if m.role == 'x' else m.content }}{% endfor %}"
    )
    for message, said in (
        ({"role": "user"}, "row 2: 'prompt' .* without content"),
        ({"content": "1"}, "row 2: .prompt. has a message without a role"),
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
    args = SimpleNamespace(base_model="base", max_prompt_length=0)
    with pytest.raises(ConfigError, match=r"answers of 64 tokens leave no room .* 20 positions of base"):
        room_for_prompts(args, LlamaConfig(max_position_embeddings=20), 64)
    with pytest.raises(DataError, match="has no column 'prompt'; there are question"):
        load([{"question": "1+1="}], None)
    with pytest.raises(ConfigError, match=r"none of \d+ rows is left to"):
        load(rows[:1], None)


def test_samples_of_an_interrupted_run(tmp_path):
    """Answers after the checkpoint's step are dropped, also half a line; the page shows text as text."""
    samples = Samples(tmp_path, None)
    for step in (0, 3, 4):
        messages = [{"role": "user", "content": "<b>1</b>"}]
        samples.add(
            step, "held out", [{"prompt": messages, "completion": "é\n2\u2028\x85", "rewards": {"right": None}}]
        )
    with samples.path.open("a") as file:
        file.write('{"step": 3, "prom')
    again = Samples(tmp_path, tmp_path / "checkpoint-3")
    again.write_page()
    assert [(row["step"], row["completion"]) for row in read_json_lines(again.path)] == [
        (0, "é\n2\u2028\x85"),
        (3, "é\n2\u2028\x85"),
    ]
    page = again.page.read_text()
    assert "<td>&lt;b&gt;1&lt;/b&gt;</td>" in page and '<td class="number">-</td>' in page
    assert ">3</td>" in page and ">4</td>" not in page
    Samples(tmp_path, None).write_page()
    assert not samples.path.read_text()


def test_problems_of_the_arguments(rewards_file):
    module = shipped.load(SCRIPT)
    with pytest.raises(ConfigError) as caught:
        parse(
            module.Args,
            ["--rewards", f"{rewards_file}:ones", "--reward_weights", "1", "2", "--total_batch_size", "36",
             "--chat_template_kwargs", "{no", "--generation_kwargs",
             '{"max_new_tokens": 9, "num_beams": 2, "min_new_tokens": 1, "heat": 1, "top_p": 0.5}', "--steps_per_generation", "2", "--eval_files", "no.jsonl",
             "--exclude_rows", "no.jsonl"],
            world_size=1,
        )  # fmt: skip
    said = str(caught.value)
    for problem in (
        "--reward_weights has 2 numbers, --rewards 1 names", "--total_batch_size 36 is not a multiple of --num_generati",
        "--steps_per_generation (on the command line) is not an argument", "no.jsonl: no such file",
        "--chat_template_kwargs is '{no'; it must be a JSON object",
        "--generation_kwargs has max_new_tokens, which is --max_completion_length", "has num_beams, which does not draw",
        "--generation_kwargs has heat, which is no setting of `generate`", "has top_p, which is --top_p",
        "give one of --dataset_name and --train_files", "--model_name_or_path is missing",
        "--exclude_rows: GRPO draws and scores the answers of a step together",
    ):  # fmt: skip
        assert problem in said, said
    assert "min_new_tokens" not in said


@pytest.mark.parametrize("form", ["text", "chat"])
def test_answers_are_drawn_to_the_prompts_that_are_compared(tmp_path, form):
    """trl's tokens of a prompt are those that are counted, shown, and compared with the export."""
    tokenizer = AutoTokenizer.from_pretrained(save_base(tmp_path, template_of("qwen3")))
    settings, prompts = {"enable_thinking": False}, ["12 + 3?", "And?"]
    if form == "chat":
        prompts = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] for text in prompts]
    given = {"processing_class": tokenizer, "chat_template": None, "chat_template_kwargs": settings, "tools": []}
    trainer: Any = SimpleNamespace(**given, _is_vlm=False, environment_factories=None)
    ids, *_ = GRPOTrainer._tokenize_prompts(trainer, prompts)
    args = SimpleNamespace(template_settings=settings, template_date="")
    assert ids == tokenize_prompts(tokenizer, prompts, args)


def test_a_step_of_answers(tmp_path, monkeypatch):
    """trl renders its prompts on the day of the rows; its passes, and those of the reference, count positions in a row."""
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %} {{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer(str(save_base(tmp_path, template)))
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64} | dict.fromkeys(
        ("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0
    )
    model, other = (tiny_model("gpt2", seed=seed, **sizes).train() for seed in (1, 2))
    argv = [
        "--model_name_or_path", tmp_path, "--train_files", tmp_path / "config.json", "--rewards", "think_format_reward",
        "--beta", 0.1, "--num_iterations", 2, "--save_steps", 2, "--total_batch_size", 4, "--per_device_train_batch_size", 4,
        "--num_generations", 2, "--max_completion_length", 3, "--template_date", "2024-02-29", "--entropy_coef", 0.5,
    ]  # fmt: skip
    args = parse(shipped.load(SCRIPT).Args, [str(word) for word in argv], world_size=1)
    run: Any = SimpleNamespace(args=args, accelerator=Accelerator(cpu=True), adapter=None, model=model)
    run.shard_reference = lambda reference: reference
    monkeypatch.setattr(objective, "make_model", lambda _: other)
    rows = [
        {"prompt": [{"role": "user", "content": text}]} for text in ("12?", "12?", "And 12 12 12?", "And 12 12 12?")
    ]
    given = {"reward_funcs": [lambda completions, **_: [1.0] * 4], "train_dataset": datasets.Dataset.from_list(rows)}
    trainer = give_model_to_trl(RewardTrainer, run, trl_config(run, GRPOConfig), model, tokenizer, **given)
    assert (trainer.beta, trainer.entropy_coef) == (0.1, 0.5)
    trainer.use_sharded_model()
    trainer.add_reference()
    (drawn,) = trainer.draw(0, [{"rows": rows, "row": torch.arange(4)}])
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
            entropy -= (logps.exp() * logps).sum().item() if alone is model else 0
    _, with_entropy = trainer.sum_parts(model, drawn)
    trainer.entropy_coef = 0.0
    _, without = trainer.sum_parts(model, drawn)
    assert (without - with_entropy).item() == pytest.approx(0.5 * entropy, rel=1e-4), "it counts once"


def test_values_are_those_of_trl():
    for name, values in VALUES.items():
        said = GRPOConfig.__dataclass_fields__[name].metadata["help"]
        assert {*re.findall(r"'(\w+)'", said)} >= {*values}
    asked = " ".join(re.findall(r"self\.loss_type (?:==|in) (.*):", inspect.getsource(GRPOTrainer)))
    assert {*re.findall(r'"(\w+)"', asked)} == {*VALUES["loss_type"]}


def test_evaluations_draw_for_themselves():
    """Drawing in an evaluation does not change what training draws next."""
    from accelerate_recipes.models.generation import own_draws

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with own_draws(1):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with own_draws(1):
        assert torch.equal(torch.rand(3), first)


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
