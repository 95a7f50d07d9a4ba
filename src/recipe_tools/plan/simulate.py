"""Simulation of one optimizer step of rank 0: our own `prepare` and `train_step` on fake tensors, in a process of its own.

`Simulator` hands jobs to a child that has imported the libraries and forks a process for each job, because
`fake_gpu.py` changes a whole process. A process takes seconds for a few layers, and as much memory as the libraries.
"""

import contextlib
import copy
import importlib
import itertools
import math
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import transformers.modeling_utils  # noqa: F401  # what is imported while GPUs are pretended would see a GPU
from transformers import PreTrainedConfig

import accelerate_recipes.models.document_attention  # noqa: F401  # the same
from accelerate_recipes import distributed
from accelerate_recipes.args import TrainArgs, resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.arguments.gpus import GPUS
from accelerate_recipes.engine import train_step
from accelerate_recipes.errors import ConfigError, raise_problems, that_apply
from accelerate_recipes.launch.checks import launch_problems, num_accelerators
from accelerate_recipes.models.adapters import WithoutAdapters, add_adapters
from accelerate_recipes.models.head_probe import check_head
from accelerate_recipes.models.probes import balance_weight, mixers_in
from accelerate_recipes.models.shared_rows import part_of_rows, row_group
from accelerate_recipes.ranks import computes_in_bf16, data_world_size, ranks_a_row
from accelerate_recipes.run import Run
from accelerate_recipes.trial import NotSimulatedError, Trial, is_staged
from recipe_tools.plan.allocator import reserved
from recipe_tools.plan.ledger import ACTIVATIONS, BUCKETS, GRADIENTS, PARAMETERS, Clock, Ledger

