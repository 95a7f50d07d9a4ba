"""Kernels, bytes and kept activations of one layer of Llama 2 7B in a training step on one GPU, counted without a GPU.

    pip install triton==3.7.1
    python benchmarks/layer_counts.py --out benchmarks/results/layer_counts.json

A step of one row of 4,096 tokens is simulated as `plan` does it, with two layers and with one: the difference is a layer,
with its part of what FSDP, clipping and the optimizer do. An operator that moves bytes stands for a kernel. Compiled layers
cannot be simulated: theirs are the kernels that inductor writes for the forward and the backward pass on a GPU of Hopper's
kind, for which it needs triton, but no GPU. Times are arithmetic. It prints the table of docs/levers.md.
"""

import argparse
import contextlib
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from gpu_cases import KAHAN, Batch, Case, config_of
from gpu_predicted import job_of
from machine import machine
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

from accelerate_recipes.attention import DOCUMENTS
from accelerate_recipes.models import new_model
from accelerate_recipes.plan import simulate
from accelerate_recipes.plan.ledger import ACTIVATIONS, Ledger
from accelerate_recipes.plan.pretence import guard_nothing
from accelerate_recipes.strategy import fp8_layers

BYTES_A_SECOND = 4.3e12  # assumed: about what an H200 copies, read and written
MATMULS, ATTENTION, COPIES = "matmuls", "attention", "copies and casts"
CLIPPING, OPTIMIZER, REST = "norm of the gradients, clipping", "optimizer", "norms, RoPE, SwiGLU, sums"
PARTS = (MATMULS, ATTENTION, REST, COPIES, CLIPPING, OPTIMIZER)
COPYING = {"_to_copy", "copy_", "clone", "_foreach_copy_", "all_gather_copy_in", "split_with_sizes_copy", "chunk_cat"}
ROW = 4096
ONE, PACKED = (Batch(1, ROW),), (Batch(1, ROW, documents="c4"),)
# In the order of the steps from what was to what is.
SIMULATED = {
    "fsdp_full.yaml, fp32 masters, a mask": Case(
        "", 0, model="7B", batches=PACKED, config="fsdp_full", attention="sdpa"
    ),
    "fsdp_full.yaml, fp32 masters": Case("", 0, model="7B", batches=PACKED, config="fsdp_full"),
    "single.yaml, fp32 masters": Case("", 0, model="7B", batches=ONE, config="single"),
    "all in bf16, not compiled": Case(
        "", 0, model="7B", batches=PACKED, config="single", launch="--mixed_precision no", args=KAHAN
    ),
}
COMPILED, FP8 = "single_bf16.yaml: compiled", "single_fp8.yaml, weights in bf16: compiled"
CUDA = torch.device("cuda", 0)


class ByPart(Ledger):
    """Ledger that counts operators that move bytes, and the bytes, by parts of a step."""

    def begin_step(self) -> None:
        super().begin_step()
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def account(self, func, args, kwargs, out) -> None:
        name = func._schema.name.partition("::")[2]
        before = self.moved[name]
        super().account(func, args, kwargs, out)
        if moved := self.moved[name] - before:
            part = self.part_of(name)
            self.kernels[part] += 1
            self.bytes[part] += moved

    def part_of(self, name: str) -> str:
        phases = [phase.name for phase in self.phases]
        if "backward" in phases[:-1] and phases[-1] != "backward":  # of one micro-batch
            return OPTIMIZER if phases[-1] == "optimizer" else CLIPPING
        if name in ("mm", "addmm", "bmm"):
            return MATMULS
        if "attn" in name or "attention" in name:
            return ATTENTION
        return COPIES if name in COPYING else REST


def simulated(case: Case, layers: int) -> tuple[Counter[str], Counter[str], int]:
    """Simulate a step of a case with so many layers; returns as `compiled`. The process is good for nothing else then."""
    job = replace(job_of(case, case.batches[0]), num_layers=layers)
    ledgers: list[ByPart] = []

    def make_ledger(*args: Any) -> ByPart:
        ledgers.append(ByPart(*args))
        return ledgers[0]

    with mock.patch.object(simulate, "Ledger", make_ledger):
        outcome = simulate.simulate_here(job)
    (ledger,) = ledgers
    # Of the forward pass's end: what is at hand then, but not what was before it.
    kept = max(
        kinds.get(ACTIVATIONS, 0) for name, segments in outcome.phases for _, kinds in segments if name == "forward"
    )
    return ledger.kernels, ledger.bytes, kept


def of_one_layer(case: Case) -> dict[str, Any]:
    """Count a layer: what a second one adds."""
    kernels, moved, kept = in_process(simulated, case, 2)
    kernels_of_one, moved_of_one, kept_of_one = in_process(simulated, case, 1)
    kernels.subtract(kernels_of_one)
    moved.subtract(moved_of_one)
    return layer(kernels, moved, kept - kept_of_one)


def layer(kernels: Counter, moved: Counter, kept: int) -> dict[str, Any]:
    """Make a row of the results."""
    return {
        "kernels": {part: kernels[part] for part in PARTS},
        "bytes": {part: moved[part] for part in PARTS},
        "kept_activations": kept,
    }


