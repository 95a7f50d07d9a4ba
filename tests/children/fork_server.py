"""Run recipes many times without importing the libraries again: a launch costs ten seconds, a fork nothing.

The arguments are the modules to import. Each line of standard input is a run: {"script", "world_size", "env", "argv",
"log", "seconds", "is_recipe"}; what is no recipe runs as `python script` would. The ranks are forked into their own process
group, so that a fault may kill them all. As under a launcher, the other ranks get SIGTERM when one fails, and SIGKILL 30 s
later. What still runs after `seconds` is killed. The answer is a line with the exit code of the first rank that failed
(128 + n for signal n; -n if the signal killed the whole group), or 0. A rank that uses the network beyond this machine ends
with 99.
"""

import contextlib
import gc
import importlib
import json
import locale
import os
import runpy
import signal
import socket
import sys

import torch
from forked import run_and_exit, use_hub
from huggingface_hub import constants
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

# A run of one process would compute on all cores, which other runs need: on busy cores its threads wait for each other ten times
# as long as they compute.
torch.set_num_threads = lambda number: None
HERE = {None, "", "localhost", "127.0.0.1", "::1", socket.gethostname()}


def refuse_network(event: str, args: tuple) -> None:
    """Audit hook that ends a rank which uses the network beyond this machine."""
    host = None
    if event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    elif event == "socket.getaddrinfo":
        host = args[0]
    if host not in HERE:
        print(f"{event} to {host}", file=sys.stderr, flush=True)
        os._exit(99)


def rank_process(rank: int, job: dict) -> int:
    """Fork one rank; returns its process id."""
    if pid := os.fork():
        return pid
    os.environ.update(job["env"] | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    locale.setlocale(locale.LC_CTYPE, "")  # a run may have another LC_ALL than this process
    sys.argv = [job["script"], *job["argv"]]
    sys.path[:0] = filter(None, [job["env"].get("PYTHONPATH")])  # as a new process would have it

    def run() -> None:
        sys.addaudithook(refuse_network)
        if not job["is_recipe"]:
            runpy.run_path(job["script"], run_name="__main__")
            return
        import faults

        from accelerate_recipes import recipe
        from accelerate_recipes.arguments import shipped
        from accelerate_recipes.launch import checks
        from accelerate_recipes.life import watch

        faults.arm()
        watch.SECONDS_TO_MISS = int(os.environ.get("TESTED_PATIENCE", watch.SECONDS_TO_MISS))
        if machines := os.environ.get("TESTED_MACHINES"):  # each rank is alone on a machine, where it has a folder
            os.environ["LOCAL_RANK"] = "0"
            folder = os.path.join(machines, f"machine-{rank}")
            os.makedirs(folder, exist_ok=True)
            os.chdir(folder)
            importlib.import_module("datasets").config.HF_DATASETS_CACHE = os.path.join(folder, "datasets")
        if cache := os.environ.get("TESTED_CACHE"):  # huggingface_hub was imported with another one
            constants.HF_HUB_CACHE = cache
            use_hub(os.environ["HF_ENDPOINT"], is_offline=True)
        if "FOUR_BITS_ON_CPU" in os.environ:  # a recipe refuses this, but bitsandbytes can do it
            checks.lever_problems = lambda *_: []
            # On a CPU bitsandbytes repacks weights in place at evaluation, which confuses FSDP's shards; on GPUs it does not.
            importlib.import_module("bitsandbytes.nn.modules").has_avx512bf16 = lambda: False
        module = shipped.load(job["script"])
        recipe.run_recipe(module.main, module.Args, module.requirements)

    run_and_exit(run, job["log"])


TERM_SECONDS = 30  # between SIGTERM and SIGKILL, as torch's launcher has it


def group_process(job: dict) -> int:
    """Fork the parent of all ranks of a run; returns its process id."""
    if pid := os.fork():
        return pid
    os.setsid()
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(0, signal.SIGKILL))
    signal.alarm(job["seconds"])
    ranks = {rank_process(rank, job) for rank in range(job["world_size"])}
    first_failure = 0
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status and not first_failure:
            first_failure = os.waitstatus_to_exitcode(status)
            for other in ranks:
                os.kill(other, signal.SIGTERM)
            # One may wait in C++ for a store that is gone, where no handler runs.
            signal.signal(signal.SIGALRM, lambda *_: [os.kill(other, signal.SIGKILL) for other in ranks])
            signal.alarm(TERM_SECONDS)
    os._exit(first_failure if first_failure >= 0 else 128 - first_failure)


for module in sys.argv[1:]:
    with contextlib.suppress(ImportError):  # tests/test_upstream.py names it; a run imports what it needs itself
        importlib.import_module(module)
get_checkpoint_conversion_mapping("llama")  # a table that transformers builds at the first use
gc.freeze()  # else each rank collects among what is imported: a tenth of its time
for line in sys.stdin:
    if not line.strip():  # the end; the pipe itself may stay open in a process that inherited it
        break
    _, status = os.waitpid(group_process(json.loads(line)), 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
os._exit(0)  # threads of libraries may not end
