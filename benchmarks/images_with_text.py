"""Measure what rows with images cost: the runs without them, and the memory of the loader with them.

    python benchmarks/images_with_text.py --base /tmp/base --out benchmarks/results/images_with_text.json

`--base` is the tree of a commit before images, 4debce00 (`git archive 4debce00 | tar -x -C /tmp/base`). Its recipes/sft.py
and that of this tree take turns: to an error in the arguments, which shows what is imported, and a run of --steps steps,
whose seconds a step are the median of the log lines behind the first.

The loader reads rows of four JPEG images of 1600x1200, each scaled by Qwen2-VL's processor as it is published, in batches of
one row. A batch is held for half a second, as a step would, so that the workers fill what they may prefetch. Memory is the
largest sum of PSS of the process and its workers, above that before the first row, with 0 and 2 workers, over 16 and 64
rows.
"""

import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np
import psutil
from first_step import make_rows
from harness import MIB, ROOT, machine, make_parser, print_ratios, ratios, turns, write_json
from PIL import Image

SIZE = (1600, 1200)


def timed(tree: Path, argv: list[str]) -> tuple[float, float]:
    """Run a command in a tree; return its seconds of wall clock and of CPU."""
    env = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *argv], cwd=tree, env=env, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "lr_nonsense" in argv[1] or done.returncode == 0, done.stderr[-2000:]
    return time.perf_counter() - start, sum(
        getattr(after, kind) - getattr(before, kind) for kind in ("ru_utime", "ru_stime")
    )


def without_images(base: Path, rounds: int, steps: int) -> dict[str, dict[str, list[float]]]:
    trees = {"before": base, "now": ROOT}
    found = {what: {name: [] for name in trees} for what in ("start, wall", "start, CPU", "run, CPU", "step, wall")}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "base")
        make_rows(place, 400)
        for number in range(rounds):
            for name in turns(list(trees), number):
                wall, cpu = timed(trees[name], ["recipes/sft.py", "--lr_nonsense", "1"])
                out = Path(folder, f"{name}{number}")
                argv = [
                    "recipes/sft.py", "--model_name_or_path", f"{place}/qwen2_5", "--train_files",
                    f"{place}/chats/train.jsonl", "--eval_files", f"{place}/eval.jsonl", "--output_dir", str(out),
                    "--max_steps", str(steps), "--logging_steps", "5", "--max_length", "256", "--total_batch_size", "4",
                ]  # fmt: skip
                _, of_run = timed(trees[name], argv)
                records = [
                    json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                ]
                speeds = [record["samples_per_second"] for record in records if "samples_per_second" in record]
                for what, value in zip(found, (wall, cpu, of_run, 4 / median(speeds[1:])), strict=True):
                    found[what][name].append(value)
    return found


def photos(folder: Path, number: int) -> list[Path]:
    """Write JPEG files of noise that is smooth, as photos are."""
    files = []
    for seed in range(number):
        small = np.random.default_rng(seed).integers(0, 256, (150, 200, 3), dtype=np.uint8)
        Image.fromarray(small).resize(SIZE, Image.Resampling.BICUBIC).save(file := folder / f"{seed}.jpg", quality=90)
        files.append(file)
    return files


def published() -> tuple:
    """Make a processor of images as that of Qwen2-VL is published, with a small tokenizer, and a configuration."""
    sys.path += [str(ROOT / "tests"), str(ROOT / "tests/children")]
    import tiny_images

    tiny_images.FAMILIES["qwen2_vl"]["images"] = ("qwen2_vl", "Qwen2VL", {"patch_size": 14, "merge_size": 2})
    config = tiny_images.config("qwen2_vl")
    config.vision_config.patch_size = 14
    return tiny_images.processor("qwen2_vl"), config


def memory_of_loader(num_rows: int, num_workers: int, folder: Path) -> None:
    """Read rows with images once; print the largest memory of this process and its workers, in MiB."""
    from datasets import Dataset

    from accelerate_recipes.args import TrainArgs
    from accelerate_recipes.data.image_texts import DOCUMENTS
    from accelerate_recipes.data.pictures import image_checksum
    from accelerate_recipes.data.rows import Rows, make_train_loader
    from accelerate_recipes.life import workers
    from accelerate_recipes.posttraining.supervised_images import ImageCollator, PackedDocuments
    from accelerate_recipes.posttraining.trained_rows import Numbered, numbered_row

    processor, config = published()
    workers.start_fork_server()
    files = sorted(folder.glob("*.jpg"))
    collate = ImageCollator(processor, config)
    text, _ = collate.pictures.of_size(*SIZE, True)
    ids = processor.tokenizer(f"{text} and " * 4, add_special_tokens=False)["input_ids"]
    rows, read = [], []
    for number in range(num_rows):
        own = [files[(4 * number + place) % len(files)] for place in range(4)]
        sums = [image_checksum(file.read_bytes()) for file in own]
        rows.append((ids, ids, number, "", [0] * 4, [0] * 4, sums, False))
        read.append({"images": [{"path": str(file), "bytes": None} for file in own], "row": number + 1})
    columns = dict(zip(DOCUMENTS, map(list, zip(*rows, strict=True)), strict=True))
    tokens, numbers = Dataset.from_dict(columns, features=DOCUMENTS), [[number] for number in range(num_rows)]
    packed = PackedDocuments(tokens, Dataset.from_list(read), numbers, "rows", [])
    args = TrainArgs(per_device_train_batch_size=1, total_batch_size=1, dataloader_num_workers=num_workers)
    args.num_train_epochs = 1
    loader = make_train_loader(Rows(packed, numbered_row), args, 0, 1, collate_fn=Numbered(collate))
    process, peak, is_over = psutil.Process(), 0, threading.Event()
    collate.base  # noqa: B018  made before the first measure, if there are no workers

    def held() -> int:
        total = 0
        for one in [process, *process.children(recursive=True)]:
            try:
                total += one.memory_full_info().pss
            except psutil.Error:  # it has just ended
                continue
        return total

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.05):
            peak = max(peak, held())

    before = held()
    watching = threading.Thread(target=watch)
    watching.start()
    size = 0
    for batch in loader:
        size = sum(value.nbytes for value in batch.values() if hasattr(value, "nbytes"))
        time.sleep(0.5)
    is_over.set()
    watching.join()
    print(json.dumps({"above": (peak - before) / MIB, "batch": size / MIB}), flush=True)
    os._exit(0)


def main() -> None:
    parser = make_parser(__doc__, rounds=(5, "Rounds of runs without images."), steps=(60, "Steps of a run."))
    parser.add_argument("--base", type=Path, required=True, help="Tree of a commit before images.")
    parser.add_argument("--loader", type=int, nargs=2, help="Rows and workers: measure the loader alone, once.")
    flags = parser.parse_args()
    if flags.loader:
        memory_of_loader(*flags.loader, flags.base)
    result = machine() | {"loader": []}
    with tempfile.TemporaryDirectory() as folder:
        photos(Path(folder), 16)
        for workers, rows in itertools.product((0, 2), (16, 64)):
            argv = [__file__, "--base", folder, "--loader", str(rows), str(workers)]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            result["loader"].append({"rows": rows, "workers": workers} | json.loads(done.stdout.splitlines()[-1]))
            print(result["loader"][-1], flush=True)
    result["without_images"] = without_images(flags.base, flags.rounds, flags.steps)
    result["load_average_after"] = psutil.getloadavg()[0]
    for what, values in result["without_images"].items():
        print_ratios(what, ratios(values, "now", ["before"]))
    write_json(flags.out, result)


if __name__ == "__main__":
    main()
