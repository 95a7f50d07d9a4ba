"""Calendar of a run: when to log, evaluate, save and stop."""

import sys
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import set_seed

from accelerate_recipes.bad_steps import check_replicas
from accelerate_recipes.checkpoint.resume import check_not_beyond
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.life import status, stop, watch
from accelerate_recipes.metrics import Flops, MetricsLog, Window, peak_memory_gib
from accelerate_recipes.ranks import is_first, max_over_ranks
from accelerate_recipes.upstream import forget_evaluated_shapes

if TYPE_CHECKING:
    from accelerate_recipes.checkpoint.checkpointer import Checkpointer

EvaluateFn = Callable[[int], dict[str, float]]
MOST_IDLE = 10  # steps in a row without a target, which may happen with few rows a step


class Observer:
    """Part that looks on at a run, such as its report. Each method is called on every rank.

    An observer does no collective, and changes nothing of the run.
    """

    def began(self, step: int) -> None:
        """Note that the run begins, or goes on, after `step`."""

    def completed(self, step: int) -> None:
        """Note that `step` is completed."""

    def evaluated(self, records: list[dict]) -> None:
        """Note that the model was evaluated; `records` are those of metrics.jsonl."""

    def ended(self, step: int) -> None:
        """Note that `step` is the last one, of the run or of this attempt."""


observers: list[Observer] = []  # which `recipe.run_recipe` joins


def tell(moment: Callable[[Observer, Any], None], value: Any) -> None:
    """Call a method of each observer, in their order. An error is a warning: what looks on is not worth a run."""
    for observer in observers:
        try:
            getattr(observer, moment.__name__)(value)
        except Exception as error:
            message = f"{type(observer).__name__} failed: {type(error).__name__}: {error}"
            warnings.warn(message, stacklevel=2)


def tracker_settings(output_dir: Path, resumed: int | None) -> dict[str, dict[str, Any]]:
    """Return the settings by which each tracker recognises a run, and finds it again when it is resumed.

    status.json keeps the run's id. A new run in the directory of an old one gets a new id. The id is part of the name in
    trackio, which finds a run by its name: names of directories are not unique. TensorBoard finds a run by its folder, and
    drops what a killed run has logged after the step that is `resumed`.
    """
    known = status.read_status(output_dir).get("run") if resumed is not None else None
    number = known or uuid.uuid4().hex[:8]
    status.update_status(output_dir, run=number)
    name = output_dir.resolve().name
    trackio = {"name": f"{name}-{number}", "resume": "allow" if known else "never"}
    tensorboard = {} if resumed is None else {"purge_step": resumed + 1}
    return {"wandb": {"name": name, "id": number, "resume": "allow"}, "trackio": trackio, "tensorboard": tensorboard}


