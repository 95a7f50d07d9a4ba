"""Measure what a mirror costs a run, and how fast a copy is made.

    python benchmarks/mirror.py --out benchmarks/results/mirror.json

Each round launches the toy recipe of the tests twice, with a mirror and without, in turns, with a save every 20 steps. The
mirror is a folder, so no server takes a core, and is capped at --bandwidth MiB/s. The seconds are those from the first log
line to the last, saves in between included. Then a copy of --mib MiB in four files is sent to a folder by the uploader's
`send_part`, and by `put` of fsspec, in turns; both are on the disk at the end.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fsspec
from harness import ROOT, machine, make_parser, print_ratios, ratios, turns, write_json

from accelerate_recipes.checkpoint.files import checksum
from accelerate_recipes.checkpoint.store import Pace, Store


def seconds_of_steps(folder: Path, steps: int, width: int, bandwidth: int, *, mirrored: bool) -> float:
    """Launch a run, and return the seconds from its first step to its last."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += [
        "--config_file",
        str(ROOT / "accelerate_configs/ddp.yaml"),
        "--mixed_precision",
        "no",
        "--num_processes",
        "1",
        "--main_process_port",
        "0",
        "tests/children/toy.py",
    ]
    command += ["--output_dir", str(folder / "out"), "--num_train_epochs", "1000", "--max_steps", str(steps)]
    command += ["--save_steps", "20", "--hidden_size", str(width)]
    command += ["--mirror", str(folder / "mirror"), "--mirror_bandwidth", str(bandwidth)] if mirrored else []
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
    lines = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    times = [line["time"] for line in lines if "loss" in line]
    return times[-1] - times[0]


def seconds_of_copy(source: Path, place: Path, how: str) -> float:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()  # a store takes a missing folder for a disk that is not mounted
    os.sync()
    names = sorted(path.name for path in source.iterdir())
    marker = {"files": {name: {"checksum": checksum(source / name)} for name in names}}
    start = time.perf_counter()
    if how == "send_part":
        Store(str(place)).send_part(source, "copy", marker, names, 0, Pace())
    else:
        fsspec.filesystem("file", auto_mkdir=True).put(str(source), str(place), recursive=True)
        os.sync()  # as ours does, file by file
    return time.perf_counter() - start


def main() -> None:
    parser = make_parser(
        __doc__,
        rounds=(5, "Pairs of runs, and of copies."),
        steps=(200, "Steps of a run."),
        width=(256, "Width of the model."),
        bandwidth=(20, "MiB/s of the mirror."),
        mib=(2048, "Size of the copy."),
    )
    args = parser.parse_args()
    seconds = {"with": [], "without": [], "send_part": [], "put": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds):
            for name in turns(["with", "without"], number):
                sizes = (args.steps, args.width, args.bandwidth)
                seconds[name].append(seconds_of_steps(Path(folder) / "run", *sizes, mirrored=name == "with"))
        source = Path(folder) / "source"
        source.mkdir()
        for number in range(4):
            (source / f"{number}.bin").write_bytes(os.urandom(args.mib * 2**18))
        for number in range(args.rounds):
            for name in turns(["send_part", "put"], number):
                seconds[name].append(seconds_of_copy(source, Path(folder) / "place", name))
    found = ratios(seconds, "with", ["without"]) | ratios(seconds, "put", ["send_part"])
    print_ratios("seconds", found)
    write_json(args.out, {"machine": machine(), "settings": vars(args), "seconds": seconds, "ratios": found})


if __name__ == "__main__":
    main()
