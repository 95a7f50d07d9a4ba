"""Run and measure one trial of benchmarks/ablation.py: some optimizer steps of a recipe, under its own conditions.

    accelerate launch --config_file accelerate_configs/fsdp_full.yaml benchmarks/ablation_trial.py --steps 5 \\
        recipes/chess.py --config recipes/configs/chess/laptop.yaml

The recipe is loaded by its path and runs until it calls `train`. `measure` replaces `train`: it gets the same model,
optimizer and loader. Each rank writes its results to `rank-<n>.json` in the recipe's --output_dir. A rank that fails
writes there why, and whether memory was the reason, and ends at once; the launcher ends its peers.
"""

import argparse
import ctypes
import json
import os
import re
import resource
import sys
import time
import traceback
from pathlib import Path

import datasets
import numpy as np
import psutil
import torch
import transformers
from harness import GIB, machine, peak_begins, status
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from accelerate_recipes.args import resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.distributed import strategy_name
from accelerate_recipes.engine import Batch, CountFn, LossFn, TrainLoader, to_device, train_step
from accelerate_recipes.errors import ConfigError, raise_problems
from accelerate_recipes.launch.checks import launch_problems, num_accelerators
from accelerate_recipes.metrics import peak_memory_gib
from accelerate_recipes.run import Run

# What a traceback says when memory is used up: on a GPU, in Python, torch, C++, a thread, oneDNN.
NO_MEMORY = re.compile(
    r"OutOfMemoryError|MemoryError|can't allocate memory|Cannot allocate memory|bad_alloc|out of memory|"
    r"can't start new thread|Resource temporarily unavailable|could not (create|execute) a primitive(?! descriptor)"
)


class Trial:
    """Work and results of one rank."""

    def __init__(self, steps: int, memory_gib: float):
        self.steps = steps
        self.memory_gib = memory_gib
        self.found: dict = {}

    def save(self, folder: str | Path, **found: object) -> None:
        """Write the results so that the file is whole at any time: the process may be killed."""
        self.found |= found
        path = Path(folder) / f"rank-{os.environ.get('RANK', 0)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".partial").write_text(json.dumps(self.found), encoding="utf-8")
        path.with_suffix(".partial").replace(path)

    def prepare(self, original):
        """Wrap `Run.prepare` so that it keeps within the memory limit of a trial."""

        def prepare_within_limit(run: Run, model: nn.Module, *rest, **settings):
            accelerator = run.accelerator
            self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
            self.held_before = 0.0
            if accelerator.device.type == "cpu":
                # Only the model counts, not the interpreter, the libraries and the data.
                weights = sum(num_bytes(parameter) for parameter in model.parameters() if not parameter.is_meta)
                self.held_before = (psutil.Process().memory_info().rss - weights) / GIB
                peak_begins()  # preparing data may have needed more
                if self.memory_gib:
                    return_freed_memory()
                    limit_memory(status("VmData") - weights + int(self.memory_gib * GIB))
            original(run, model, *rest, **settings)

        return prepare_within_limit

    def measure(self, run: Run, train_loader: TrainLoader, *, loss_fn: LossFn, count_fn: CountFn, **_: object) -> None:
        """Measure steps in place of `engine.train`; does not return.

        Tokens are targets, as in the log of a run. Throughput is measured on rows in their order, after three steps of
        warm-up; peak memory over all steps.
        """
        accelerator, args, model, optimizer = run.accelerator, run.args, run.model, run.optimizer
        sizes: dict[str, int] = {}
        optimizer.register_step_post_hook(lambda *_: sizes.update(state_bytes(model, optimizer, accelerator.device)))
        train_loader.start_at(0, [])
        batches = iter(train_loader)
        longest = longest_batch(train_loader, args.per_device_train_batch_size)
        model.train()

        def step(batch: Batch) -> tuple[float, int]:
            """Take one step; return its seconds, and the number of targets on all ranks."""
            start = time.perf_counter()
            done = train_step(run, [to_device(batch, accelerator.device)], loss_fn, count_fn)
            run.scheduler.step()
            num_targets = int(done.num_targets)
            if accelerator.device.type == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start, num_targets

        # The longest rows come twice: the first step makes the optimizer state. Then rows in order, for the compiler.
        for batch in (longest or next(batches), longest or next(batches), next(batches)):
            step(batch)
        seconds, tokens = zip(*(step(next(batches)) for _ in range(self.steps)), strict=True)
        tokens_per_second = sum(tokens) / sum(seconds)
        self.save(
            args.output_dir,
            model=accelerator.unwrap_model(model, keep_torch_compile=False).config.model_type,
            num_parameters=self.num_parameters,
            strategy=strategy_name(accelerator),
            precision=accelerator.mixed_precision,
            num_processes=accelerator.num_processes,
            device_type=accelerator.device.type,
            tokens_per_second=tokens_per_second,
            # A recipe need not count FLOPs.
            tflops_per_device=run.flops and run.flops.attended * tokens_per_second / accelerator.num_processes / 1e12,
            step_seconds=seconds,
            peak_memory_gib=peak_memory_gib(accelerator.device) - self.held_before,
            **sizes,
        )
        limit_memory(None)  # the profiler's own memory does not count
        batch = next(batches)
        with profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] * torch.cuda.is_available())]
        ) as profiled:
            seconds, _ = step(batch)  # pyright: ignore
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profiled.events() or ()
            if re.match(r"gloo:|nccl(Dev)?Kernel", event.name)
        ]
        self.save(args.output_dir, communication_share=covered(spans) / 1e6 / seconds)
        raise SystemExit(0)


