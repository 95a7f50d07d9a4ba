"""Plan of a run before it is queued: `python -m accelerate_recipes plan CONFIG [FLAGS] RECIPE ARGS...`

It simulates one optimizer step, without a GPU and without data (`plan/`). It reports the needs of a GPU and whether the run
fits. If the run does not fit, it proposes the smallest changes that make it fit. Flags: those of preflight, and --gpu NAME,
--json FILE and --no_search.
"""

import argparse
import errno
import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate_recipes.arguments.declaring import group_flags
from accelerate_recipes.arguments.gpus import GPUS
from accelerate_recipes.disk import refusal
from accelerate_recipes.errors import ConfigError, raise_problems
from accelerate_recipes.launch.checks import environment_problems
from accelerate_recipes.launch.settings import yaml_problems
from accelerate_recipes.trial import NotSimulatedError
from recipe_tools.plan.layers import predict_outcomes
from recipe_tools.plan.predict import Prediction
from recipe_tools.plan.search import Change, Proposal, Search, nodes_of, prediction_of, reason_of
from recipe_tools.plan.simulate import Job, Outcome, Simulator
from recipe_tools.request import Request, launch_environment, read_request

SHOWN = 6  # proposals of each sort


def plan(argv: Sequence[str], tell: Callable[[str], None]) -> None:
    """Plan CONFIG [--nodes N --gpus-per-node G] [launch flags] RECIPE ARGS..., and write the file of --json.

    `tell` gets each part of the text when it is there, and a line for each simulation and each trial of the search.

    Raises:
        ConfigError: for a wrong command line, and for a run that cannot start or cannot be simulated.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no_search", action="store_true")
    asked, argv = parser.parse_known_args(argv)
    request = read_request(argv, "plan")
    raise_problems("This run cannot start", request.config_problems)
    if asked.json and (why := file_refusal(asked.json)):  # a simulation takes minutes
        raise ConfigError(f"--json {asked.json}: {why}")
    job = job_of(request, request.gpu or "h100")
    raise_problems("This run cannot start", environment_problems(job.env, int(job.env["LOCAL_WORLD_SIZE"])))
    began = time.perf_counter()
    with Simulator() as simulator:
        simulator.tell = tell
        found = simulated(simulator, job)
        simulator.tell = lambda text: None  # the search tells each trial
        tell(found.report())
        facts = found.facts()
        if not asked.no_search:
            more, proposals = searched(simulator, found, job, request, tell)
            tell("\n".join(more))
            facts |= proposals
        tell(f"{simulator.number} simulation{'s' * (simulator.number != 1)} in {time.perf_counter() - began:.0f} s")
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)  # for the report, it lies in the output directory
        asked.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def changed_words(request: Request, changes: Sequence[Change]) -> tuple[list[str], list[str]]:
    """Return the flags of `accelerate launch`, and the recipe with its arguments, of a request with changes.

    Raises:
        ConfigError: if the launcher would start nothing.
    """
    flags, command, more = list(request.launch), list(request.command), 1
    for change in changes:
        if change.config:
            flags[1] = str(request.config.parent / change.config)
            if problems := yaml_problems(Path(flags[1])):
                raise ConfigError(", ".join(problems))
        flags = replaced(flags, change.launch)
        command = [command[0], *replaced(command[1:], change.recipe)]
        more *= change.more_nodes
    if more > 1:
        env = launch_environment([*flags, *command])
        sizes = {"num_machines": nodes_of(env), "num_processes": int(env["WORLD_SIZE"])}
        divided = {name.lower(): int(size) for name, size in env.items() if name.startswith("PARALLELISM_CONFIG_DP_")}
        if divided:
            replicate, shard = "parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"
            grown = replicate if divided[replicate] > 1 else shard
            sizes[grown] = divided[grown]
        flags = replaced(flags, [word for name, size in sizes.items() for word in (f"--{name}", str(more * size))])
    return flags, command


def replaced(words: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Put changed flags with their values at the end, in place of the same flags."""
    new, _ = group_flags(list(changes))
    names = {flag.replace("-", "_") for flag, _ in new}
    kept, _ = group_flags(list(words))
    others = [word for flag, values in kept if flag.replace("-", "_") not in names for word in (flag, *values)]
    return [*others, *changes]


def job_of(request: Request, gpu: str, changes: Sequence[Change] = ()) -> Job:
    """Make the job that simulates a request with changes.

    Raises:
        ConfigError: if the launcher would start nothing.
    """
    flags, command = changed_words(request, changes)
    return Job(launch_environment([*flags, *command]), command, gpu)


def to_paste(request: Request, changes: Sequence[Change]) -> str:
    """Write the whole command of a run with changes. On several machines, the shell sets the two variables in it."""
    flags, command = changed_words(request, changes)
    words = shlex.join(["accelerate", "launch", *flags])
    if nodes_of(launch_environment([*flags, *command])) > 1:
        words += ' --machine_rank "$MACHINE_RANK" --main_process_ip "$FIRST_MACHINE"'
    return f"{words} {shlex.join(command)}"


