"""What a launch of `gpu.py` measures: attention by itself, the library's own training step, the tests for GPUs."""

import dataclasses
import functools
import gc
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from gpu_cases import Batch, Case, config_of, packed_batch
from harness import CPU, GIB, ROOT
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from accelerate_recipes.args import TrainArgs, arg
from accelerate_recipes.arguments.gpus import bf16_peak
from accelerate_recipes.distributed import make_accelerator
from accelerate_recipes.engine import Step, to_device, train_step
from accelerate_recipes.losses import count_next_tokens, next_token_loss_without_logits
from accelerate_recipes.metrics import decoder_flops, device_name, trained_share
from accelerate_recipes.models.adapters import add_adapters
from accelerate_recipes.models.attention import use_flash_3
from accelerate_recipes.models.document_attention import documents
from accelerate_recipes.models.documents import boundaries
from accelerate_recipes.models.loading import new_model
from accelerate_recipes.models.weights import initialize
from accelerate_recipes.run import Run

Report = Callable[[dict[str, Any]], None]  # writes what a case finds, as it finds it
TINY_ROW = 128  # tokens


@dataclasses.dataclass
class Args(TrainArgs):
    """Arguments of a recipe with a pretrained model, for adapters."""

    model_name_or_path: str = arg("", "A folder with weights.")


def attempt(report: Report, setting: str, measure: Callable[[], dict[str, Any]]) -> None:
    """Report what a measurement finds, or how it failed: the next one has its chance."""
    try:
        found = measure()
    except Exception as error:  # whatever it is, it is the result
        found = {"error": f"{type(error).__name__}: {error}"[:600]}
    report({"setting": setting} | found)
    gc.collect()  # an error holds the tensors of its frames
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], repeats: int, warmups: int) -> list[float]:
    """Time a piece of work, each time to the end of all that the device has to do."""
    times = []
    for _ in range(warmups + repeats):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return times[warmups:]


