"""Order of the rows of DPO and GRPO, in whole optimizer steps: trl's losses need micro-batches of one size."""

from accelerate_recipes.conversations.settings import TrainerArgs
from accelerate_recipes.data.rows import StepOrder, rows_of_step
from accelerate_recipes.errors import ConfigError


class WholeSteps(StepOrder):
    """StepOrder without the last rows of the run if they do not fill a step. In GRPO, its rows are the answers to prompts.

    A drawn answer is used for --num_iterations steps.
    """

    # trl's losses gather one value for each row of a micro-batch, so all micro-batches must have the same size.

    def rows(self, step: int) -> list[int]:
        # GRPO: the next prompts come after --num_iterations steps; a prompt stands in the list once for each answer to it.
        args = self.args
        answers = args.num_generations  # 1 without GRPO, as is num_iterations
        prompts = args.total_batch_size // answers
        rows = rows_of_step(step // args.num_iterations, prompts, self.num_rows, args.seed, self.end)
        return [] if -1 in rows else [row for row in rows for _ in range(answers)]


def num_whole_steps(args: TrainerArgs, num_rows: int) -> int:
    """Return the number of optimizer steps of a run in the order of WholeSteps.

    Raises:
        ConfigError: if it would be 0.
    """
    if args.max_steps > 0:
        return args.max_steps
    rows_a_step, num_trained = args.total_batch_size // args.num_generations, round(args.num_train_epochs * num_rows)
    if num_trained < rows_a_step:
        raise ConfigError(
            f"--num_train_epochs {args.num_train_epochs} of {num_rows:,} rows are {num_trained:,}, which do not fill a step "
            f"of {rows_a_step}; raise it, give --max_steps, or lower --total_batch_size"
        )
    return num_trained // rows_a_step * args.num_iterations