def return_freed_memory() -> None:
    """Make glibc return the memory of a large tensor to the system as soon as it is freed.

    Else glibc keeps ever larger blocks, and what fits depends on where they happen to lie. This costs page faults.
    """
    glibc = ctypes.CDLL(None)
    glibc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD, which by itself grows to 32 MiB
    glibc.malloc_trim(0)


def limit_memory(most: int | None) -> None:
    """Limit VmData, private writable memory, used or not, to `most` bytes; None removes the limit."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard if most is None else most, hard))


def longest_batch(loader: TrainLoader, size: int) -> Batch | None:
    """Return a micro-batch of the longest rows (if it fits, all fit), or None where all rows are equally long."""
    lengths = getattr(getattr(loader, "batch_sampler", None), "lengths", None)
    if lengths is None:
        return None
    rows = np.resize(np.argsort(lengths, kind="stable")[::-1], size)  # repeat rows if there are too few
    return loader.collate_fn([loader.dataset[int(row)] for row in rows])


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """Count the bytes of the tensors that this rank holds on its device after a step, before the gradients are freed.

    `whole_bytes` is the sum if nothing were sharded (not under FSDP1, whose tensors do not know it).
    """
    parameters = list(model.parameters())
    tensors = {
        "parameter_bytes": parameters,
        "gradient_bytes": [p.grad for p in parameters if p.grad is not None],
        "optimizer_bytes": [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)],
    }
    found = {"whole_bytes": sum(num_bytes(tensor) for part in tensors.values() for tensor in part)}
    for name, part in tensors.items():
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in part]
        found[name] = sum(num_bytes(tensor) for tensor in local if tensor.device.type == device.type)
    return found


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of the spans: collectives may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="Optimizer steps to measure.")
    parser.add_argument(
        "--memory_gib", type=float, default=0.0, help="Limit for the model's state and activations, on a CPU only."
    )
    parser.add_argument("recipe", help="Recipe to run, such as recipes/chess.py.")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Arguments of the recipe.")
    flags = parser.parse_args()
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    trial = Trial(flags.steps, flags.memory_gib)
    output_dir = dict(zip(flags.arguments, flags.arguments[1:], strict=False)).get("--output_dir", ".")
    code = 1
    try:
        module = shipped.load(flags.recipe)
        args, problems = resolve(module.Args, flags.arguments)
        raise_problems("This run cannot start", launch_problems(args, os.environ, num_accelerators()) + problems)
        args.max_steps = 10**6  # rows repeat as often as large batches need
        Run.prepare, module.train = trial.prepare(Run.prepare), trial.measure
        if int(os.environ.get("RANK", 0)) == 0:  # it looks at the first device, which no other rank should open
            described = machine(torch.device("cuda" if num_accelerators() else "cpu"))
            del described["command"]  # results.jsonl has the command of the launch
            trial.save(args.output_dir, machine=described)
        module.main(args)
    except SystemExit:
        code = 0
    except BaseException as error:
        limit_memory(None)  # leave memory to report the error
        trace = traceback.format_exc()
        reason = str(error) if isinstance(error, ConfigError) else traceback.format_exception_only(error)[-1].strip()
        if "tokens_per_second" in trial.found:
            trial.save(output_dir, profile_failed=reason)
        else:
            outcome = "out of memory" if NO_MEMORY.search(trace) else "failed"
            outcome = "cannot run" if isinstance(error, ConfigError) else outcome
            trial.save(output_dir, outcome=outcome, reason=reason, failed_at=time.time())
        print(trace, file=sys.stderr, flush=True)
    # End at once: the interpreter's teardown would wait for the peers.
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
