"""Kernels for GPUs, in Triton. Import this only where a kernel is called: torch for CPUs comes without Triton."""

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

BLOCK = 2048  # numbers that one program of a kernel processes


@triton.jit
def rounded(x):
    """Round fp32 to the nearest number in bf16, ties to even. This works on the bits, so that no compiler removes it."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # the bits of a NaN would overflow


@triton.jit
def add_compensated_kernel(weights, compensations, decay, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weights + at, mask=at < size, other=0.0).to(tl.float32)
    pending = tl.load(compensations + at, mask=at < size, other=0.0).to(tl.float32)
    pending = rounded(pending - decay * weight)
    total = rounded(weight + pending)
    pending = rounded(pending + rounded(weight - total))
    tl.store(weights + at, total.to(tl.bfloat16), mask=at < size)
    tl.store(compensations + at, pending.to(tl.bfloat16), mask=at < size)


def add_compensated(weight: torch.Tensor, compensation: torch.Tensor, decay: float) -> None:
    """Compute `optim.add_compensated_` for one weight in bf16; both tensors are contiguous."""
    size = weight.numel()
    if size:  # a shard may be empty
        launch = add_compensated_kernel[(triton.cdiv(size, BLOCK),)]  # pyright: ignore[reportIndexIssue]
        launch(weight, compensation, decay, size, BLOCK=BLOCK)
