"""Measure the peak memory of exporting a model: with our export, and with `accelerate merge-weights`.

    python benchmarks/export_memory.py --out benchmarks/results/export_memory.json

A Llama with random weights (fp32, 1.2 GiB unless said otherwise) makes one AdamW step under
accelerate_configs/fsdp_full.yaml on two processes, and is saved twice, in shards of torch.distributed.checkpoint:

    ours             a checkpoint as a run writes it, model and optimizer; exported by `checkpoint.export` into
                     safetensors files of at most 1/--shards of the model
    merge-weights    only the weights, saved by the function of Accelerate's `save_state` in pytorch_model_fsdp_0/;
                     merged by the function of `accelerate merge-weights` into one safetensors file, its only layout

Each export runs in a fresh process, which imports what its command imports, notes its resident memory and resets the
high-water mark. The verdict uses the strictest number that the kernel keeps: VmHWM at the end less VmRSS after
the imports. It includes mapped files, and modules that are only imported when a configuration or a model class is looked
up. The peak of RssAnon, sampled every 5 ms, is reported too; it leaves out mapped files. The kernel's cache
of the files read and written belongs to no process and is in neither. Sizes are MiB = 2**20 bytes.

Read the verdict first: in its worst round ours should stay under half of the model. The weights of the two results are
compared bit by bit: if they differ, the benchmark ends with an error. Linux only. It needs 9 GiB of disk in $TMPDIR, and
the memory to train the model in two processes.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import merge_fsdp_weights
from machine import machine
from safetensors import safe_open

from accelerate_recipes.checkpoint.export import export

STRATEGY = Path(__file__).parents[1] / "accelerate_configs" / "fsdp_full.yaml"
EXPORTS = ("ours", "merge-weights")
TARGET = 0.5  # of the model's size
MIB = 2**20


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default, text in (
        ("rounds", 3, "Exports of each kind."),
        ("shards", 8, "max_shard_size is the size of the model divided by this."),
        ("vocab_size", 32_000, "Words in the model's vocabulary."),
        ("hidden_size", 1024, "Width of the model."),
        ("intermediate_size", 2816, "Width of the model's feed-forward layers."),
        ("num_hidden_layers", 20, "Layers of the model."),
        ("num_attention_heads", 16, "Attention heads of the model."),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--out", type=Path, help="Write all numbers to this JSON file.")
    # The benchmark calls itself with these flags.
    parser.add_argument("--part", choices=["save", *EXPORTS], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--max_shard_size", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def save(flags: argparse.Namespace) -> None:
    """Train one step and save in both layouts; runs on every rank of a launch."""
    # Imported here, since a measured process must not import more than its export does.
    from accelerate.utils import save_fsdp_model

    from accelerate_recipes.args import TrainArgs
    from accelerate_recipes.checkpoint.checkpointer import Checkpointer
    from accelerate_recipes.distributed import make_accelerator, prepare
    from accelerate_recipes.models import new_llama
    from accelerate_recipes.optim import make_scheduler

    args = TrainArgs(output_dir=str(flags.folder), async_save=False)
    accelerator = make_accelerator(args)
    model = new_llama(
        "sdpa",
        vocab_size=flags.vocab_size,
        hidden_size=flags.hidden_size,
        intermediate_size=flags.intermediate_size,
        num_hidden_layers=flags.num_hidden_layers,
        num_attention_heads=flags.num_attention_heads,
        num_key_value_heads=flags.num_attention_heads,
        tie_word_embeddings=False,
    )
    artifacts = [model.config, model.generation_config]
    model, optimizer, _ = prepare(accelerator, model, args)
    model(input_ids=torch.arange(8)[None]).logits.logsumexp(-1).sum().backward()
    optimizer.step()  # gives AdamW its state, two thirds of the checkpoint
    scheduler = make_scheduler(optimizer, args, 1)
    if accelerator.is_main_process:
        (flags.folder / "metrics.jsonl").touch()
    Checkpointer(accelerator, model, optimizer, scheduler, args, artifacts, resumed_from=None).save(1, {})
    save_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, str(flags.folder))
    accelerator.end_training()


def memory() -> dict[str, float]:
    """Return the resident memory of this process, in MiB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return {name: int(kib) / 1024 for name, kib in re.findall(r"(VmHWM|VmRSS|RssAnon|RssFile):\s+(\d+) kB", status)}


