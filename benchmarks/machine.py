"""Description of the machine, versions and command that every result records."""

import platform
import re
import sys
from pathlib import Path

import accelerate
import psutil
import torch
import transformers

import accelerate_recipes


def machine(device: torch.device) -> dict:
    """Describe the machine that a benchmark ran on, the versions, and the command that started it."""
    cpu_info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpu_info.read_text(encoding="utf-8")) if cpu_info.exists() else []
    if device.type == "cuda":
        names = [torch.cuda.get_device_name(device)]
    modules = (accelerate_recipes, torch, accelerate, transformers)
    return {
        "command": " ".join(sys.argv),
        "device": names[0] if names else platform.machine(),
        "cores": psutil.cpu_count(),
        "load_average": psutil.getloadavg()[0],
        "threads_per_process": torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {m.__name__: m.__version__ for m in modules},
    }
