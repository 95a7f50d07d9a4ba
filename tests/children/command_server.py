"""Run `python -m accelerate_recipes ...` many times without importing the libraries again.

Each line of standard input is a command, {"argv", "cache", "log", "env"}; the answers are its process id, then its exit code.
"""

import json
import os
import sys

import datasets  # noqa: F401
import transformers  # noqa: F401
from forked import run_and_exit, use_hub
from huggingface_hub import constants

from accelerate_recipes import recipe  # noqa: F401
from accelerate_recipes.hub import download  # noqa: F401
from recipe_tools import (
    commands,
    preflight,  # noqa: F401
)


def run(job: dict) -> int:
    if pid := os.fork():
        return pid
    os.environ.update(job["env"])
    constants.HF_HUB_CACHE = job["cache"]
    if url := os.environ.get("TESTED_ENDPOINT"):
        use_hub(url)
    sys.argv = ["accelerate_recipes", *job["argv"]]
    run_and_exit(commands.main, job["log"])


for line in sys.stdin:
    print(pid := run(json.loads(line)), flush=True)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
