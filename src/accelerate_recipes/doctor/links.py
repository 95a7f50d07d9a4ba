"""Interconnect of this machine's GPUs: the paths that NCCL chooses, and the speed of a sum over all of them."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from accelerate_recipes.arguments.gpus import GPUS, known_as
from accelerate_recipes.launch.machine import Found

SIZE = 256 * 2**20  # bytes that are summed; NCCL reaches its speed with as many
SMALL = 4 * 2**20  # on a CPU
TIMES = 10
SHARE = 0.4  # of the speed of the links, below which something is wrong; a sum usually reaches 0.7 and more


class Links(NamedTuple):
    """Description of the interconnect, and what is wrong with it."""

    described: dict[str, str]
    found: Found


def measure_links(processes: int) -> Links:
    """Sum a tensor over all GPUs (or over processes of a CPU), in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        log = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,NET,GRAPH", "NCCL_DEBUG_FILE": f"{folder}/nccl.%p"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        try:
            done = subprocess.run(
                [*command, __file__], env=os.environ | log, capture_output=True, text=True, timeout=180, check=True
            )
            speed = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.SubprocessError, ValueError, IndexError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            errors = [line for line in said if "rror" in line] or said
            remedy = "see NCCL_DEBUG=INFO, nvidia-smi topo -m and /dev/shm"
            return Links({}, Found([f"{processes} processes cannot exchange: {errors[-1][:300]}; {remedy}"], []))
        logs = [file.read_text(encoding="utf-8", errors="replace") for file in Path(folder).glob("nccl.*")]
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""
    return judge(name, speed, paths("\n".join(logs)))


def paths(log: str) -> Counter[str]:
    """Count the connections between ranks in NCCL's log by kind: P2P, SHM, NET/IB, NET/Socket, NVLS."""
    kinds = re.findall(r"\d+\[\S+\] -> \d+\[\S+\] (?:\[\w+\] )?via (NET/\w+|[A-Z0-9]+)", log)
    return Counter(kinds + ["NVLS"] * ("NVLS comm" in log))


def judge(name: str, speed: float, found: Counter[str]) -> Links:
    """Describe the links between GPUs of a name, and say what is slow; `speed` is of the bus, in bytes/s."""
    over = ", ".join(f"{kind} {count} times" for kind, count in sorted(found.items())) or "paths unknown"
    warnings = []
    if slow := [kind for kind in found if kind not in ("P2P", "NVLS")]:
        remedy = "unset NCCL_P2P_DISABLE, switch ACS off in the firmware, give a container all GPUs"
        said = f"NCCL goes from GPU to GPU by {', '.join(slow)}, through the memory of the host"
        warnings.append(f"{said}; look at nvidia-smi topo -m: {remedy}; GeForce cards have no other path")
    gpu = GPUS.get(known_as(name))
    if gpu and speed < SHARE * gpu.nvlink:
        remedy = "look at nvidia-smi nvlink --status and nvidia-smi topo -m, and at other programs on the GPUs"
        known = f"{gpu.nvlink / 1e9:.0f} that the links of {name} have"
        warnings.append(f"a sum over all GPUs moves {speed / 1e9:.0f} GB/s, of {known}; {remedy}")
    return Links({"interconnect": f"{over}; a sum over all moves {speed / 1e9:.1f} GB/s"}, Found([], warnings))


def time_sum() -> None:
    """Time the sum in one of the processes; the first one prints the bytes/s of the bus."""
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo", device_id=device if is_gpu else None)
    tensor = torch.zeros(SIZE if is_gpu else SMALL, dtype=torch.uint8, device=device).view(torch.float32)
    for i in range(2 * TIMES):
        if i == TIMES:
            dist.barrier()
            begin = time.perf_counter()
        dist.all_reduce(tensor)
    if is_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - begin) / TIMES
    if dist.get_rank() == 0:
        print(json.dumps(2 * (dist.get_world_size() - 1) / dist.get_world_size() * tensor.nbytes / seconds), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    time_sum()
