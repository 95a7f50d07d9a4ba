"""Search for the smallest changes that make a run fit on its GPUs; for a run that fits, search for faster settings.

Each proposal is simulated. Proposals that leave the loss trajectory as it is come first, then those that change it.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.arguments.gpus import Gpu
from accelerate_recipes.errors import ConfigError, first_line
from accelerate_recipes.ranks import is_on, ranks_a_row
from accelerate_recipes.trial import NotSimulatedError
from recipe_tools.plan.layers import arriving_outcomes
from recipe_tools.plan.predict import Prediction, in_gib
from recipe_tools.plan.simulate import Job, Outcome, Simulator, load_trial

RECOMPUTE = ("--fsdp_activation_checkpointing", "true")
OFFLOAD = ("--fsdp_offload_params", "true")


@dataclass(frozen=True)
class Change:
    """Flags that change a run: of `accelerate launch`, of the recipe, and the number of nodes.

    `config` is the name of another accelerate YAML in the same folder; it replaces the YAML of the run. Only one of two
    changes of the same `kind` can be made.
    """

    kind: str
    launch: tuple[str, ...] = ()
    recipe: tuple[str, ...] = ()
    more_nodes: int = 1
    keeps_trajectory: bool = True
    config: str = ""

    def __str__(self) -> str:
        nodes = f"{self.more_nodes} x as many nodes" if self.more_nodes > 1 else ""
        config = f"config {self.config}" if self.config else ""
        return " ".join(filter(None, [config, *self.launch, *self.recipe, nodes]))


@dataclass(frozen=True)
class Proposal:
    """Changes, and the needs of the run with them."""

    changes: tuple[Change, ...]
    prediction: Prediction

    @property
    def keeps_trajectory(self) -> bool:
        return all(change.keeps_trajectory for change in self.changes)

    @property
    def has_more_nodes(self) -> bool:
        return any(change.more_nodes > 1 for change in self.changes)

    def __str__(self) -> str:
        return f"{in_words(self.changes)}: {in_gib(self.prediction.needed)} GiB, a step of {self.prediction.step_time}"


def in_words(changes: Iterable[Change]) -> str:
    return " and ".join(map(str, changes))


def reason_of(error: Exception) -> str:
    """Return the first line of an error, or of the list in it; name an unsupported setting as not simulated."""
    title, _, listed = str(error).strip().partition(":\n")
    said = first_line(error) if "\n" in title or not listed else listed.splitlines()[0].strip(" -")
    return f"plan does not simulate {said}" if isinstance(error, NotSimulatedError) else said


def nodes_of(env: Mapping[str, str]) -> int:
    return int(env["WORLD_SIZE"]) // int(env["LOCAL_WORLD_SIZE"])


def in_config(name: str, env: Mapping[str, str], *flags: str) -> Change:
    """Make a change to another accelerate YAML; the number of processes and the precision stay."""
    kept = ("--num_machines", str(nodes_of(env)), "--num_processes", env["WORLD_SIZE"])
    kept += ("--mixed_precision", env.get("ACCELERATE_MIXED_PRECISION", "no"))
    return Change("config", (*kept, *flags), config=name)


def sharing_changes(args: TrainArgs, env: Mapping[str, str]) -> list[Change]:
    """List changes that divide more among the ranks: the parameters (under DDP and replicas), and the rows."""
    world, row = int(env["WORLD_SIZE"]), ranks_a_row(env)
    replicas = int(env.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", 1))
    found = []
    if env.get("ACCELERATE_USE_FSDP") != "true":
        if world > 1:
            found.append(in_config("fsdp_full.yaml", env))
        # On one GPU, too, FSDP can recompute layers and keep parameters on the CPU.
        found.append(in_config("fsdp_full.yaml", env, *RECOMPUTE))
        return [*found, in_config("fsdp_full.yaml", env, *RECOMPUTE, *OFFLOAD)]

    def sizes(replicas: int, row: int) -> tuple[str, ...]:
        shards = world // (replicas * row)
        if shards == 1:  # Accelerate 1.15 refuses replicas if only the ranks that share a row divide the weights
            replicas, shards = 1, replicas
        found = {"dp_replicate": replicas, "dp_shard": shards, "cp": row}
        return tuple(word for name, size in found.items() for word in (f"--parallelism_config_{name}_size", str(size)))

    if replicas > 1:
        found.append(Change("shard", sizes(replicas // 2 if replicas % 2 == 0 else 1, row)))
    divided = [args.longest_row, int(env["LOCAL_WORLD_SIZE"]), world // replicas]
    if args.shares_rows and all(number % (2 * row) == 0 for number in divided):
        more = sizes(replicas, 2 * row)
        found.append(in_config("fsdp_long.yaml", env, *more) if row == 1 else Change("row", more))
    return found


def savings(args: TrainArgs, env: Mapping[str, str]) -> list[Change]:
    """List changes that may save memory and are not made yet."""
    use_fsdp, rows, found = is_on(env, "ACCELERATE_USE_FSDP"), args.per_device_train_batch_size, []
    if use_fsdp and not is_on(env, "FSDP_ACTIVATION_CHECKPOINTING"):
        found.append(Change("recompute", RECOMPUTE))
        if args.checkpoint_every_n_layers == 1:
            found += [Change("recompute", RECOMPUTE, ("--checkpoint_every_n_layers", n)) for n in ("2", "4")]
    elif use_fsdp and args.checkpoint_every_n_layers > 1:
        found.append(Change("recompute", (), ("--checkpoint_every_n_layers", "1")))
    if use_fsdp and not is_on(env, "FSDP_RESHARD_AFTER_FORWARD"):
        found.append(Change("shard", ("--fsdp_reshard_after_forward", "true")))
    if use_fsdp and not is_on(env, "FSDP_OFFLOAD_PARAMS"):
        found.append(Change("offload", OFFLOAD))
    found += sharing_changes(args, env)
    if rows > 1:
        found.append(Change("rows", (), ("--per_device_train_batch_size", str(rows // 2 if rows % 2 == 0 else 1))))
    if rows > 2:
        found.append(Change("rows", (), ("--per_device_train_batch_size", "1")))
    if args.whole_logits:
        found.append(Change("logits", (), ("--whole_logits", "false")))
    if args.prefetch_layers:
        found.append(Change("prefetch", (), ("--prefetch_layers", "0")))
    if use_fsdp and args.total_batch_size % (rows * args.num_launched * 2) == 0:
        found.append(Change("nodes", more_nodes=2))
    if args.optim == "adamw_torch_fused" and not args.use_peft:
        kahan = ("--mixed_precision", "no"), ("--optim", "adamw_bf16_kahan")
        found.append(Change("optimizer", *kahan, keeps_trajectory=False))
        found.append(Change("optimizer", (), ("--optim", "adafactor"), keeps_trajectory=False))
        if not use_fsdp:
            found.append(Change("optimizer", (), ("--optim", "adamw_8bit"), keeps_trajectory=False))
    if args.base_model and not args.use_peft and args.optim != "adamw_bf16_kahan":
        found.append(Change("optimizer", (), ("--use_peft", "true"), keeps_trajectory=False))
    return found


def speedups(args: TrainArgs, env: Mapping[str, str]) -> list[Change]:
    """List changes that cost memory and may be faster; all keep the loss trajectory."""
    if not is_on(env, "ACCELERATE_USE_FSDP"):
        return []
    found = []
    if is_on(env, "FSDP_ACTIVATION_CHECKPOINTING"):
        found.append(Change("recompute", (RECOMPUTE[0], "false"), ("--checkpoint_every_n_layers", "1")))
        if args.checkpoint_every_n_layers == 1:
            found += [Change("recompute", (), ("--checkpoint_every_n_layers", str(n))) for n in (2, 4)]
    if is_on(env, "FSDP_OFFLOAD_PARAMS"):
        found.append(Change("offload", ("--fsdp_offload_params", "false")))
    if is_on(env, "FSDP_RESHARD_AFTER_FORWARD"):
        found.append(Change("shard", ("--fsdp_reshard_after_forward", "false")))
    return found


def prediction_of(job: Job, outcome: Outcome, gpu: Gpu) -> Prediction:
    args, _ = load_trial(job)
    return Prediction(outcome, args, gpu, job.env)


@dataclass
class Search:
    """Search around a predicted run; `failed` gives the reason for changes without a prediction, by their words.

    `tell` gets a line for each trial; `to_paste` writes the whole command, told with a change that makes the run fit.
    """

    simulator: Simulator
    before: Prediction
    job: Job
    make_job: Callable[[Sequence[Change]], Job]
    failed: dict[str, str] = field(default_factory=dict)
    tell: Callable[[str], None] = lambda line: None
    to_paste: Callable[[Sequence[Change]], str] | None = None

    def simulate(self, choices: Iterable[tuple[Change, ...]]) -> list[Proposal]:
        """Simulate the run under each choice of changes."""
        jobs, began = {}, time.perf_counter()
        for choice in choices:
            try:
                jobs[choice] = self.make_job(choice)
            except ConfigError as error:
                self.failed[in_words(choice)] = reason_of(error)
        found, tried = {}, list(jobs)
        for done, (i, outcome) in enumerate(arriving_outcomes(self.simulator, list(jobs.values())), start=1):
            choice, left = tried[i], len(jobs) - done
            if isinstance(outcome, Outcome):
                found[i] = Proposal(choice, prediction_of(jobs[choice], outcome, self.before.gpu))
                fits = found[i].prediction.fits
                said = f"{found[i]}, {'fits' if fits else 'does not fit'}"
                paste = f"\n    {self.to_paste(choice)}" if self.to_paste and fits and not self.before.fits else ""
            else:
                self.failed[in_words(choice)] = reason_of(outcome)
                said, paste = f"{in_words(choice)}: could not be tried", ""
            seconds = (time.perf_counter() - began) / done * left
            self.tell(f"Tried {said}{f'; {left} left, about {seconds:.0f} s' if left else ''}{paste}")
        return [found[i] for i in sorted(found)]

    def fitting(self) -> list[Proposal]:
        """Find changes that make the run fit; the best first, and those that need more machines last.

        Single changes come first. If none keeps the loss trajectory, pairs are tried, of changes on the machines that were
        named, then of all.
        """
        fitting, saving = [], []
        candidates = savings(self.before.args, self.job.env)
        for more in (False, True):
            singles = self.simulate([(change,) for change in candidates if (change.more_nodes > 1) == more])
            fitting += [proposal for proposal in singles if proposal.prediction.fits]
            saving += [
                p.changes[0] for p in singles if p.prediction.needed < self.before.needed and not p.prediction.fits
            ]
            if not any(proposal.keeps_trajectory for proposal in fitting):
                pairs = [(a, b) for a, b in itertools.combinations(saving, 2) if a.kind != b.kind]
                pairs = [pair for pair in pairs if any(change.more_nodes > 1 for change in pair) == more]
                if pairs:
                    kind = " that keeps the loss trajectory" if fitting else ""
                    self.tell(f"No single change{kind} fits; now pairs of changes")
                fitting += [proposal for proposal in self.simulate(pairs) if proposal.prediction.fits]
        return sorted(
            fitting,
            key=lambda p: (p.has_more_nodes, not p.keeps_trajectory, len(p.changes), p.prediction.outcome.seconds),
        )

    def first_fitting(self) -> Proposal | None:
        """Find a change that makes the run fit and keeps the loss trajectory; try one change after the other."""
        kept = (change for change in savings(self.before.args, self.job.env) if change.keeps_trajectory)
        tried = (proposal for change in kept for proposal in self.simulate([(change,)]))
        return next((proposal for proposal in tried if proposal.prediction.fits), None)

    def faster(self) -> list[Proposal]:
        """Find changes that make a run that fits faster, while it still fits; the best first."""
        singles = self.simulate([(change,) for change in speedups(self.before.args, self.job.env)])
        seconds = self.before.outcome.seconds
        faster = [p for p in singles if p.prediction.fits and p.prediction.outcome.seconds < seconds]
        return sorted(faster, key=lambda p: p.prediction.outcome.seconds)

    def largest_batch(self) -> int:
        """Double the batch per device while it divides the total batch and the run still fits; return the largest batch."""
        args = self.before.args
        largest, share = args.per_device_train_batch_size, args.total_batch_size // args.num_launched
        while share % (2 * largest) == 0 and largest < 2**7 * args.per_device_train_batch_size:
            found = self.simulate([(Change("rows", (), ("--per_device_train_batch_size", str(2 * largest))),)])
            if not found or not found[0].prediction.fits:
                break
            largest *= 2
        return largest
