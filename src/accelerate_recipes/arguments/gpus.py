"""GPUs by name: memory and speeds, from data sheets; the only table of them.

`python -m accelerate_recipes.arguments.gpus NAME` translates a cluster's name of a GPU; slurm/submit.sh asks it.
"""

import re
import sys
from dataclasses import dataclass

from accelerate_recipes.errors import ConfigError

GIB = 2**30
# Memory of a GPU besides the tensors of a step: CUDA's context and code of kernels, about 0.5 GiB; NCCL's buffers, 0.5 to
# 0.7 GB for each of two communicators (NCCL #964); cuBLAS's workspaces; memory of the driver. Not measured here.
OUTSIDE = int(2.5 * GIB)
EFFICIENCY = 0.8  # share of each peak speed. Hardly more has been measured anywhere, so times are lower bounds


@dataclass(frozen=True)
class Gpu:
    """Memory that programs can allocate, in bytes, and peak speeds: FLOP/s, bytes/s of memory and of links, one way.

    `network` is a GPU's share of its node's network cards.
    """

    name: str
    memory: int
    bf16: float
    fp32: float
    bandwidth: float
    nvlink: float
    network: float


# Memory is what nvidia-smi reports as total, rounded down. GPUs without NVLink exchange by PCIe. The network is that of the
# usual machine: a 200 Gbit/s card for each A100, 400 Gbit/s for each H100 and H200, 100 Gbit/s for a machine of small GPUs.
GPUS = {
    name: Gpu(name, int(memory * GIB), bf16 * 1e12, fp32 * 1e12, bandwidth * 1e12, nvlink * 1e9, network * 1e9)
    for name, memory, bf16, fp32, bandwidth, nvlink, network in (
        ("a10g", 22.3, 70, 35, 0.6, 16, 1.5),  # NVIDIA A10G data sheet; AWS g5
        ("l4", 22.3, 121, 30.3, 0.3, 16, 1.5),  # NVIDIA L4 data sheet (bf16 without sparsity); AWS g6
        ("rtx4090", 23.5, 165.2, 82.6, 1.008, 16, 1.5),  # NVIDIA Ada architecture white paper
        ("a6000", 47.5, 154.8, 38.7, 0.768, 28, 3),  # NVIDIA RTX A6000 data sheet
        ("l40s", 44.7, 362, 91.6, 0.864, 32, 6),  # NVIDIA L40S data sheet; AWS g6e
        ("a100_40", 39.4, 312, 19.5, 1.555, 300, 12.5),  # NVIDIA A100 data sheet; AWS p4d
        ("a100", 79.1, 312, 19.5, 2.039, 300, 25),  # NVIDIA A100 80 GB SXM data sheet
        ("h100", 79.1, 989.4, 67, 3.35, 450, 50),  # NVIDIA H100 SXM data sheet
        ("h200", 139.8, 989.4, 67, 4.8, 450, 50),  # NVIDIA H200 SXM data sheet
        ("b200", 178.4, 2250, 80, 8.0, 900, 50),  # NVIDIA HGX B200 data sheet
    )
}


# Dense bf16 peaks in TFLOP/s, from the makers' data sheets, of GPUs and variants whose other values are not known here.
MORE_PEAKS = {
    "GH200": 989.4, "H200 NVL": 835.5, "H100 NVL": 835.5, "H100 PCIe": 756.0, "A40": 149.7, "A30": 165.0, "A10": 125.0,
    "L40": 181.05, "MI300X": 1307.4,
}  # fmt: skip


def bf16_peak(name: str) -> float | None:
    """Return the dense bf16 peak, in FLOP/s, of the GPU that the driver calls `name`; None if it is not known."""
    if "MIG" in name:  # a slice of the named device
        return None
    more = next((tflops for known, tflops in MORE_PEAKS.items() if re.search(rf"\b{known}\b", name)), None)
    return more * 1e12 if more else GPUS[known].bf16 if (known := known_as(name)) else None


def check_gpu(name: str) -> None:
    """Raise ConfigError if the name behind --gpu is not in GPUS; it may be empty."""
    if name and name not in GPUS:
        meant = f"; did you mean {meant!r}?" if (meant := known_as(name)) else ""
        raise ConfigError(f"--gpu {name}: not known; known are {', '.join(GPUS)}{meant}")


def known_as(name: str) -> str:
    """Return the name in GPUS of a GPU that a cluster calls `name`, such as nvidia_a100-sxm4-40gb; empty if there is none.

    If several GPUs have that name, a size in the name decides; without a size, the one with the most memory is taken. A
    part of a GPU is none of them, nor is a slower GPU of the same name.
    """
    words = "_".join(re.findall("[a-z0-9.]+", name.lower())).replace("rtx_4090", "rtx4090")
    size = re.search(r"_(\d\d+)(_?gi?b?)?(_|$)", words)  # a100_40, a100-40gb, a100_40_gb
    if re.search(r"(^|_)\dg[._]|rtx4090_(d|laptop)", words):  # a slice by MIG, such as 1g.10gb
        return ""
    matches = [
        gpu
        for gpu in GPUS.values()
        if f"_{gpu.name.partition('_')[0]}_" in f"_{words}_"
        # Programs can allocate up to 8 % less than the name says.
        and (size is None or 0.92 * int(size[1]) <= gpu.memory / GIB <= int(size[1]))
    ]
    return max(matches, key=lambda gpu: gpu.memory).name if matches else ""


if __name__ == "__main__":
    print(known_as(sys.argv[1]))