MICRO_BATCHES = 2  # more of them take time, but no memory
NUM_LAYERS = (
    "num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "encoder_layers", "decoder_layers",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One simulation: the environment that `accelerate launch` gives the first process, the recipe and its arguments."""

    env: dict[str, str]
    command: list[str]
    gpu: str = "h100"
    device: str = "cuda"  # or cpu, to compare with a run on gloo
    num_layers: int = 0  # 0: as many as the model has
    micro_batches: int = MICRO_BATCHES


@dataclass
class Outcome:
    """Needs of one optimizer step on rank 0. Sizes are in bytes, times in seconds."""

    peak: int
    at_peak: dict[str, int]
    host_peak: int
    phases: list  # of `ledger.Phase`
    flops: int
    recomputed: int
    collectives: dict[str, dict[str, int]]  # "allgather_base 32": calls, bytes, sent
    inside_node: dict[str, bool]  # whether a collective stays inside a node
    seconds: float  # lower bound, like those of compute, memory and communication
    compute: float
    memory: float
    communication: float
    micro_batches: int  # of a step; memory is measured over two
    tokens: int  # targets of a micro-batch, of this rank
    unit: str  # of a target
    trained: int  # trained parameters of the whole model
    parameters: int  # all of them
    num_layers: int
    is_uniform: bool  # whether all layers are alike
    reserved: int = 0  # bytes of the allocator at the peak; approximate for an extrapolated model
    by_muon: int = 0  # parameters that Muon trains
    optimizer: float = 0.0  # seconds of the optimizer's step
    before: float = 0.0  # seconds of a step before its micro-batches, such as for drawing answers
    value_reads: int = 0
    shapes: list[list[int]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)


class SimulationError(Exception):
    """A simulation has failed. A run might succeed, or fail in the same way."""


Refusal = NotSimulatedError | SimulationError | ConfigError


def unsupported(args: TrainArgs, trial: Trial, env: dict[str, str]) -> list[str]:
    """List the parts of a run that cannot be simulated, as texts."""
    use_fsdp = env.get("ACCELERATE_USE_FSDP") == "true"
    found = {
        "FSDP1 (choose a config with fsdp_version: 2)": use_fsdp and env.get("FSDP_VERSION") != "2",
        "--load_in_4bit": args.load_in_4bit,
        "--optim adamw_8bit": args.optim == "adamw_8bit",
        "--optim muon under DDP": args.optim == "muon" and not use_fsdp and int(env["WORLD_SIZE"]) > 1,
        "mixed_precision: fp8": env.get("ACCELERATE_MIXED_PRECISION") == "fp8",
        "dynamo_backend: memory of compiled layers": env.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO",
        "a mixture of experts in fp32, or with weights in fp32 without FSDP": args.param_dtype == torch.float32
        and not (use_fsdp and computes_in_bf16(env.get("ACCELERATE_MIXED_PRECISION")))
        and bool(getattr(trial.config.get_text_config(), "num_local_experts", 0)),
    }
    return that_apply(found)


def with_layers(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """Copy a configuration, with another number of layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    before = layers_of(config)
    for name in NUM_LAYERS:
        if getattr(text, name, None) is not None and name not in text.attribute_map:
            setattr(text, name, num_layers)
    for name, value in list(vars(text).items()):  # such as layer_types
        if isinstance(value, list) and len(value) == before:
            setattr(text, name, (value * num_layers)[:num_layers])
    return config


def layers_of(config: PreTrainedConfig) -> int:
    """Return the number of layers of each stack; for a model in stages of different widths, the number of all layers."""
    if is_staged(config):
        return sum(config.depths)
    text = config.get_text_config()
    return next(getattr(text, name) for name in NUM_LAYERS if getattr(text, name, None) is not None)


def are_alike(model: torch.nn.Module, config: PreTrainedConfig) -> bool:
    """Tell whether the layers of each stack have the same parameters, and all layers have the same kind of attention."""
    kinds: dict[int, set] = {}
    for stack in model.modules():
        if isinstance(stack, torch.nn.ModuleList):
            for layer in list(stack)[1:]:  # the first may have more, such as T5's bias of relative positions
                if type(layer).__name__ in (getattr(model, "_no_split_modules", None) or ()):
                    shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
                    kinds.setdefault(id(stack), set()).add(shapes)
    types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    return bool(kinds) and all(len(shapes) == 1 for shapes in kinds.values()) and len(types) <= 1


def load_trial(job: Job) -> tuple[Any, Trial]:
    """Load a job's recipe, and let the recipe make its trial.

    Raises:
        ConfigError: for arguments that are wrong.
        NotSimulatedError: for a recipe that has no trial.
    """
    module = shipped.load(job.command[0])
    if not hasattr(module, "trial"):
        raise NotSimulatedError(f"{job.command[0]}: it defines no trial(args)")
    shares, row_size = data_world_size(job.env), ranks_a_row(job.env)
    args, problems = resolve(module.Args, job.command[1:], shares, row_size=row_size)
    if problems:
        raise ConfigError("; ".join(problems))
    return args, module.trial(args)


def take_step(ledger: Ledger, run: Run, trial: Trial, batches: list[dict[str, Any]]) -> None:
    """Take an optimizer step under the ledger."""
    ledger.begin_step()
    if trial.before_fn:
        trial.before_fn(run.model, batches[0], ledger.begin_pass)
        ledger.begin_pass("", 0)
    train_step(run, batches, trial.loss_fn, trial.count_fn)
    ledger.tag([p.grad for p in run.model.parameters() if p.grad is not None], GRADIENTS)
    ledger.watch(run.model, run.optimizer)


def take_steps(ledger: Ledger, run: Run, trial: Trial, batches: list[dict[str, Any]]) -> None:
    """Take two steps and count the second: in the first, DTensor computes shapes, and the optimizer has no states yet."""
    run.model.train()
    ledger.watch(run.model, run.optimizer)
    ledger.tag([value for batch in batches for value in batch.values()], ACTIVATIONS)
    take_step(ledger, run, trial, batches[:1])
    take_step(ledger, run, trial, batches)


def outcome_of(ledger: Ledger, trial: Trial, batches: list, **facts: Any) -> Outcome:
    """Collect the sums of a ledger; count each pass before the micro-batches as often as the step has it."""
    outcome = Outcome(
        peak=ledger.peak,
        at_peak=dict(ledger.at_peak),
        host_peak=ledger.host_peak,
        phases=[[phase.name, phase.segments] for phase in ledger.phases],
        inside_node={f"{name} {size}": ledger.clock.is_inside(ranks) for (name, size), ranks in ledger.groups.items()},
        micro_batches=len(batches),
        tokens=trial.tokens,
        unit=trial.unit,
        value_reads=ledger.value_reads,
        optimizer=ledger.optimizer,
        shapes=sorted(map(list, ledger.shapes)),
        calls=dict(ledger.calls),
        moved=dict(ledger.moved),
        **ledger.sums(),
        **facts,
    )
    for (_, times, one), (_, _, two) in itertools.pairwise(ledger.passes):
        add_more(outcome, one, two, times - 1)
        outcome.before += times * (two["seconds"] - one["seconds"])
    return outcome


def simulate_here(job: Job) -> Outcome:
    """Simulate in this process, which cannot be used for anything else afterwards.

    Raises:
        ConfigError: for arguments that are wrong, or do not fit the model.
        NotSimulatedError: names the parts that cannot be simulated.
    """
    from recipe_tools.plan.fake_gpu import Answers, pretend

    use_fsdp = job.env.get("ACCELERATE_USE_FSDP") == "true"
    os.environ.update(job.env)
    if use_fsdp:
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "head", "MASTER_PORT": "1"})
    else:  # one process, as without a launcher
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    world_size, gpus_per_node = int(job.env["WORLD_SIZE"]), int(job.env["LOCAL_WORLD_SIZE"])
    shipped.load(job.command[0])  # before the patch, so that imported modules do not see a GPU
    with mock.patch("torch.cuda.is_available", lambda: job.device == "cuda"):  # decides the choice of attention
        args, trial = load_trial(job)
        if found := unsupported(args, trial, job.env):
            raise NotSimulatedError(", ".join(found))
        trial = replace(trial, tokens=trial.tokens // ranks_a_row(job.env))
        args.merge_adapter = False  # it would read files
        config = with_layers(trial.config, job.num_layers) if job.num_layers else trial.config
        model = trial.make_model(config)
        base = trial.make_reference() if trial.make_reference else None  # whole, of any number of layers
        if trial.keep_reference and not (base or args.use_peft):
            base = trial.make_model(config)
    adapter = add_adapters(model, args)
    is_uniform = are_alike(model, config)
    # These cache their answers: under fakes, their tiny models would have no values.
    mixers_in(model)
    if args.whole_logits is False:
        check_head(model.config)
    balance_weight(model.config)
    with pretend(world_size, job.device, use_fsdp, trial.is_packed) as mode:
        raise_problems("This launch cannot work", launch_problems(args, os.environ, num_accelerators()))
        run = Run(args, distributed.make_accelerator(args))
        run.adapter = adapter
        with mode if job.device == "cuda" else contextlib.nullcontext():
            run.shard(model)
            mode.allow_non_fake_inputs = bool(base)  # the weights of a second model have no memory yet
            reference = run.shard_reference(base) if base else WithoutAdapters(run.model)
        if trial.keep_reference:
            trial.keep_reference(reference)
        parameters = sum(p.numel() for p in run.model.parameters())
        trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
        of_muon = [group["params"] for group in run.optimizer.param_groups if group.get("is_muon")]
        by_muon = sum(p.numel() for params in of_muon for p in params)
        clock = Clock(GPUS[job.gpu], gpus_per_node)
        cast = list(run.model.parameters()) if not use_fsdp and computes_in_bf16() else []
        with (
            mode,
            Answers(job.device == "cuda", trial.tokens, cast),
            Ledger(job.device, num_logits(config), clock) as ledger,
        ):
            accumulation = args.accumulation_steps(data_world_size(job.env))
            batches = [
                part_of_rows(fake_batch(trial.batch, run.accelerator.device), row_group(run.accelerator))
                for _ in range(min(job.micro_batches, accumulation))
            ]
            if base:
                ledger.tag(reference.parameters(), PARAMETERS)
            take_steps(ledger, run, trial, batches)
            facts = {"trained": trained, "by_muon": by_muon, "parameters": parameters, "num_layers": layers_of(config)}
            outcome = outcome_of(ledger, trial, batches, is_uniform=is_uniform, **facts)
            outcome.reserved = reserved(ledger.events) if job.device == "cuda" else 0
            if accumulation > len(batches):
                one, two = ledger.after_backward[-2:]
                add_more(outcome, one, two, accumulation - len(batches))
                outcome.micro_batches = accumulation
    if not use_fsdp and world_size > 1:
        add_ddp(outcome, world_size, world_size == gpus_per_node, clock)
    return outcome


def add_more(outcome: Outcome, one: dict, two: dict, times: int) -> None:
    """Add the difference of the sums `one` and `two` to an outcome, `times` times."""
    for name in two.keys() - {"collectives"}:
        setattr(outcome, name, getattr(outcome, name) + times * (two[name] - one[name]))
    for key, counts in two["collectives"].items():
        before = one["collectives"].get(key, {})
        for what, n in counts.items():
            outcome.collectives[key][what] += times * (n - before.get(what, 0))


def add_ddp(outcome: Outcome, world_size: int, is_inside: bool, clock: Clock) -> None:
    """Add the costs of DDP to the outcome of one process. DDP's reducer reads values of tensors, so it cannot be simulated.

    The reducer keeps a copy of all gradients in buckets. It counts as one all-reduce over the ranks.
    """
    size = 4 * outcome.trained
    outcome.peak += size
    outcome.reserved += size
    outcome.at_peak[BUCKETS] = size
    outcome.phases = []
    sent = int(2 * size * (world_size - 1) / world_size)
    outcome.collectives[f"allreduce {world_size}"] = {"calls": 1, "bytes": size, "sent": sent}
    outcome.inside_node[f"allreduce {world_size}"] = is_inside
    seconds = clock.transfer(sent, list(range(world_size)))
    outcome.communication += seconds
    outcome.seconds = max(outcome.seconds, outcome.communication)


def num_logits(config: PreTrainedConfig) -> int:
    """Return the size of the output layer: the number of tokens, or of classes of images."""
    config = config.get_text_config()
    return config.vocab_size if hasattr(config, "vocab_size") else len(config.id2label or {})


def fake_batch(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Make a fake batch of the same sizes."""
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device=device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def serve() -> None:
    """Answer each list of jobs on standard input with their outcomes; jobs run in forks, one for each core."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # recipes print
    with contextlib.suppress(EOFError):
        while jobs := pickle.load(sys.stdin.buffer):
            with contextlib.suppress(Exception, SystemExit):  # imports, once for all forks, which meet an error again
                args, _ = load_trial(jobs[0])
                if args.use_peft:
                    importlib.import_module("peft")
            for found in in_forks(jobs, num_at_once()):
                pickle.dump(found, out)
                out.flush()


def num_at_once() -> int:
    """Return how many simulations run at the same time: one on each core."""
    return len(os.sched_getaffinity(0))


def in_forks(jobs: Sequence[Job], at_once: int) -> Iterator[tuple[Outcome | Refusal, float]]:
    """Simulate each job in a fork of this process; yield results in order, with the seconds that each took."""
    started: list[tuple[int, Any]] = []
    for i, _ in enumerate(jobs):
        while len(started) < min(len(jobs), i + at_once):
            started.append(fork(jobs[len(started)]))
        pid, pipe = started[i]
        with pipe:
            found = pipe.read()
        os.waitpid(pid, 0)
        died = "the simulation failed: it died without a word, perhaps for want of memory"
        yield pickle.loads(found) if found else (SimulationError(died), 0.0)


def fork(job: Job) -> tuple[int, Any]:
    """Start a simulation; return its process id, and the end of a pipe from which the result can be read."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, os.fdopen(read, "rb")
    began = time.perf_counter()
    try:
        result = simulate_here(job)
    except (NotSimulatedError, ConfigError) as error:
        result = error
    except BaseException as error:
        said = f"the simulation failed: {type(error).__name__}: {str(error)[:500]}"
        result = SimulationError(f"{said}\n{traceback.format_exc()}".strip())
    with contextlib.suppress(OSError), os.fdopen(write, "wb") as pipe:
        pickle.dump((result, time.perf_counter() - began), pipe)
    os._exit(0)


def simulations_take(took: Sequence[float], elapsed: float, number: int, at_once: int) -> float:
    """Estimate how long the rest of a `number` of simulations takes.

    Args:
        took: seconds of each that is done.
        elapsed: seconds since the first began, without those in which libraries were loaded.
        number: how many there are.
        at_once: how many run at the same time.
    """
    rounds = math.ceil(number / min(at_once, number))
    return max(0.0, rounds * sum(took) / len(took) - elapsed)


class Simulator:
    """Child process that simulates; a context manager. `number` counts simulations, `tell` gets a line after each."""

    def __enter__(self):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.number, self.tell = 0, lambda text: None
        self.child = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env,
        )  # fmt: skip
        return self

    def __exit__(self, *args):
        self.child.communicate()  # closes the child's input, so the child ends

    def __call__(self, jobs: Sequence[Job]) -> Iterator[Outcome | Refusal]:
        """Simulate each job; one that is refused, cannot be simulated or fails has an error as its result.

        The results come in order, each when it is there; take all of them before the next call.

        Raises:
            ConfigError: if the child is gone.
        """
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(jobs, self.child.stdin)
            self.child.stdin.flush()
        at_once, took, began = num_at_once(), [], 0.0
        if jobs:
            steps = f"{len(jobs)} step{'s' * (len(jobs) > 1)}, {min(at_once, len(jobs))} at once"
            self.tell(f"Simulating {steps}; the first also waits for libraries to load")
        for done in range(1, len(jobs) + 1):
            self.number += 1
            try:
                found, seconds = pickle.load(self.child.stdout)
            except (EOFError, pickle.UnpicklingError):
                said = f"the simulation ended with exit code {self.child.wait()}, perhaps for want of memory"
                remedy = "plan where there is more, or leave it out (preflight --no_plan)"
                raise ConfigError(f"{said}: {remedy}") from None
            now = time.perf_counter()
            took, began = [*took, seconds], began or now - seconds
            left = simulations_take(took, now - began, len(jobs), at_once)
            more = f"; about {left:.0f} s left" if done < len(jobs) else ""
            self.tell(f"Simulated {done} of {len(jobs)} in {seconds:.0f} s{more}")
            yield found
