"""Write down when a program comes to its parts. `first_step.py` starts programs with a copy of this as sitecustomize.py.

Hooks stand around public functions. They are set when the program itself imports the modules, so that nothing is imported
earlier. A line of the file MARKS is the part that begins, the clock, and the CPU seconds of all processes below BENCHMARK.
"""

import contextlib
import functools
import importlib.util
import json
import os
import sys
import time

begun = {}  # the last part that this process has begun


def mark(part):
    """Note that a part begins, in the process that is the first to do so; its workers may come to the same functions."""
    import psutil

    marks = os.environ["MARKS"]
    if part == begun.get(os.getpid()) or (os.getpid() not in begun and os.path.getsize(marks)):
        return
    begun[os.getpid()] = part
    cpu = 0.0
    for process in psutil.Process(int(os.environ["BENCHMARK"])).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu += sum(process.cpu_times()[:4])  # its own, and those of its children that have ended
    with open(marks, "a", encoding="utf-8") as file:
        file.write(json.dumps({"part": part, "wall": time.time(), "cpu": cpu}) + "\n")


def wrap(owner, name, part, then=None, applies=lambda *args: True):
    """Let a part begin when a function is called, and another one when it returns."""
    found = vars(owner)[name]
    function = getattr(found, "__func__", found)

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        if not applies(*args):
            return function(*args, **kwargs)
        mark(part)
        try:
            return function(*args, **kwargs)
        finally:
            if then:
                mark(then)

    setattr(owner, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)


def is_first(*args):
    return not begun


def has_model(*args):
    return any(hasattr(arg, "named_parameters") for arg in args)


HOOKS = {
    "transformers.tokenization_utils_base": lambda module: wrap(
        module.PreTrainedTokenizerBase, "from_pretrained", "rows", applies=is_first
    ),
    "datasets.load": lambda module: wrap(module, "load_dataset", "rows", applies=is_first),
    "transformers.modeling_utils": lambda module: wrap(module.PreTrainedModel, "from_pretrained", "model", "rows"),
    "accelerate.accelerator": lambda module: wrap(module.Accelerator, "prepare", "model", "first step", has_model),
    "torch.optim.optimizer": lambda module: module.register_optimizer_step_post_hook(lambda *_: mark("end")),
}


class Finder:
    """Finder of modules that sets the hooks of a module once it has run."""

    @staticmethod
    def find_spec(name, path, target=None):
        hook = HOOKS.pop(name, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            hook(module)

        spec.loader.exec_module = exec_module
        return spec


if "MARKS" in os.environ:
    sys.meta_path.insert(0, Finder)