def memory_problems(request: Request, env: dict[str, str], *, is_here: bool) -> tuple[str, list[str], list[str]]:
    """Simulate a step, and check that the run fits on its GPU; return a line with its needs, problems and warnings.

    A file that the simulation reads may exist only on the machine of the run. So unless `is_here`, a simulation that is
    refused is a warning, not a problem.
    """
    job = Job(env, request.command, request.gpu)
    with Simulator() as simulator:
        (outcome,) = predict_outcomes(simulator, [job])
        if isinstance(outcome, Outcome):
            prediction = prediction_of(job, outcome, GPUS[request.gpu])
            line = f"Memory of a GPU: {prediction.memory_line()}"
            if prediction.is_near:
                return "", [], [f"{line}; what lies outside of tensors is not known exactly"]
            if prediction.fits:
                return line, [], []
            search = Search(simulator, prediction, job, partial(job_of, request, request.gpu))
            fitting = search.first_fitting()
            nothing = "none of the single changes that keep the loss trajectory, and could be simulated, is enough"
            said = f"{line}; {f'it fits with {fitting}' if fitting else nothing}"
            more = "`python -m accelerate_recipes plan` in place of preflight finds more"
            return line, [f"{said}. {more}, and --no_plan leaves this check out"], []
    if isinstance(outcome, ConfigError) and is_here:
        return "", [str(outcome)], []
    return "", [], [f"memory was not checked: {reason_of(outcome)}"]


def simulated(simulator: Simulator, job: Job) -> Prediction:
    """Predict a run; raise ConfigError if the run is refused or cannot be simulated."""
    (outcome,) = predict_outcomes(simulator, [job])
    if isinstance(outcome, ConfigError):
        raise outcome
    if not isinstance(outcome, Outcome):
        said = "does not simulate" if isinstance(outcome, NotSimulatedError) else "cannot tell:"
        raise ConfigError(f"plan {said} {outcome}")
    return prediction_of(job, outcome, GPUS[job.gpu])


def searched(
    simulator: Simulator, prediction: Prediction, job: Job, request: Request, tell: Callable[[str], None]
) -> tuple[list[str], dict[str, Any]]:
    """Search for better settings, and tell each trial; return them as lines of text, and for --json."""

    def commands(proposals: Sequence[Proposal]) -> list[str]:
        return [f"  {proposal}\n    {to_paste(request, proposal.changes)}" for proposal in proposals[:SHOWN]]

    make_job, paste = partial(job_of, request, job.gpu), partial(to_paste, request)
    search = Search(simulator, prediction, job, make_job, tell=tell, to_paste=paste)
    if prediction.fits:
        faster, largest = search.faster(), search.largest_batch()
        rows = f"The largest --per_device_train_batch_size that fits (of doublings): {largest}"
        title = "Faster, and it fits:" if faster else "Nothing that was tried is faster and fits"
        facts = {"largest_batch": largest, "faster": as_json(faster)}
        return [rows, title, *commands(faster), *failures(search)], facts | {"failed": search.failed}
    fitting = search.fitting()
    here = [proposal for proposal in fitting if not proposal.has_more_nodes]
    sorts = {
        "It fits with these changes (same loss trajectory):": [p for p in here if p.keeps_trajectory],
        "It fits with these changes (another loss trajectory):": [p for p in here if not p.keeps_trajectory],
        "It fits on more machines:": [p for p in fitting if p.has_more_nodes],
    }
    lines = [line for title, found in sorts.items() if found for line in (title, *commands(found))]
    if not any(proposal.keeps_trajectory for proposal in fitting):
        lines.insert(0, "Nothing that keeps the loss trajectory makes it fit")
    return [*lines, *failures(search)], {"fits_with": as_json(fitting), "failed": search.failed}


def failures(search: Search) -> list[str]:
    """Describe the changes that gave no prediction, with the reasons."""
    lines = [f"  {changes}: {reason}" for changes, reason in search.failed.items()]
    more = [f"  and {len(lines) - SHOWN} more; --json has all"] if len(lines) > SHOWN else []
    return ["These could not be tried:", *lines[:SHOWN], *more] if lines else []


def as_json(proposals: Sequence[Proposal]) -> list[dict[str, Any]]:
    """Describe proposals for --json."""
    return [
        {
            "config": next((change.config for change in proposal.changes if change.config), None),
            "launch": [word for change in proposal.changes for word in change.launch],
            "recipe": [word for change in proposal.changes for word in change.recipe],
            "nodes": [change.more_nodes for change in proposal.changes if change.more_nodes > 1],
            "keeps_trajectory": proposal.keeps_trajectory,
            "needed": proposal.prediction.needed,
            "seconds": proposal.prediction.outcome.seconds,
        }
        for proposal in proposals
    ]


def file_refusal(file: Path) -> str | None:
    """Return why a file cannot be written, in a folder that is made if it is missing; None if it can."""
    if file.is_dir():
        return "it is a folder; name a file"
    if file.exists():
        return None if os.access(file, os.W_OK) else os.strerror(errno.EACCES)
    return refusal(file.parent)
