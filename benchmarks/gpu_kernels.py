"""Part 1 of `gpu.py`: what matmuls, copies and each kernel of attention reach by themselves."""

import functools
import math
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from gpu_cases import MODELS, ROW, TINY, TINY_ROW
from gpu_records import Report
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import LlamaConfig

from accelerate_recipes.attention import boundaries, documents, sdpa, use_flash_3
from accelerate_recipes.losses import IGNORE_INDEX
from accelerate_recipes.models import new_model
from accelerate_recipes.weights import initialize

# Tokens of C4's documents: a log-normal law of this median, and of the mean 427, which is 156 billion tokens of 365 million
# documents (Dodge et al. 2021, "Documenting Large Webtext Corpora", table 1).
MEDIAN_TOKENS, SIGMA = 259.0, 1.0
NO_FLEX = "flex_attention has no backward pass on a CPU"
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def document_lengths(kind: str, row: int, generator: torch.Generator) -> list[int]:
    """Choose the lengths of the documents of a row of `row` tokens: `one`, `eight` alike, or as `c4` has them."""
    if kind != "c4":
        number = {"one": 1, "eight": 8}[kind]
        return [row // number] * number
    lengths: list[int] = []
    while (left := row - sum(lengths)) > 0:
        drawn = torch.empty(()).log_normal_(math.log(MEDIAN_TOKENS), SIGMA, generator=generator).item()
        lengths.append(min(left, max(1, round(drawn))))
    return lengths


def packed_batch(kind: str, rows: int, row: int, vocab_size: int, seed: int) -> dict[str, Any]:
    """Make a batch of packed rows of random tokens, with the keys of `data.packing.collate`, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [document_lengths(kind, row, generator) for _ in range(rows)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in of_row]) for of_row in lengths])
    ids = torch.randint(vocab_size, (rows, row), generator=generator)
    labels = ids.masked_fill(positions == 0, IGNORE_INDEX)  # the first token of a document is no target
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels, "row": torch.arange(rows)}
    return batch | boundaries(positions)


def attended_length(positions: torch.Tensor) -> float:
    """Mean over all tokens of the length of the document that they lie in."""
    ends = boundaries(positions)["cu_seqlens"].diff().double()
    return (ends.square().sum() / ends.sum()).item()


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int, warmups: int = 3) -> list[float]:
    """Time a piece of work, each time by itself: by events on a GPU."""
    for _ in range(warmups):
        work()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1000)
        return times
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events]


def spread(times: list[float]) -> dict[str, float]:
    return {"milliseconds": median(times), "least": min(times), "most": max(times)}


def ceilings(device: torch.device, tiny: bool, report: Report) -> None:
    """Matmuls in bf16 of all shapes of both models, forward and for both gradients; and a copy."""
    tokens, repeats = (TINY_ROW, 2) if tiny else (ROW, 10)
    shapes: dict[tuple[int, int], list[str]] = {}
    for model, sizes in {"tiny": TINY}.items() if tiny else MODELS.items():
        width, inner = sizes["hidden_size"], sizes["intermediate_size"]
        narrow = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
        for name, shape in {
            "q, o": (width, width), "k, v": (width, narrow), "gate, up": (width, inner), "down": (inner, width),
            "output layer": (width, sizes["vocab_size"]),
        }.items():  # fmt: skip
            shapes.setdefault(shape, []).append(f"{model} {name}")
    for (inputs, outputs), names in shapes.items():
        x, weight, grad = (
            torch.randn(n, m, device=device, dtype=torch.bfloat16)
            for n, m in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        products = {"forward": (x, weight.T), "gradient of input": (grad, weight), "gradient of weight": (grad.T, x)}
        for product, (left, right) in products.items():
            found = spread(milliseconds(functools.partial(torch.matmul, left, right), device, repeats))
            tflops = 2 * tokens * inputs * outputs / found["milliseconds"] / 1e9
            report(
                what="matmul", setting=f"{', '.join(names)}: {product}", shape=[tokens, inputs, outputs], tflops=tflops,
                **found,
            )  # fmt: skip
    elements = 2**20 if tiny else 2**31
    source = torch.empty(elements, device=device, dtype=torch.bfloat16).fill_(1)
    target = torch.empty_like(source)
    found = spread(milliseconds(lambda: target.copy_(source), device, repeats))
    terabytes = 2 * source.numel() * source.element_size() / found["milliseconds"] / 1e9
    report(what="copy", setting="read and written, bf16", terabytes_per_second=terabytes, **found)


class Inputs:
    """Queries, keys, values and an output's gradient of one row, and what attention inside documents gives in fp32."""

    def __init__(self, kind: str, device: torch.device, tiny: bool, dtype: torch.dtype, kv_heads: int | None = None):
        sizes, row = (TINY, TINY_ROW) if tiny else (MODELS["7B"], ROW)
        heads = sizes["num_attention_heads"]
        shape = (1, heads, row, sizes["hidden_size"] // heads)
        narrow = (1, kv_heads or heads, *shape[2:])
        generator = torch.Generator().manual_seed(0)
        query, key, value, grad = (torch.randn(s, generator=generator) for s in (shape, narrow, narrow, shape))
        self.query, self.key, self.value = (t.to(device, dtype).requires_grad_() for t in (query, key, value))
        self.grad = grad.to(device, dtype)
        positions = packed_batch(kind, 1, row, 8, seed=0)["position_ids"]
        self.length = attended_length(positions)
        ends = boundaries(positions)
        self.cu_seqlens, self.max_seqlen = ends["cu_seqlens"].to(device), ends["max_seqlen"]
        self.document = (positions[0] == 0).cumsum(0).to(device)
        self.mask = (self.document[:, None] == self.document).tril()[None, None]

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [self.query, self.key, self.value]

    def flops(self) -> float:
        """Count the FLOPs of forward and backward pass, 12 H Q T for a token, as `metrics.decoder_flops` counts them."""
        return 12 * self.query.shape[1] * self.query.shape[3] * self.length * self.query.shape[2]

    @functools.cached_property
    def reference(self) -> list[torch.Tensor]:
        """Output and gradients, head by head in fp32."""
        repeats = self.query.shape[1] // self.key.shape[1]
        heads = []
        for head in range(self.query.shape[1]):
            parts = (self.query[:, head], self.key[:, head // repeats], self.value[:, head // repeats])
            query, key, value = (t.detach().float().requires_grad_() for t in parts)
            scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
            output = scores.masked_fill(~self.mask[0], -torch.inf).softmax(-1) @ value
            grads = torch.autograd.grad(output, (query, key, value), self.grad[:, head].float())
            heads.append((output.detach(), *grads))
        found = [torch.stack(parts, 1) for parts in zip(*heads, strict=True)]
        return [*found[:2], *(grad.unflatten(1, (-1, repeats)).sum(2) for grad in found[2:])]

    def measure(self, attend: Callable[[], torch.Tensor], device: torch.device, repeats: int) -> dict[str, Any]:
        """Time a kernel, whose output is (1, H, T, D), forward and with the backward pass; and compare with fp32."""

        def both() -> tuple[torch.Tensor, ...]:
            output = attend()
            return output, *torch.autograd.grad(output, self.leaves, self.grad)

        start = time.perf_counter()
        found = both()
        errors = [
            ((t.detach().float() - r).norm() / r.norm()).item() for t, r in zip(found, self.reference, strict=True)
        ]
        first = time.perf_counter() - start
        with torch.no_grad():
            forward = median(milliseconds(attend, device, repeats))
        times = spread(milliseconds(both, device, repeats))
        return times | {
            "forward_milliseconds": forward,
            "tflops": self.flops() / times["milliseconds"] / 1e9,
            "attended_length": self.length,
            "errors": dict(zip(("output", "query", "key", "value"), errors, strict=True)),
            "first_seconds": first,
        }


def each_kind(device: torch.device, tiny: bool, **settings: Any) -> Iterator[tuple[str, Inputs, int]]:
    """Yield a name, inputs and the number of repeats for each kind of documents. A CPU computes in fp32."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for kind, name in {"one": "1 document", "eight": "8 documents", "c4": "lengths as C4's"}.items():
        yield name, Inputs(kind, device, tiny, dtype, **settings), 2 if tiny else 20


def attention_documents(device: torch.device, tiny: bool, report: Report) -> None:
    """The library's own, by torch's varlen attention, with as many key and value heads as queries, and with a quarter."""
    for kv_heads in (None, 2 if tiny else 8):
        for name, inputs, repeats in each_kind(device, tiny, kv_heads=kv_heads):

            def attend(inputs: Inputs = inputs) -> torch.Tensor:
                found, _ = documents(
                    torch.nn.Identity(), *inputs.leaves, None, cu_seq_lens_q=inputs.cu_seqlens,
                    max_length_q=inputs.max_seqlen,
                )  # fmt: skip
                return found.transpose(1, 2)

            heads = f", {kv_heads} key heads" if kv_heads else ""
            report.attempt(
                f"documents{heads}: {name}", "attention", lambda i=inputs, a=attend, r=repeats: i.measure(a, device, r)
            )


def attention_flash_3(device: torch.device, tiny: bool, report: Report) -> None:
    """The library's own, by FlashAttention 3."""
    if not use_flash_3():
        report(skipped="the device is not of Hopper's kind")
        return
    attention_documents(device, tiny, report)


def attention_sdpa(device: torch.device, tiny: bool, report: Report) -> None:
    """torch's, by each backend: causal over the whole row, where that is one document, and with a mask of documents."""
    for name, inputs, repeats in each_kind(device, tiny):
        ways = {"mask": {"attn_mask": inputs.mask}}
        if name == "1 document":
            ways = {"causal": {"is_causal": True}} | ways
        for way, settings in ways.items():
            # Which one torch takes when it may choose, as its number in SDPBackend.
            with sdpa_kernel(list(BACKENDS.values())):
                chosen = torch._fused_sdp_choice(*inputs.leaves, **settings)
            report(what="choice", setting=f"{way}: {name}", backend=SDPBackend(chosen).name if chosen >= 0 else "none")
            for backend, kernel in BACKENDS.items():

                def attend(inputs=inputs, settings=settings, kernel=kernel) -> torch.Tensor:
                    with sdpa_kernel(kernel):
                        return F.scaled_dot_product_attention(*inputs.leaves, **settings)

                report.attempt(
                    f"{backend}, {way}: {name}", "attention",
                    lambda i=inputs, a=attend, r=repeats: i.measure(a, device, r),
                )  # fmt: skip


def attention_flex(device: torch.device, tiny: bool, report: Report) -> None:
    """flex_attention, compiled, with the blocks of documents."""
    if device.type == "cpu":
        report(skipped=NO_FLEX)
        return
    compiled = torch.compile(flex_attention, dynamic=False)
    for name, inputs, repeats in each_kind(device, tiny):

        def measured(inputs: Inputs = inputs, repeats: int = repeats) -> dict[str, Any]:
            document, row = inputs.document, inputs.query.shape[2]

            def seen(batch, head, query, key):
                return (query >= key) & (document[query] == document[key])

            blocks = create_block_mask(seen, None, None, row, row, device=device.type)
            return inputs.measure(lambda: compiled(*inputs.leaves, block_mask=blocks), device, repeats)

        report.attempt(f"flex, compiled: {name}", "attention", measured)


def attention_nan(device: torch.device, tiny: bool, report: Report) -> None:
    """The case of tests/test_gpu.py (pytorch #196678): with a mask, 192 tokens and logits of -120."""
    length, width = 192, 64
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query, key, value, output = torch.randn(4, 1, 1, length, width, device=device, dtype=dtype).unbind()
    query, key = 0.1 * query, 0.1 * key
    query[..., 0], key[..., 0] = 1, -120 * math.sqrt(width)
    query.requires_grad_()
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]

    def is_finite(attended: torch.Tensor) -> dict[str, bool]:
        return {"is_finite": torch.autograd.grad(attended, query, output)[0].isfinite().all().item()}

    def ours() -> dict[str, bool]:
        return is_finite(sdpa(torch.nn.Identity(), query, key, value, mask)[0].transpose(1, 2))

    def upstream(kernel: SDPBackend) -> dict[str, bool]:
        with sdpa_kernel(kernel):
            return is_finite(F.scaled_dot_product_attention(query, key, value, attn_mask=mask))

    report.attempt("as a run has it", "finite", ours)
    for backend, kernel in BACKENDS.items():
        report.attempt(backend, "finite", functools.partial(upstream, kernel))


def decode(device: torch.device, tiny: bool, report: Report) -> None:
    """Time 64 new tokens by a few layers of 8B: as a run generates, without cuDNN's attention, and with it."""
    config = LlamaConfig(**(TINY if tiny else MODELS["8B"]), num_hidden_layers=2 if tiny else 4)
    model = initialize(new_model(config, "sdpa", torch.bfloat16), 0, device).eval()
    ids = torch.randint(config.vocab_size, (4, 32 if tiny else 500), device=device)
    num_tokens = 4 if tiny else 64
    # Every length is new to the first round, known to the second.
    for is_on, rounds in ((False, 2), (True, 2)):
        torch.backends.cuda.enable_cudnn_sdp(is_on)
        for number in range(rounds):
            start = time.perf_counter()
            model.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=num_tokens, max_new_tokens=num_tokens,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            name = f"{'with' if is_on else 'without'} cuDNN, round {number + 1}"
            report(what="decode", setting=name, milliseconds_per_token=1000 * seconds / num_tokens)