def attention(case: Case, tiny: bool, report: Report) -> None:
    """Forward and backward pass of the attention of one layer of 8B, by each kernel that a row could have.

    `padded` has at least 64 documents, the last ones empty, as for a graph that serves any number of documents. A row of
    one document needs no mask, and could have torch's kernels, with the keys repeated for each head.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    length = TINY_ROW if tiny else 4096
    use_flash_3()
    for kind in ("one", "c4"):
        ends = boundaries(packed_batch(Batch(1, length, documents=kind), 8, 0)["position_ids"])
        exact, longest = ends["cu_seqlens"].to(device), ends["max_seqlen"]
        torch.manual_seed(0)
        make = functools.partial(torch.randn, device=device, dtype=dtype, requires_grad=True)
        *leaves, gradient = (make(1, heads, length, 128) for heads in (32, 8, 8, 32))

        def ours(ends: torch.Tensor, longest=longest, leaves=leaves) -> torch.Tensor:
            query, keys, values = leaves
            found, _ = documents(
                torch.nn.Identity(), query, keys, values, None, cu_seq_lens_q=ends, max_length_q=longest
            )
            return found.transpose(1, 2)

        def causal(backend: SDPBackend, leaves=leaves) -> torch.Tensor:
            query, *narrow = leaves
            with sdpa_kernel(backend):
                wide = (t.repeat_interleave(4, 1) for t in narrow)
                return F.scaled_dot_product_attention(query, *wide, is_causal=True)

        padded = F.pad(exact, (0, max(0, 65 - len(exact))), value=length)
        ways = {"exact": functools.partial(ours, exact), "padded": functools.partial(ours, padded)}
        if kind == "one":
            ways["cuDNN"] = functools.partial(causal, SDPBackend.CUDNN_ATTENTION)
            ways["flash"] = functools.partial(causal, SDPBackend.FLASH_ATTENTION)
        flops = 12 * 32 * 128 * exact.double().diff().square().sum().item()
        for way, attend in ways.items():
            measured = functools.partial(compare, attend, ways["exact"], leaves, gradient, flops, 2 if tiny else 20)
            attempt(report, f"{way}, {kind}", measured)


def compare(attend, exact, leaves: list[torch.Tensor], gradient: torch.Tensor, flops: float, repeats: int):
    """Time a kernel, and say how far its output and gradients are from those of another, relative to their norms."""

    def both(attend=attend) -> list[torch.Tensor]:
        output = attend()
        return [output, *torch.autograd.grad(output, leaves, gradient)]

    off = max(
        ((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(both(), both(exact), strict=True)
    )
    times = seconds_of(both, repeats, 3)
    return {
        "what": "attention", "milliseconds": 1000 * median(times), "range": [1000 * min(times), 1000 * max(times)],
        "tflops": flops / median(times) / 1e12, "off": off,
    }  # fmt: skip


@contextmanager
def trained(case: Case, accelerator: Accelerator) -> Iterator[tuple[Run, Callable[..., float]]]:
    """Make a run with a new model and its optimizer, as a recipe does, and let go of it; also give its FLOPs of a token."""
    with tempfile.TemporaryDirectory() as folder:
        args = Args(output_dir=folder, **case.args)
        run = Run(args, accelerator)
        model = new_model(config_of(case), "documents", torch.bfloat16 if args.use_peft else args.param_dtype)
        if args.use_peft:
            initialize(model, args.seed, accelerator.device)
            # A checkpoint would say by a checksum of these files which model an adapter belongs to.
            args.model_name_or_path = folder
            save_file({"weight": torch.zeros(1)}, Path(folder, "model.safetensors"))
        run.adapter = add_adapters(model, args)
        share = trained_share(model)
        flops = functools.partial(decoder_flops, model.config, model.num_parameters(), trained_share=share)
        run.shard(model)
        use_flash_3()  # as `run.prepare` does
        del model
        run.model.train()
        try:
            yield run, flops
        finally:
            run.release()


def steps(case: Case, tiny: bool, report: Report, accelerator: Accelerator) -> None:
    """Speed and memory of training steps of each batch, with the same model; then the kernels of one more step."""
    device, words = accelerator.device, config_of(case).vocab_size
    with trained(case, accelerator) as (run, flops):
        for batch in case.batches:
            torch._dynamo.reset()  # else kernels are made for rows of any size
            made = [packed_batch(batch, words, seed) for seed in range(batch.micro_batches)]
            attended = sum(one["cu_seqlens"].double().diff().square().sum().item() for one in made)
            attended /= batch.rows * batch.length * batch.micro_batches
            rows = [to_device(one, device) for one in made]
            step = functools.partial(train_step, run, rows, next_token_loss_without_logits, count_next_tokens)
            attempt(report, batch.name, functools.partial(measure_steps, step, batch, flops, attended, tiny))
            attempt(report, f"{batch.name}: kernels", functools.partial(kernels, step))


def measure_steps(step: Callable[[], Step], batch: Batch, flops, attended: float, tiny: bool) -> dict[str, Any]:
    done: list[Step] = []
    first, _ = seconds_of(lambda: done.append(step()), 2, 0)  # the first compiles
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    times = seconds_of(lambda: done.append(step()), 2 if tiny else 5, 0)
    tokens = batch.rows * batch.length * batch.micro_batches
    device = torch.accelerator.current_accelerator(True) or CPU
    speed, peak = tokens / median(times), bf16_peak(device_name(device))
    found = {
        "what": "steps", "tokens_per_second": speed, "range": [tokens / max(times), tokens / min(times)],
        "seconds": times, "first_seconds": first, "attended_length": attended,
        "mfu": peak and speed * flops(attended_length=batch.length) / peak,  # with T of the row, as others count
        "mfu_attended": peak and speed * flops(attended_length=attended) / peak,
        "loss": done[-1].loss, "grad_norm": done[-1].grad_norm.item(),
    }  # fmt: skip
    if torch.cuda.is_available():
        found["allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        found["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return found


def kernels(step: Callable[[], Step]) -> dict[str, Any]:
    """Find the kernels that take most of a step, in milliseconds; on a CPU, operators."""
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        step()
        wait()
    clock = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    times = sorted(((getattr(event, clock) / 1000, event.key[:120]) for event in trace.key_averages()), reverse=True)
    most = {name: time for time, name in times[:15]}
    return {"what": "kernels", "milliseconds": sum(time for time, _ in times), "kernels": most}


def tests(case: Case, tiny: bool, report: Report) -> None:
    """Run the tests that compare a GPU with a CPU; a rehearsal only collects them."""

    def run() -> dict[str, Any]:
        names = "attention or (trajectory and fsdp_full) or loss_without_logits or waits or simulated"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_gpu.py", "-k", names]
        command += ["--collect-only"] * tiny
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        print(done.stdout, done.stderr, flush=True)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return {"what": "tests", "code": done.returncode, "summary": done.stdout.splitlines()[-1:], "failed": failed}

    attempt(report, "tests/test_gpu.py", run)


def measure(cases: list[Case], tiny: bool, write: Callable[[str, dict[str, Any]], None]) -> None:
    """Measure cases of one launch in this process."""
    accelerator = None
    for case in cases:
        report = functools.partial(write, case.name)
        try:
            if tiny:
                torch.set_num_threads(1)  # more would wait for each other
                batches = tuple(b._replace(rows=min(b.rows, 2), length=TINY_ROW) for b in case.batches)
                case = case._replace(model="tiny", batches=batches)
            if case.measure == "steps":
                accelerator = accelerator or make_accelerator(Args())
                steps(case, tiny, report, accelerator)
            else:
                {"attention": attention, "tests": tests}[case.measure](case, tiny, report)
        except Exception as error:  # such as a ConfigError of the launch: it is the result of the case
            report({"error": f"{type(error).__name__}: {error}"[:600]})
