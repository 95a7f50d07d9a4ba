"""This machine: what it is, and what on it would fail or be slow, each with the remedy. Preflight and doctor ask here."""

import contextlib
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from huggingface_hub import constants
from packaging.requirements import Requirement

from accelerate_recipes.disk import LOCAL_FILESYSTEMS, existing, filesystem, fsync, refusal
from accelerate_recipes.gpus import GIB, bf16_peak, known_as

PINS = Path(__file__).parents[2] / "requirements.txt"  # an installed copy has no such file
# Variables that make a run slow, or hide a fault, and are often left over from a search for one.
LEFT_OVER = (
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "TORCH_DISTRIBUTED_DEBUG",
)
ROOM = 20 * GIB  # a checkpoint of a model of a billion parameters, written beside the one before it
PROBE = 64 * 2**20  # bytes that are written to measure a disk
SLOW_DISK = 100e6  # bytes/s
SHARED = 2**30  # bytes of /dev/shm; a container has 64 MiB unless it is told otherwise


class Found(NamedTuple):
    """What would fail, and what would be slow, one sentence each."""

    problems: list[str]
    warnings: list[str]


class Card(NamedTuple):
    """A GPU as its driver describes it, with sizes in bytes."""

    name: str
    memory: int
    driver: str
    used: int  # by all processes
    errors: int  # of memory, that could not be corrected since the driver started
    is_divided: bool  # by MIG


def versions() -> tuple[list[str], list[str]]:
    """List the packages of requirements.txt that are not installed, or installed in another version."""
    missing, other = [], []
    lines = PINS.read_text(encoding="utf-8").splitlines() if PINS.is_file() else []
    for requirement in (Requirement(line) for line in lines if line and not line.startswith(("#", "-"))):
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(f"{requirement} is not installed; run: pip install -r {PINS}")
        else:
            if not requirement.specifier.contains(installed):
                other.append(f"{requirement.name} is {installed}; tested is {requirement}")
    return missing, other


def cards() -> list[Card]:
    """Ask the driver for the GPUs, without a CUDA context, whose memory is not given back."""
    fields = "name,memory.total,driver_version,memory.used,ecc.errors.uncorrected.volatile.total,mig.mode.current"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [card_of(line) for line in done.stdout.splitlines() if line.count(", ") == 5]


def card_of(line: str) -> Card:
    """Read a line of nvidia-smi, in which a value that a GPU does not have is [N/A]."""
    name, memory, driver, used, errors, mig = line.split(", ")
    total, taken, wrong = (int(text) if text.isdigit() else 0 for text in (memory, used, errors))
    return Card(name, total * 2**20, driver, taken * 2**20, wrong, mig == "Enabled")


def processor() -> str:
    """Name the CPU."""
    file = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", file.read_text(encoding="utf-8")) if file.exists() else []
    return names[0] if names else platform.machine()


def memory_limit() -> int:
    """Return the bytes of memory that this process may use: the machine's, or those of its container."""
    limits = [psutil.virtual_memory().total]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(name).read_text(encoding="utf-8")))
    return min(limits)


