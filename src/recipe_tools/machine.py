"""This machine: what it is, and what on it would fail or be slow, each with the remedy. Preflight and doctor ask here."""

import contextlib
import os
import platform
import re
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

import accelerate_recipes
from accelerate_recipes.arguments.gpus import GIB, bf16_peak, known_as
from accelerate_recipes.arguments.shipped import HOME
from accelerate_recipes.disk import existing, fsync, refusal
from accelerate_recipes.distributed import ALLOCATOR_SETTINGS

PINS = HOME / "requirements.txt"  # an installed copy has no such file
# Variables that make a run slow, or hide a fault, and are often left over from a search for one.
LEFT_OVER = re.compile(r"CUDA_LAUNCH_BLOCKING|TORCH_DISTRIBUTED_DEBUG|NCCL_(P2P|SHM|IB)_DISABLE")
LOCAL_FILESYSTEMS = {"btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
ROOM = 20 * GIB  # a checkpoint of a model of a billion parameters, written beside the one before it
PROBE = 64 * 2**20  # bytes that are written to measure a disk
SLOW_DISK = 50e6  # bytes/s
SHARED_MEMORY = "/dev/shm"


class InstalledGpu(NamedTuple):
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


def installed_gpus() -> list[InstalledGpu]:
    """Ask the driver for the GPUs, without a CUDA context, whose memory is not given back."""
    fields = "name,memory.total,driver_version,memory.used,ecc.errors.uncorrected.volatile.total,mig.mode.current"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [read_gpu(line) for line in done.stdout.splitlines() if line.count(", ") == 5]


def read_gpu(line: str) -> InstalledGpu:
    """Read a line of nvidia-smi, in which a value that a GPU does not have is [N/A]."""
    name, memory, driver, used, errors, mig = line.split(", ")
    total, taken, wrong = (int(text) if text.isdigit() else 0 for text in (memory, used, errors))
    return InstalledGpu(name, total * 2**20, driver, taken * 2**20, wrong, mig == "Enabled")


def processor() -> str:
    """Name the CPU."""
    file = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", file.read_text(encoding="utf-8")) if file.exists() else []
    return names[0] if names else platform.machine()


def limit(name: str) -> list[str]:
    """Read a limit of this container, such as cpu.max; empty without one."""
    with contextlib.suppress(OSError):
        return Path("/sys/fs/cgroup", name).read_text(encoding="utf-8").replace("max", "").split()
    return []


def describe_machine() -> dict[str, str]:
    """Describe the machine and its libraries; what changes from one minute to the next is not here."""
    gpus = installed_gpus()
    names = sorted({f"{gpu.name}, {gpu.memory / GIB:.1f} GiB" for gpu in gpus})
    memory = min([psutil.virtual_memory().total, *map(int, limit("memory.max"))])
    found = {
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "CPU": f"{processor()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores, {memory / GIB:.1f} GiB",
        "GPUs": f"{len(gpus)} x {' and '.join(names)}" if gpus else "none",
    }
    found["allocator"] = allocator() if gpus else "that of the CPU"
    if gpus:
        has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none"
        found["driver"] = f"{gpus[0].driver}, torch for CUDA {torch.version.cuda}, NCCL {nccl}"
    packages = ("torch", "accelerate", "transformers", "peft", "datasets", "trl")
    installed = {found.name.lower().replace("-", "_"): found.version for found in metadata.distributions()}
    others = [f"{name} {installed.get(name, 'is not installed')}" for name in packages]
    return found | {"versions": ", ".join([f"accelerate_recipes {accelerate_recipes.__version__}", *others])}


def disks(output_dir: Path) -> tuple[dict[str, str], list[str], list[str]]:
    """Describe the disks of the folders that runs read and write, and list what on them would fail, and would be slow.

    The first disk is written to, to measure it.
    """
    described, problems, warnings = {}, [], []
    hub, home = Path(constants.HF_HUB_CACHE), Path(constants.HF_HOME)
    places = {"output": output_dir, "models": hub, "caches": home, "temporary": Path(tempfile.gettempdir())}
    for name, path in places.items():
        kind, free = filesystem(path), shutil.disk_usage(existing(path)).free
        described[name] = f"{path}: {kind or 'unknown'}, {free / GIB:,.1f} GiB free"
        if why := refusal(path):
            remedy = "give another (--output_dir, HF_HOME, TMPDIR)"
            problems.append(f"{name}: {path} cannot be written to: {why}; {remedy}")
            continue
        if free < ROOM and name != "temporary":
            warnings.append(f"{name}: {path} has {free / GIB:.1f} GiB free; make room, or give another")
        if name == "models" and kind and kind not in LOCAL_FILESYSTEMS:
            warnings.append(f"{name}: {path} lies on {kind}; if starts are slow, copy it to a local disk")
        if name == "output":
            speed = write_speed(path)
            described[name] += f", writes {speed / 1e6:,.0f} MB/s"
            if speed < SLOW_DISK:
                warnings.append(
                    f"{name}: {path} takes {speed / 1e6:.0f} MB/s: a checkpoint of a model of a billion parameters takes "
                    f"{12e9 / speed / 60:.0f} min; give a faster disk, and raise --save_steps"
                )
    free = shutil.disk_usage(SHARED_MEMORY).free if os.path.exists(SHARED_MEMORY) else 0
    described["shared memory"] = f"{SHARED_MEMORY}: {free / GIB:,.1f} GiB free"
    if free < GIB:  # a container has 64 MiB unless it is told otherwise
        remedy = "give a container --shm-size=16g, a pod an emptyDir with medium: Memory"
        warnings.append(f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free, which NCCL and data workers fill; {remedy}")
    return described, problems, warnings


def write_speed(folder: Path) -> float:
    """Write a file, wait until it is on the disk, and return the bytes per second."""
    with tempfile.NamedTemporaryFile(dir=existing(folder)) as file:
        content = os.urandom(PROBE)
        begin = time.perf_counter()
        file.write(content)
        file.flush()
        fsync(Path(file.name))
        return PROBE / (time.perf_counter() - begin)


def gpu_findings(gpus: list[InstalledGpu]) -> tuple[list[str], list[str]]:
    """List what would fail on the GPUs that the driver knows, and what would be slow."""
    problems, warnings = [], []
    if gpus and not torch.cuda.is_available():
        old = f"its driver {gpus[0].driver} is too old for CUDA {torch.version.cuda}, or CUDA_VISIBLE_DEVICES hides it"
        why = old if torch.version.cuda else "this torch was built without CUDA"
        problems.append(f"torch does not see {gpus[0].name}: {why}; install a driver or a torch that fit each other")
    for number, gpu in enumerate(gpus):
        if gpu.errors:
            problems.append(f"GPU {number} had {gpu.errors} memory errors beyond correction; reset or replace it")
        if gpu.used > GIB:
            warnings.append(f"GPU {number} holds {gpu.used / GIB:.1f} GiB of other programs; end them (see nvidia-smi)")
        if gpu.is_divided:
            warnings.append(f"GPU {number} is divided by MIG, and NCCL joins no slices: train on one, or switch it off")
    for name in sorted({gpu.name for gpu in gpus}):
        if not known_as(name):
            warnings.append(f"{name}: preflight does not know its memory; name a similar GPU by --gpu")
        if bf16_peak(name) is None:
            warnings.append(f"{name}: its peak is not known, so runs log no MFU")
    if gpus and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        warnings.append(f"{gpus[0].name} has no bf16 in hardware; train with --mixed_precision no")
    if len({gpu.name for gpu in gpus}) > 1:
        warnings.append("the GPUs differ: all wait for the slowest, and the smallest decides what fits")
    return problems, warnings


def allocator() -> str:
    """Return the settings of the GPU's allocator: the user's, or those of `distributed.keep_memory_in_one_piece`."""
    return next((os.environ[name] for name in ALLOCATOR_SETTINGS if name in os.environ), "expandable_segments:True")


def setting_warnings() -> list[str]:
    """List variables and limits that make runs slow."""
    warnings = [
        f"{name}={value} is set, which makes runs slow; unset it"
        for name, value in sorted(os.environ.items())
        if LEFT_OVER.fullmatch(name) and value.lower() not in ("0", "", "off", "false")
    ]
    if "expandable_segments:true" not in allocator().lower():
        said = f"the allocator is set to {allocator()}: memory falls into pieces when lengths vary"
        warnings.append(f"{said}; add expandable_segments:True")
    cores = len(os.sched_getaffinity(0))
    quota = limit("cpu.max")
    if len(quota) == 2 and (share := int(quota[0]) / int(quota[1])) < cores:
        said = f"this container sees {cores} cores, but may use the time of {share:.1f}: threads wait for each other"
        warnings.append(f"{said}; raise the limit, or set OMP_NUM_THREADS={max(1, int(share))}")
    return warnings


def filesystem(path: Path) -> str:
    """Return the type of a path's filesystem, such as ext4 or nfs4."""
    place = existing(path).resolve()
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return next((mounts[parent] for parent in (place, *place.parents) if parent in mounts), "")


def shared_disk_warnings(folder: Path, machines: int) -> list[str]:
    """Warn if several machines must see the output directory, but it lies on a disk of this machine."""
    kind = filesystem(folder)
    if machines < 2 or kind not in LOCAL_FILESYSTEMS:
        return []
    return [f"--output_dir {folder} lies on {kind}; {machines} machines must all see it there"]