@dataclass
class Agenda:
    """Does what is due before the first step and after each step; call its methods on every rank.

    A step number is the number of completed optimizer steps. `evaluate_fn(step)` is called before training, after
    training and every `eval_steps`. `data_state_fn()` returns what a checkpoint needs, besides the step, about this
    rank's data.

    Make an Agenda when training begins: from then on, a signal makes the run save a checkpoint and stop.
    """

    checkpointer: "Checkpointer"
    total_steps: int
    flops: Flops | None
    evaluate_fn: EvaluateFn
    data_state_fn: Callable[[], dict]
    log: MetricsLog = field(init=False)
    step: int = 0  # completed
    wants_save: bool = False
    begun_at: int = 0  # steps completed when this run began
    trained_at: int = 0  # steps completed at the last log line with a target, or with the last step that was left out
    step_timeout: float | None = None  # seconds; known after the first step
    stopped: stop.Stopped | None = None  # set once a rank was asked to stop

    def __post_init__(self):
        self.args, self.accelerator = self.checkpointer.args, self.checkpointer.accelerator
        self.output_dir = Path(self.args.output_dir)
        if self.accelerator.is_main_process:
            self.output_dir.mkdir(parents=True, exist_ok=True)
        # Not earlier: before there is something to save, a signal should end the process at once, even while it waits.
        stop.listen(self.output_dir)
        # The initial weights, equal on all ranks, are made; from here on each rank draws its own dropout.
        set_seed(self.args.seed, device_specific=True)

    def begin(self) -> int:
        """Restore the checkpoint to resume, and evaluate the model before the first step.

        Returns:
            The number of steps that are completed.

        Raises:
            ConfigError: for a checkpoint beyond the last step, and if the evaluation does not measure
                --metric_for_best_model.
        """
        args, checkpoint = self.args, self.checkpointer.resumed_from
        if checkpoint:
            check_not_beyond(checkpoint, self.total_steps)
        self.step = self.begun_at = self.trained_at = self.checkpointer.resume()
        saved_args = self.output_dir / "args.yaml"
        is_done = 0 < self.step == self.total_steps
        if self.accelerator.is_main_process:
            if is_done:
                print(
                    f"All {self.step} steps are done: nothing is trained, only the export is written again; for another "
                    "run, give another --output_dir"
                )
            if not (is_done and saved_args.exists()):  # the arguments of a finished run are those that trained it
                self.args.save(saved_args)
        targets = "labels" if args.has_new_layer else "tokens"
        self.log = MetricsLog(self.accelerator, self.output_dir, self.total_steps, self.flops, self.step, targets)
        self.log.restore(checkpoint)
        if args.trackers:
            # TensorBoard accepts only numbers and strings.
            config = {
                name: value if isinstance(value, int | float | str) else str(value)
                for name, value in args.values().items()
            }
            # The tracker's project is named after the script, the run after its output directory.
            resumed = self.step if checkpoint else None
            settings = tracker_settings(self.output_dir, resumed) if self.accelerator.is_main_process else {}
            self.accelerator.init_trackers(Path(sys.argv[0]).stem, init_kwargs=settings)
            for tracker in self.accelerator.trackers:
                if not (checkpoint and tracker.name == "tensorboard"):  # it would show another run for each attempt
                    tracker.store_init_configuration(config)
        if self.accelerator.is_main_process:
            newest = str(self.checkpointer.newest or "")
            status.update_status(self.output_dir, state="running", step=self.step, checkpoint=newest, reason="")
        # An evaluation is due before the first step. After a resume it may be due again: skip it if it is in the log.
        if self.evaluation_is_due and not self.log.has_evaluation(self.step):
            self.evaluate()
            forget_evaluated_shapes()
        best = args.metric_for_best_model
        eval_names = {name for record in self.log.records for name in record if name.startswith("eval_")}
        measured = {name.removeprefix("eval_") for name in eval_names}
        if best and best not in measured:
            known = ", ".join(sorted(measured))
            raise ConfigError(f"--metric_for_best_model {best}: the evaluation gives {known}; choose one of them")
        tell(Observer.began, self.step)
        self.last_save = time.perf_counter()
        return self.step

    def evaluate(self) -> None:
        self.log.log_evaluation(self.step, self.evaluate_fn(self.step))
        tell(Observer.evaluated, self.log.records)

    def expect(self, what: str, progress: Callable[[], int | None] | None = None) -> None:
        """Tell the watch what this rank does next. The first step has more time: it may compile, and start workers."""
        watch.expect(what, self.step_timeout or self.args.ddp_timeout, progress)

    def save_is_overdue(self) -> bool:
        """Tell whether --save_minutes have passed since the last save. The clock of rank 0 decides."""
        return is_first() and 0 < 60 * self.args.save_minutes < time.perf_counter() - self.last_save

    def completed(self, step: int, seconds: float, *, wants_save: bool, wants_stop: bool) -> None:
        """Record a completed step, its duration, and whether a rank wants a checkpoint.

        With `wants_stop`, a rank was asked to stop: the caller still logs and saves before the run ends.
        """
        self.step, self.wants_save = step, wants_save
        stop.step_took(seconds)
        if self.step_timeout is None:
            self.step_timeout = max(self.args.step_timeout, 4 * seconds)
        self.log.completed(step)
        tell(Observer.completed, step)
        watch.expect(f"what follows step {step}", self.args.ddp_timeout)
        self.stopped = stop.Stopped(stop.reason()) if wants_stop else None

    @property
    def log_is_due(self) -> bool:
        return self.ends or self.step % self.args.logging_steps == 0

    @property
    def evaluation_is_due(self) -> bool:
        eval_steps = self.args.eval_steps
        return self.step in (0, self.total_steps) or (eval_steps > 0 and self.step % eval_steps == 0)

    @property
    def save_is_due(self) -> bool:
        save_steps = self.args.save_steps
        return self.wants_save or self.ends or (save_steps > 0 and self.step % save_steps == 0)

    @property
    def ends(self) -> bool:
        return self.stopped is not None or self.step == self.total_steps

    @property
    def something_is_due(self) -> bool:
        return self.log_is_due or self.evaluation_is_due or self.save_is_due

    def log_window(self, window: Window, grad_norm: float, learning_rate: float, values: dict[str, float]) -> None:
        """Log the steps of the window in one line, with the additional `values`.

        Raises:
            DataError: if the last MOST_IDLE steps, or all steps of a shorter run, had no target.
        """
        if window.num_targets:
            self.trained_at = self.step
        elif self.step - self.trained_at >= min(MOST_IDLE, self.total_steps - self.begun_at):
            raise DataError(
                f"no row of the steps {self.trained_at + 1} to {self.step} has a target of the loss: all are masked, empty "
                f"or broken; look at the first rows in {self.output_dir}, and mend the data"
            )
        device = self.accelerator.device
        gib = max_over_ranks(peak_memory_gib(device), device)
        self.log.log_step(self.step, window, grad_norm, learning_rate, gib, values)

    def evaluate_and_save(self) -> None:
        """Compare the replicas, evaluate and save if due, after a step and its log line.

        Raises:
            Stopped: if a rank was asked to stop, also during the evaluation; a checkpoint is saved before.
            ReplicaError: if the replicas differ; no checkpoint is saved then.
        """
        every = self.args.verify_replicas
        if every and self.step % every == 0:
            check_replicas(self.checkpointer, self.step)
        if not self.stopped and self.evaluation_is_due:
            # A whole evaluation may take hours, so the time limit of a collective holds for each batch.
            limit = self.args.ddp_timeout
            watch.expect(f"the evaluation after step {self.step}", limit, stop.evaluated_batches)
            try:
                self.evaluate()
            except stop.Stopped as error:
                self.stopped = error
            watch.expect(f"what follows step {self.step}", limit)
        if self.save_is_due:
            if every:
                check_replicas(self.checkpointer, self.step)
            self.checkpointer.save(self.step, self.data_state_fn())
            self.last_save = time.perf_counter()
        if self.ends:
            tell(Observer.ended, self.step)
            self.checkpointer.wait()
        if self.stopped:
            self.accelerator.end_training()
            raise self.stopped

    def end(self) -> list[dict]:
        """Close the log; return the records of metrics.jsonl, including those of earlier parts of the run."""
        watch.expect("what follows training", float("inf"))
        self.log.progress.close()
        return self.log.records