def in_process(work: Callable, *args: Any) -> Any:
    """Run it in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)


def compiled(in_fp8: bool) -> tuple[Counter[str], Counter[str], int]:
    """Compile a layer in bf16 for a GPU; returns kernels and bytes by part, and the bytes that its backward pass keeps.

    This process is good for nothing else afterwards. Dynamo and autograd trace fake tensors of a CPU, since autograd asks
    for a GPU's streams where it meets one. Between them and inductor the graphs are moved to the GPU: all operators of this
    layer are traced alike on both.
    """
    import torch._functorch.config
    import torch._inductor.compile_fx as inductor
    from torch._inductor import ir
    from torch._inductor.graph import GraphLowering

    torch._functorch.config.force_non_lazy_backward_lowering = True  # the backward pass too, without running it
    torch._functorch.config.enable_autograd_cache = torch._inductor.config.fx_graph_cache = False
    kernels, moved, kept = Counter(), Counter(), []

    def count(graph: GraphLowering, code: Any) -> SimpleNamespace:
        """Count the kernels of a graph, in place of loading what was written for it."""
        for node in graph.scheduler.nodes:
            if node.is_extern() and isinstance(node.node, ir.MultiOutput):  # one of an operator's results
                continue
            name = node.node.python_kernel_name if node.is_extern() else ""
            part = (ATTENTION if "attn" in name else MATMULS) if name else REST  # with what is cast to fp8
            kernels[part] += 1
            moved[part] += node.get_read_write_buffers_sizes()
        return SimpleNamespace(call=lambda args: graph.orig_gm(*args), __file__="", key="")

    def compile_for_gpu(graph: torch.fx.GraphModule, inputs: list[Any], **settings: Any) -> Any:
        for node in graph.graph.nodes:
            tree_map(moved_to_gpu, node.meta.get("val"))
            node.kwargs = {k: CUDA if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}
        tree_map(moved_to_gpu, list(inputs))
        if not settings.get("is_backward"):
            # The first result is the layer's, which the next layer keeps as its input.
            made = [node for node in graph.graph.output_node().args[0] if node.op != "placeholder"]
            kept.append(sum(node.meta["val"].numel() * node.meta["val"].itemsize for node in made))
        with hopper():
            return original(graph, inputs, **settings)

    original = inductor.compile_fx_inner
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = new_model(config_of(Case("", 0, model="7B", layers=1)), DOCUMENTS, torch.bfloat16)
    if in_fp8:
        from torchao.float8 import convert_to_float8_training

        names = fp8_layers(model)
        with torch.device("meta"):
            convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names)
    model = model.model
    with mode:
        model.to_empty(device="cpu")
        for module in model.modules():
            module._buffers |= {
                name: torch.empty_like(b, device="cpu") for name, b in module.named_buffers(recurse=False)
            }
    with mock.patch.object(GraphLowering, "_compile_to_module_lines", count), mode:
        for one in model.layers:
            one.compile(backend=lambda graph, inputs: inductor.compile_fx(graph, inputs, inner_compile=compile_for_gpu))
        ends = torch.zeros(2, dtype=torch.int32)
        ids = torch.zeros(1, ROW, dtype=torch.long)
        boundaries = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": ROW, "max_length_k": ROW}
        model(input_ids=ids, position_ids=ids, use_cache=False, **boundaries)
    return kernels, moved, kept[0]


def moved_to_gpu(value: Any) -> Any:
    """Let a fake tensor say that it lies on a GPU."""
    if isinstance(value, FakeTensor):
        value.fake_device = CUDA
    return value


@contextlib.contextmanager
def hopper() -> Iterator[None]:
    """Let inductor and triton believe that there is a GPU of Hopper's kind, as long as they only write code."""
    import triton
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.backends.compiler import GPUTarget

    threads = {"max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "warp_size": 32}
    sizes = {"major": 9, "multi_processor_count": 132, "regs_per_multiprocessor": 65536, **threads}
    properties = DeviceProperties(type="cuda", index=0, cc=90, **sizes)
    device = SimpleNamespace(name="H200", gcnArchName="", minor=0, total_memory=141 * 10**9, **sizes)
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0)
    if torch.version.cuda is None:
        guard_nothing()
    triton.runtime.driver.set_active(target)
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
        "get_rng_state": lambda *_: torch.zeros(1),
        "set_rng_state": lambda *_: None,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: device,
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for where in ("torch._inductor.scheduler", "torch.utils._triton"):
            stack.enter_context(mock.patch(f"{where}.has_triton", lambda *_: True))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", lambda _: properties))
        yield


def table(layers: dict[str, dict[str, Any]]) -> list[str]:
    """Write the lines of the page's table; matmuls and attention are alike in all rows, and left out."""
    lines = [
        "| | kernels | GB of each row | ms of 32 layers | GB of each step | ms of 32 layers | MB kept of a row |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in layers.items():
        cells = [name, str(sum(found["kernels"].values()))]
        for parts in ((REST, COPIES), (CLIPPING, OPTIMIZER)):
            moved = sum(found["bytes"][part] for part in parts)
            cells += [f"{moved / 1e9:.1f}", f"{32 * moved / BYTES_A_SECOND * 1000:.0f}"]
        lines.append("| " + " | ".join([*cells, f"{found['kept_activations'] / 1e6:.0f}"]) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    flags = parser.parse_args()
    layers = {name: of_one_layer(case) for name, case in SIMULATED.items()}
    plain = list(layers.values())[-1]
    for name in (COMPILED, FP8):
        kernels, moved, kept = in_process(compiled, name == FP8)
        for part in (CLIPPING, OPTIMIZER):
            kernels[part], moved[part] = plain["kernels"][part], plain["bytes"][part]
        layers[name] = layer(kernels, moved, kept)
    flags.out.write_text(
        json.dumps(machine(torch.device("cpu")) | {"layers": layers}, indent=1) + "\n", encoding="utf-8"
    )
    print("\n".join(table(layers)))


if __name__ == "__main__":
    main()