def cpu_quota() -> float:
    """Return how many cores' worth of time a container may use; infinite without a limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return int(quota) / int(period)
    return float("inf")


def describe() -> dict[str, str]:
    """Describe the machine and its libraries; what changes from one minute to the next is not here."""
    gpus = cards()
    names = sorted({f"{gpu.name}, {gpu.memory / GIB:.1f} GiB" for gpu in gpus})
    found = {
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "CPU": f"{processor()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {memory_limit() / GIB:.1f} GiB",
        "GPUs": f"{len(gpus)} x {' and '.join(names)}" if gpus else "none",
    }
    if gpus:
        is_here = torch.cuda.is_available()
        nccl = (
            ".".join(map(str, torch.cuda.nccl.version()))
            if is_here and torch.distributed.is_nccl_available()
            else "none"
        )
        found["driver"] = f"{gpus[0].driver}, torch for CUDA {torch.version.cuda}, NCCL {nccl}"
    given = [
        f"{name}={os.environ[name]}" for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if name in os.environ
    ]
    found["allocator"] = ", ".join(given) or ("expandable_segments:True, set by each run" if gpus else "the CPU's")
    packages = ("accelerate_recipes", "torch", "accelerate", "transformers", "peft", "datasets", "trl")
    installed = {found.name.lower().replace("-", "_"): found.version for found in metadata.distributions()}
    return found | {"versions": ", ".join(f"{name} {installed.get(name, 'is not installed')}" for name in packages)}


def disks(output_dir: Path) -> dict[str, str]:
    """Describe the disks of the output directory, of the caches and of temporary files; the first is written to."""
    found = {name: f"{path}: {on_disk(path)}" for name, path in places(output_dir).items()}
    if refusal(output_dir) is None:
        found["output"] += f", writes {write_speed(output_dir) / 1e6:,.0f} MB/s"
    return found


def places(output_dir: Path) -> dict[str, Path]:
    """Return the folders that runs read and write."""
    return {
        "output": output_dir,
        "models and data (HF_HUB_CACHE)": Path(constants.HF_HUB_CACHE),
        "prepared data and code (HF_HOME)": Path(constants.HF_HOME),
        "temporary": Path(tempfile.gettempdir()),
        "shared memory": Path("/dev/shm"),
    }


def on_disk(path: Path) -> str:
    return f"{filesystem(path) or 'unknown disk'}, {shutil.disk_usage(existing(path)).free / GIB:,.1f} GiB free"


def write_speed(folder: Path) -> float:
    """Write a file, wait until it is on the disk, and return the bytes per second."""
    with tempfile.NamedTemporaryFile(dir=existing(folder)) as file:
        begin = time.perf_counter()
        file.write(os.urandom(PROBE))
        file.flush()
        fsync(Path(file.name))
        return PROBE / (time.perf_counter() - begin)


def examine(output_dir: Path) -> Found:
    """List what would fail or be slow on this machine for a run that writes to `output_dir`."""
    missing, other = versions()
    found = Found([*missing], [*other])
    for part in (gpu_findings(cards()), disk_findings(output_dir), setting_findings()):
        found.problems.extend(part.problems)
        found.warnings.extend(part.warnings)
    return found


def gpu_findings(gpus: list[Card]) -> Found:
    """List what is wrong with the GPUs that the driver knows."""
    problems, warnings = [], []
    if gpus and not torch.cuda.is_available():
        has_cuda = (
            f"its driver {gpus[0].driver} is too old for CUDA {torch.version.cuda}, or CUDA_VISIBLE_DEVICES hides it"
        )
        why = has_cuda if torch.version.cuda else "this torch was built without CUDA"
        problems.append(
            f"{gpus[0].name} is here, but torch does not see it: {why}; install a driver or a torch that fit"
        )
    for number, gpu in enumerate(gpus):
        if gpu.errors:
            problems.append(
                f"GPU {number} had {gpu.errors} memory errors that could not be corrected; reset or replace it"
            )
        if gpu.used > GIB:
            warnings.append(
                f"GPU {number} holds {gpu.used / GIB:.1f} GiB of other processes, which a run cannot use; end them (see "
                "nvidia-smi)"
            )
        if gpu.is_divided:
            warnings.append(
                f"GPU {number} is divided by MIG; slices cannot exchange by NCCL: train on one, or switch it off"
            )
    for name in sorted({gpu.name for gpu in gpus}):
        if not known_as(name):
            warnings.append(
                f"{name} is not in gpus.py: preflight does not check its memory; name a similar one by --gpu"
            )
        if bf16_peak(name) is None:
            warnings.append(f"{name}: its peak is not known, so runs log no MFU")
    if gpus and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        warnings.append(f"{gpus[0].name} has no bf16 in hardware; train with --mixed_precision no")
    if len({gpu.name for gpu in gpus}) > 1:
        warnings.append("the GPUs differ: all wait for the slowest, and the smallest decides what fits")
    return Found(problems, warnings)


def disk_findings(output_dir: Path) -> Found:
    """List what is wrong with the folders that runs read and write."""
    problems, warnings = [], []
    for name, path in places(output_dir).items():
        if name == "shared memory":
            free = shutil.disk_usage(path).free if path.exists() else 0
            if free < SHARED:
                warnings.append(
                    f"{path} has {free / 2**20:.0f} MiB free, which NCCL and data workers fill; give a container "
                    "--shm-size=16g, a pod an emptyDir with medium: Memory"
                )
            continue
        if why := refusal(path):
            problems.append(f"{name}: {path} cannot be written to: {why}; give another (HF_HOME, TMPDIR, --output_dir)")
        elif (free := shutil.disk_usage(existing(path)).free) < ROOM and name != "temporary":
            warnings.append(f"{name}: {path} has {free / GIB:.1f} GiB free; make room, or give another")
        if name.startswith("models") and (kind := filesystem(path)) and kind not in LOCAL_FILESYSTEMS:
            warnings.append(
                f"{name}: {path} lies on {kind}, from which every process reads; copy it to a local disk if slow"
            )
    if not problems and (speed := write_speed(output_dir)) < SLOW_DISK:
        warnings.append(
            f"output: {output_dir} takes {speed / 1e6:.0f} MB/s: a checkpoint of a model of a billion parameters takes "
            f"{12e9 / speed / 60:.0f} min; give a faster disk, and raise --save_steps"
        )
    return Found(problems, warnings)


def allocator(default: str = "expandable_segments:True") -> str:
    """Return the settings of the GPU's allocator that the user has made."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or default


def setting_findings() -> Found:
    """List variables and limits that make runs fail or slow."""
    warnings = [
        f"{name}={value} is set, which makes runs slow; unset it"
        for name in LEFT_OVER
        if (value := os.environ.get(name, "0")).lower() not in ("0", "", "off", "false")
    ]
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get(
        "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
    )
    if "expandable_segments:true" not in allocator.lower():
        warnings.append(
            f"the allocator is set to {allocator}: memory falls into pieces when lengths vary; add expandable_segments:True"
        )
    cores = len(os.sched_getaffinity(0))
    if (quota := cpu_quota()) < cores:
        warnings.append(
            f"this container sees {cores} cores, but may use the time of {quota:.1f}: threads wait for each other; raise "
            f"the limit, or set OMP_NUM_THREADS={max(1, int(quota))}"
        )
    if (files := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < 1024:
        warnings.append(f"a process may open {files} files, too few for data workers; run: ulimit -n 65536")
    return Found([], warnings)