def reset_high_water_mark() -> bool:
    """Reset VmHWM; return whether the kernel allows it. If not, the peak may be that of the imports: too high."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def measure(flags: argparse.Namespace) -> dict:
    """Measure one export, in a process that has done nothing but import."""
    most_anonymous = 0.0
    done = threading.Event()

    def watch() -> None:
        nonlocal most_anonymous
        while not done.wait(0.005):
            most_anonymous = max(most_anonymous, memory()["RssAnon"])

    watcher = threading.Thread(target=watch)
    before = memory()
    was_reset = reset_high_water_mark()
    watcher.start()
    start = time.perf_counter()
    try:
        if flags.part == "ours":
            export(flags.folder / "checkpoint-1", flags.folder / "ours", max_shard_size=flags.max_shard_size)
        else:
            merge_fsdp_weights(str(flags.folder / "pytorch_model_fsdp_0"), str(flags.folder / "merge-weights"))
        seconds = time.perf_counter() - start
        after = memory()
    finally:
        done.set()
        watcher.join()
    return {
        "peak": after["VmHWM"] - before["VmRSS"],
        "peak_anonymous": most_anonymous - before["RssAnon"],
        "mapped_files_growth": after["RssFile"] - before["RssFile"],
        "after_imports": before["VmRSS"],
        "high_water_mark": after["VmHWM"],
        "high_water_mark_was_reset": was_reset,
        "seconds": seconds,
    }


def start_part(part: str, flags: argparse.Namespace, *launcher: str, **overrides: object) -> str:
    """Run this file in a new process, or in the processes of a launcher; return its output."""
    given = vars(flags) | overrides | {"part": part}
    settings = [text for name, value in given.items() if value is not None for text in (f"--{name}", str(value))]
    command = [sys.executable, *launcher, __file__, *settings]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if finished.returncode:
        raise RuntimeError(f"{part} failed:\n{finished.stdout[-2000:]}{finished.stderr[-4000:]}")
    return finished.stdout


def compare_weights(ours: Path, merged: Path) -> int:
    """Check that our safetensors files hold the same weights as the merged file; return their number.

    Raises:
        RuntimeError: if names, dtypes, shapes or values differ.
    """
    files = sorted(ours.glob("*.safetensors"))
    differing = []
    with safe_open(merged, framework="pt") as theirs:
        missing = set(theirs.keys())
        for file in files:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (no dict)
                    if name not in missing:
                        differing.append(name)
                        continue
                    missing.remove(name)
                    a, b = shard.get_tensor(name), theirs.get_tensor(name)
                    if a.dtype != b.dtype or not torch.equal(a, b):
                        differing.append(name)
    if differing or missing:
        raise RuntimeError(f"the two exports differ: other values {sorted(differing)}, not in ours {sorted(missing)}")
    return len(files)


def print_result(result: dict) -> None:
    size = result["model_mib"]
    print(
        f"{result['num_parameters']:,} parameters, {size:,.0f} MiB in fp32, largest tensor "
        f"{result['largest_tensor_mib']:,.0f} MiB; ours in {result['num_files']} files of at most "
        f"{result['max_shard_size_mib']:,.0f} MiB"
    )
    print("MiB above the imports, the worst round:")
    print(f"{'':<16}{'VmHWM':>10}{'of model':>10}{'RssAnon':>10}{'imports':>10}{'seconds':>10}")
    for name, rounds in result["rounds"].items():
        worst = max(rounds, key=lambda measured: measured["peak"])
        seconds = median(measured["seconds"] for measured in rounds)
        print(
            f"{name:<16}{worst['peak']:>10,.0f}{worst['peak'] / size:>10.3f}{worst['peak_anonymous']:>10,.0f}"
            f"{worst['after_imports']:>10,.0f}{seconds:>10.1f}"
        )
    print("weights: the same bits")
    share = result["peak_of_model"]["ours"]
    verdict = "under" if share < TARGET else "NOT under"
    print(f"verdict: ours peaks at {share:.3f} of the model, {verdict} {TARGET:g}")


def main(flags: argparse.Namespace) -> None:
    rounds: dict[str, list[dict]] = {name: [] for name in EXPORTS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launcher = ("-m", "accelerate.commands.launch", "--config_file", str(STRATEGY), "--mixed_precision", "no")
        start_part("save", flags, *launcher, folder=folder)
        saved = dcp.FileSystemReader(folder / "pytorch_model_fsdp_0").read_metadata().state_dict_metadata.values()
        sizes = [entry.size.numel() * entry.properties.dtype.itemsize for entry in saved]
        max_shard_size = sum(sizes) // flags.shards
        for i in range(flags.rounds):
            for part in EXPORTS if i % 2 == 0 else reversed(EXPORTS):
                printed = start_part(part, flags, folder=folder, max_shard_size=max_shard_size)
                rounds[part].append(json.loads(printed.splitlines()[-1]))
            num_files = compare_weights(folder / "ours", folder / "merge-weights" / "model.safetensors")
    own_flags = {k: v for k, v in vars(flags).items() if k not in ("part", "folder", "max_shard_size")}
    peak_of_model = {
        name: max(measured["peak"] for measured in measurements) * MIB / sum(sizes)
        for name, measurements in rounds.items()
    }
    result = machine(torch.device("cpu")) | {
        "strategy": STRATEGY.stem,
        "flags": own_flags | {"out": str(flags.out)},
        "judged": "peak: VmHWM at the end less VmRSS after the imports, MiB, the worst round",
        "num_parameters": sum(entry.size.numel() for entry in saved),
        "model_mib": sum(sizes) / MIB,
        "largest_tensor_mib": max(sizes) / MIB,
        "max_shard_size_mib": max_shard_size / MIB,
        "num_files": num_files,
        "rounds": rounds,
        "peak_of_model": peak_of_model,
        "weights_equal": True,
        "target_of_model": TARGET,
        "target_met": peak_of_model["ours"] < TARGET,
    }
    print_result(result)
    if flags.out:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        flags.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    flags = parse_flags()
    if flags.part is None:
        main(flags)
    elif flags.part == "save":
        save(flags)
    else:
        print(json.dumps(measure(flags)))
