"""Search for the smallest changes with which a run fits on its GPUs, and for what would be faster where it fits.

Each proposal is simulated. First come those that leave the loss trajectory as it is, then those that change it.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from accelerate_recipes.args import ConfigError, TrainArgs, first_line
from accelerate_recipes.plan.gpus import Gpu
from accelerate_recipes.plan.layers import predict_outcomes
from accelerate_recipes.plan.predict import Prediction, in_gib
from accelerate_recipes.plan.simulate import Job, NotSimulatedError, Outcome, Simulator, load_trial

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
        return f"{in_words(self.changes)}: {in_gib(needed)} GiB, a step of at least {seconds:.3g} s"


def in_words(changes: Iterable[Change]) -> str:
    return " and ".join(map(str, changes))


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


def prediction_of(job: Job, outcome: Outcome, gpu: Gpu) -> Prediction:
    args, _ = load_trial(job)
    return Prediction(outcome, args, gpu, int(job.env["WORLD_SIZE"]), int(job.env["LOCAL_WORLD_SIZE"]))


@dataclass
class Search:
    """Search around a run that was predicted; `failed` says of changes that gave no prediction why."""

    simulator: Simulator
    before: Prediction
    job: Job
    make_job: MakeJob
    failed: dict[tuple[Change, ...], str] = field(default_factory=dict)

    def simulate(self, choices: Iterable[tuple[Change, ...]]) -> list[Proposal]:
        """Simulate the run under each choice of changes."""
        jobs = {}
        for choice in choices:
            try:
                jobs[choice] = self.make_job(choice)
            except ConfigError as error:
                self.failed[choice] = first_line(error)
        found = []
        for (choice, job), outcome in zip(
            jobs.items(), predict_outcomes(self.simulator, list(jobs.values())), strict=True
        ):
            if isinstance(outcome, Outcome):
                found.append(Proposal(choice, prediction_of(job, outcome, self.before.gpu)))
            else:
                reason = first_line(outcome)
                is_named = isinstance(outcome, NotSimulatedError)
                self.failed[choice] = f"plan does not simulate {reason}" if is_named else reason
        return found

    def fitting(self) -> list[Proposal]:
        """Find single changes with which the run fits, else pairs of those that save memory; the best first."""
        candidates = savings(self.before.args, self.job.env)
        singles = self.simulate([(change,) for change in candidates])
        fitting = [proposal for proposal in singles if proposal.prediction.fits]
        if not any(proposal.keeps_trajectory for proposal in fitting):
            saving = [
                p.changes[0] for p in singles if p.prediction.needed < self.before.needed and not p.prediction.fits
            ]
            pairs = [pair for pair in itertools.combinations(saving, 2) if pair[0].kind != pair[1].kind]
            fitting += [proposal for proposal in self.simulate(pairs) if proposal.prediction.fits]
        return sorted(fitting, key=lambda p: (not p.keeps_trajectory, len(p.changes), p.prediction.outcome.seconds))

    def faster(self) -> list[Proposal]:
        """Find changes with which a run that fits is faster and still fits; the best first."""
        singles = self.simulate([(change,) for change in speedups(self.before.args, self.job.env)])
        seconds = self.before.outcome.seconds
        faster = [p for p in singles if p.prediction.fits and p.prediction.outcome.seconds < seconds]
        return sorted(faster, key=lambda p: p.prediction.outcome.seconds)

    def largest_batch(self) -> int:
        """Find the largest batch per device, of doublings, with which a run that fits still fits."""
        largest = self.before.args.per_device_train_batch_size
        for change in larger_batches(self.before.args):
            found = self.simulate([(change,)])
            if not found or not found[0].prediction.fits:
                break
            largest = found[0].prediction.args.per_device_train_batch_size
        return largest
