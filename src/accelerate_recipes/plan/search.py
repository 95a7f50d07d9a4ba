"""Search for the smallest changes with which a run fits on its GPUs, and for what would be faster where it fits.

Each proposal is simulated. First come those that leave the loss trajectory as it is, then those that change it.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.plan.gpus import Gpu
from accelerate_recipes.plan.layers import predict_outcomes
from accelerate_recipes.plan.predict import Prediction, in_gib
from accelerate_recipes.plan.simulate import Job, Outcome, Simulator, load_trial

RECOMPUTE = ("--fsdp_activation_checkpointing", "true")


@dataclass(frozen=True)
class Change:
    """Flags that change a run: of `accelerate launch`, of the recipe, and the number of nodes.

    Of two changes with the same `kind` only one can be made.
    """

    kind: str
    launch: tuple[str, ...] = ()
    recipe: tuple[str, ...] = ()
    more_nodes: int = 1
    keeps_trajectory: bool = True

    def __str__(self) -> str:
        nodes = f"{self.more_nodes} x as many nodes" if self.more_nodes > 1 else ""
        return " ".join(filter(None, [*self.launch, *self.recipe, nodes]))


@dataclass(frozen=True)
class Proposal:
    """Changes, and what the run needs with them."""

    changes: tuple[Change, ...]
    prediction: Prediction

    @property
    def keeps_trajectory(self) -> bool:
        return all(change.keeps_trajectory for change in self.changes)

    def __str__(self) -> str:
        needed, seconds = self.prediction.needed, self.prediction.outcome.seconds
        return f"{' and '.join(map(str, self.changes))}: {in_gib(needed)} GiB, a step of at least {seconds:.3g} s"


MakeJob = Callable[[Sequence[Change]], Job]


def savings(args: TrainArgs, env: Mapping[str, str]) -> list[Change]:
    """List changes that may save memory and are not made yet."""
    on = {name for name, value in env.items() if value.lower() == "true"}
    use_fsdp, rows = "ACCELERATE_USE_FSDP" in on, args.per_device_train_batch_size
    found = []
    if use_fsdp and "FSDP_ACTIVATION_CHECKPOINTING" not in on:
        found.append(Change("recompute", RECOMPUTE))
        if args.checkpoint_every_n_layers == 1:
            found.append(Change("recompute", RECOMPUTE, ("--checkpoint_every_n_layers", "2")))
    elif use_fsdp and args.checkpoint_every_n_layers > 1:
        found.append(Change("recompute", (), ("--checkpoint_every_n_layers", "1")))
    if use_fsdp and "FSDP_RESHARD_AFTER_FORWARD" not in on:
        found.append(Change("shard", ("--fsdp_reshard_after_forward", "true")))
    if use_fsdp and "FSDP_OFFLOAD_PARAMS" not in on:
        found.append(Change("offload", ("--fsdp_offload_params", "true")))
    if rows > 1:
        found.append(Change("rows", (), ("--per_device_train_batch_size", str(rows // 2 if rows % 2 == 0 else 1))))
    if rows > 2:
        found.append(Change("rows", (), ("--per_device_train_batch_size", "1")))
    if getattr(args, "whole_logits", False):
        found.append(Change("logits", (), ("--whole_logits", "false")))
    if args.prefetch_layers:
        found.append(Change("prefetch", (), ("--prefetch_layers", "0")))
    if use_fsdp and args.total_batch_size % (rows * args.num_launched * 2) == 0:
        found.append(Change("nodes", more_nodes=2))
    if args.optim == "adamw_torch_fused" and not args.use_peft:
        kahan = ("--mixed_precision", "no"), ("--optim", "adamw_bf16_kahan")
        found.append(Change("optimizer", *kahan, keeps_trajectory=False))
        found.append(Change("optimizer", (), ("--optim", "adafactor"), keeps_trajectory=False))
    if args.base_model and not args.use_peft and args.optim != "adamw_bf16_kahan":
        found.append(Change("optimizer", (), ("--use_peft", "true"), keeps_trajectory=False))
    return found


def speedups(args: TrainArgs, env: Mapping[str, str]) -> list[Change]:
    """List changes that cost memory and may be faster; all keep the loss trajectory."""
    on = {name for name, value in env.items() if value.lower() == "true"}
    if "ACCELERATE_USE_FSDP" not in on:
        return []
    found = []
    if "FSDP_ACTIVATION_CHECKPOINTING" in on:
        found.append(Change("recompute", (RECOMPUTE[0], "false"), ("--checkpoint_every_n_layers", "1")))
        if args.checkpoint_every_n_layers == 1:
            found += [Change("recompute", (), ("--checkpoint_every_n_layers", str(n))) for n in (2, 4)]
    if "FSDP_OFFLOAD_PARAMS" in on:
        found.append(Change("offload", ("--fsdp_offload_params", "false")))
    if "FSDP_RESHARD_AFTER_FORWARD" in on:
        found.append(Change("shard", ("--fsdp_reshard_after_forward", "false")))
    return found


def larger_batches(args: TrainArgs) -> list[Change]:
    """List larger batches per device that divide the total, each twice the one before."""
    rows, share = args.per_device_train_batch_size, args.total_batch_size // args.num_launched
    doubled = (rows * 2**i for i in range(1, 8))
    return [
        Change("rows", (), ("--per_device_train_batch_size", str(n))) for n in doubled if n <= share and share % n == 0
    ]


def simulate_all(
    simulator: Simulator, choices: Iterable[tuple[Change, ...]], make_job: MakeJob, gpu: Gpu
) -> list[Proposal]:
    """Simulate a run under each choice of changes; leaves out what is refused or cannot be simulated."""
    choices = list(choices)
    jobs = [make_job(choice) for choice in choices]
    found = []
    for choice, job, outcome in zip(choices, jobs, predict_outcomes(simulator, jobs), strict=True):
        if isinstance(outcome, Outcome):
            found.append(Proposal(choice, prediction_of(job, outcome, gpu)))
    return found


def prediction_of(job: Job, outcome: Outcome, gpu: Gpu) -> Prediction:
    args, _ = load_trial(job)
    return Prediction(outcome, args, gpu, int(job.env["WORLD_SIZE"]), int(job.env["LOCAL_WORLD_SIZE"]))


def find_fitting(simulator: Simulator, before: Prediction, job: Job, make_job: MakeJob) -> list[Proposal]:
    """Find single changes with which a run fits, else pairs of those that save memory; the best first."""
    candidates = savings(before.args, job.env)
    singles = simulate_all(simulator, [(change,) for change in candidates], make_job, before.gpu)
    fitting = [proposal for proposal in singles if proposal.prediction.fits]
    if not any(proposal.keeps_trajectory for proposal in fitting):
        saving = [p.changes[0] for p in singles if p.prediction.needed < before.needed and not p.prediction.fits]
        pairs = [pair for pair in itertools.combinations(saving, 2) if pair[0].kind != pair[1].kind]
        fitting += [p for p in simulate_all(simulator, pairs, make_job, before.gpu) if p.prediction.fits]
    return sorted(fitting, key=lambda p: (not p.keeps_trajectory, len(p.changes), p.prediction.outcome.seconds))


def find_faster(simulator: Simulator, before: Prediction, job: Job, make_job: MakeJob) -> tuple[list[Proposal], int]:
    """Find changes with which a run that fits is faster and still fits, and the largest batch per device that fits."""
    singles = simulate_all(simulator, [(c,) for c in speedups(before.args, job.env)], make_job, before.gpu)
    faster = [p for p in singles if p.prediction.fits and p.prediction.outcome.seconds < before.outcome.seconds]
    largest = before.args.per_device_train_batch_size
    for change in larger_batches(before.args):
        found = simulate_all(simulator, [(change,)], make_job, before.gpu)
        if not found or not found[0].prediction.fits:
            break
        largest = found[0].prediction.args.per_device_train_batch_size
    return sorted(faster, key=lambda p: p.prediction.outcome.seconds), largest
