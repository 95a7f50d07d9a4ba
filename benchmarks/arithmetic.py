"""Whether GRPO and DPO improve a small model on sums, beside continued SFT for the same CPU time.

    python benchmarks/arithmetic.py run --seeds 1 2 3
    python benchmarks/arithmetic.py judge outputs/arithmetic_sft/export outputs/arithmetic_sft/judged.jsonl

For each seed: sft.py trains a new model on `sft.jsonl`, or the first --answers of it; grpo.py goes on with the prompts of
`rl.jsonl`, dpo.py with the model's own answers to them, judged by the same reward, and sft.py with the answers that it had,
for the CPU time that GRPO took: as many steps as should take it, and again with more or fewer if they did not.
`run` goes on where it was interrupted, in outputs/arithmetic; results go to benchmarks/results/arithmetic.json.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch
from machine import machine
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
DATA = ROOT / "data/arithmetic"
RESULTS = ROOT / "benchmarks/results/arithmetic.json"
STARTUP_STEPS = 1
EQUAL = 0.1  # CPU times that differ by less are equal; other work on the machine changes them too
TRIES = 4


def read(part: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()]


@torch.no_grad()
def answers(model_folder: Path, prompts: list[str], seed: int | None = None) -> list[str]:
    """Return the most likely answer to each prompt, or one that is drawn at temperature 1, with a seed."""
    model, tokenizer = (kind.from_pretrained(model_folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    torch.manual_seed(seed or 0)
    batch = tokenizer(prompts, return_tensors="pt", return_token_type_ids=False, padding=True, padding_side="left")
    how = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    new = model.eval().generate(**batch, max_new_tokens=6, pad_token_id=tokenizer.pad_token_id, **how)
    return tokenizer.batch_decode(new[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def accuracy(model_folder: Path) -> dict[str, float]:
    """Measure the share of right answers to the held-out problems."""
    rows = read("test")
    found = {}
    for name, seed in (("most_likely", None), ("drawn", 0)):
        said = answers(model_folder, [row["prompt"] for row in rows], seed)
        found[name] = sum(row["solution"] == text for row, text in zip(rows, said, strict=True)) / len(rows)
    return found


def judge(model_folder: Path, file: Path, num_prompts: int = 1500, draws: int = 4) -> None:
    """Draw answers of a model to the problems of `rl.jsonl`, and write them with their scores: a judge's file."""
    rows = read("rl")[:num_prompts]
    with file.open("w", encoding="utf-8") as lines:
        for draw in range(draws):
            said = answers(model_folder, [row["prompt"] for row in rows], seed=draw + 1)
            for row, text in zip(rows, said, strict=True):
                score = float(row["solution"] == text)
                lines.write(json.dumps({"prompt": row["prompt"], "completion": text, "score": score}) + "\n")


def train(recipe: str, out: Path, *args: object) -> float:
    """Run a recipe on one process and one thread, and return the CPU seconds that it took, or had taken."""
    done = out / "cpu_seconds"
    if not done.exists():
        command = [
            sys.executable,
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            "accelerate_configs/single.yaml",
        ]
        command += ["--mixed_precision", "no", f"recipes/{recipe}.py"]
        command += ["--config", f"recipes/configs/{recipe}/arithmetic.yaml", "--output_dir", out, "--eval_steps", 0]
        command += ["--resume_from_checkpoint", "none", *args]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with (out.with_suffix(".log")).open("w", encoding="utf-8") as log:
            subprocess.run(
                list(map(str, command)), cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        done.write_text(str(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime), encoding="utf-8")
    return float(done.read_text(encoding="utf-8"))


def run_seed(folder: Path, seed: int, steps: dict[str, int], num_answers: int | None) -> dict:
    """Train the four models of a seed; return CPU seconds and accuracies."""
    folder.mkdir(parents=True, exist_ok=True)
    given, answered = ("--seed", seed), folder / "answers.jsonl"
    answered.write_text("".join(json.dumps(row) + "\n" for row in read("sft")[:num_answers]), encoding="utf-8")
    rows = ("--train_files", answered)
    startup = train("sft", folder / "startup", *given, *rows, "--max_steps", STARTUP_STEPS, "--warmup_steps", 0)
    cpu = {"sft": train("sft", folder / "sft", *given, *rows, "--max_steps", steps["sft"])}
    base = folder / "sft/export"
    cpu["grpo"] = train("grpo", folder / "grpo", *given, "--model_name_or_path", base, "--max_steps", steps["grpo"])
    seconds_per_step = (cpu["sft"] - startup) / (steps["sft"] - STARTUP_STEPS)
    for _ in range(TRIES):
        more = max(1, round((cpu["grpo"] - startup) / seconds_per_step))
        continued = folder / f"sft_continued_{more}"
        cpu["sft_continued"] = train(
            "sft", continued, *given, *rows, "--from_scratch", "false", "--tokenizer_name=",
            "--model_name_or_path", base, "--max_steps", more, "--learning_rate", 1e-3,
        )  # fmt: skip
        if abs(cpu["sft_continued"] / cpu["grpo"] - 1) < EQUAL:
            break
        seconds_per_step = (cpu["sft_continued"] - startup) / more
    if not (judged := folder / "judged.jsonl").exists():
        judge(base, judged.with_suffix(".partial"))
        judged.with_suffix(".partial").rename(judged)
    cpu["dpo"] = train(
        "dpo",
        folder / "dpo",
        *given,
        "--model_name_or_path",
        base,
        "--train_files",
        judged,
        "--max_steps",
        steps["dpo"],
    )
    return {
        "seed": seed,
        "steps": steps | {"sft_continued": more},
        "startup_cpu_seconds": startup,
        "cpu_seconds": cpu,
        "accuracy": {
            name: accuracy((continued if name == "sft_continued" else folder / name) / "export") for name in cpu
        },
        "reward_in_training": [
            record["reward"]
            for record in map(json.loads, (folder / "grpo/metrics.jsonl").read_text(encoding="utf-8").splitlines())
            if "reward" in record
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train and measure")
    run.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    run.add_argument("--steps", type=int, nargs=3, default=[300, 100, 60], metavar=("SFT", "GRPO", "DPO"))
    run.add_argument("--answers", type=int, help="Rows of sft.jsonl to train on; default: all.")
    run.add_argument("--folder", type=Path, default=ROOT / "outputs/arithmetic")
    run.add_argument("--out", type=Path, default=RESULTS)
    judged = commands.add_parser("judge", help="draw and judge answers of a model")
    judged.add_argument("model", type=Path)
    judged.add_argument("file", type=Path)
    args = parser.parse_args()
    if args.command == "judge":
        judge(args.model, args.file)
        return
    steps = dict(zip(("sft", "grpo", "dpo"), args.steps, strict=True))
    results = {"machine": machine(torch.device("cpu")), "held_out_problems": len(read("test")), "seeds": []}
    for seed in args.seeds:
        results["seeds"].append(run_seed(args.folder / str(seed), seed, steps, args.answers))
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(results["seeds"][-1]), flush=True)


if __name__ == "__main__":
    main()
