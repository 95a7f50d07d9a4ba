"""Rows of a distillation, and the answers that the student draws to their prompts, in training and in an evaluation."""

from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from accelerate_recipes.conversations.distillation import DIVERGENCES, DistillationLoss, mean_divergences
from accelerate_recipes.conversations.evaluation import HeldoutAnswers, draw_texts
from accelerate_recipes.conversations.exported import as_exported
from accelerate_recipes.conversations.messages import NUM_COMPARED
from accelerate_recipes.conversations.packed import cut
from accelerate_recipes.conversations.prompts import (
    compare_prompts,
    end_of_prompt,
    load_prompts,
    room_for_prompts,
    tokenize_prompts,
)
from accelerate_recipes.conversations.rewards import load_rewards, tell_of_rewards
from accelerate_recipes.conversations.settings import check_documents, stops_of_run
from accelerate_recipes.conversations.supervised import SupervisedRows, prepare_supervised
from accelerate_recipes.conversations.supervised_loss import make_collator
from accelerate_recipes.conversations.trained_rows import USES, content_of_sides, tell_of_prompts, without_targets
from accelerate_recipes.data.rows import Rows, make_eval_loader
from accelerate_recipes.engine import to_device
from accelerate_recipes.errors import ConfigError, that_apply
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.generation import KEPT, Sampling, tell_left_out
from accelerate_recipes.models.pretrained import load_config
from accelerate_recipes.models.weights import seed_of
from accelerate_recipes.ranks import local_main_process_first, on_all_data_ranks, on_first_rank
from accelerate_recipes.report.samples import Samples
from accelerate_recipes.run import Run


def begins_of_answers(rows: Any) -> np.ndarray:
    """Return where the last answer of each row begins, (rows,): its last targets in one piece; without targets, its end."""
    found = []
    for lengths, labels in rows.chunks("labels"):
        ends = lengths.cumsum()
        is_target = labels != IGNORE_INDEX
        opens = is_target & ~np.append(False, is_target[:-1])
        opens[ends - lengths] = is_target[ends - lengths]
        # The last one up to the end of each row; before the first token of all there is none.
        last = np.append(-1, np.flatnonzero(opens))[np.cumsum(opens)[ends - 1]]
        found.append(np.where(last < ends - lengths, lengths, last - ends + lengths))
    return np.concatenate(found)


def prepare_to_answer(
    run: Run[Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, base_stops: set[int]
) -> tuple[SupervisedRows, datasets.Dataset | None]:
    """Prepare rows with answers as SFT does, or prompts alone, without targets, as GRPO reads them.

    Returns:
        The rows, and for prompts alone the held-out ones as they are written, with their other columns.

    Raises:
        ConfigError: for prompts alone with --lmbda below 1, for rows with answers and arguments that are of prompts alone,
            and like `prepare_supervised` and `load_prompts`.
        DataError: like these.
    """
    args = run.args
    columns = {*args.read_rows()["train"].column_names}
    if args.columns or "prompt" not in columns or any({*form.needs} <= columns for form in args.forms):
        given = {"--rewards": args.rewards, "--chat_template_kwargs": args.chat_template_kwargs}
        if ignored := that_apply(given):
            raise ConfigError(f"{args.source} has answers, but {', '.join(ignored)} is for prompts alone; remove it")
        rows, teacher = prepare_supervised(run, model, tokenizer, base_stops), args.teacher_model_name_or_path
        check_documents(args, teacher, load_config(teacher), rows.train.lengths, rows.heldout.lengths)
        return rows, None
    if args.lmbda < 1:
        raise ConfigError(
            f"{args.source} has prompts, but no answers for the share that the student does not draw (--lmbda "
            f"{args.lmbda}); give --lmbda 1, or rows with answers"
        )
    sides, counts = local_main_process_first(lambda: load_prompts(args, tokenizer, model))
    tell_of_prompts(run, sides, tokenizer)
    ids = {side: tokenize_prompts(tokenizer, rows["prompt"][:], args) for side, rows in sides.items()}
    made = {side: cut(datasets.Dataset.from_list([answered(row, []) for row in rows])) for side, rows in ids.items()}
    ends, prompts = stops_of_run(model, tokenizer), sides["train"][:NUM_COMPARED]["prompt"]
    exported = as_exported(model, tokenizer, base_stops)
    on_first_rank(lambda: compare_prompts(run, exported, prompts, ids["train"], ends))
    rows = SupervisedRows(
        run,
        made["train"],
        made["test"],
        make_collator(args, tokenizer.pad_token_id),
        content_of_sides(run, made["train"], made["test"]),
        lambda rows: tokenizer.pad({"input_ids": [row["input_ids"] for row in rows]}, return_tensors="pt"),  # pyright: ignore
        sides=sides,
        num_targets=len(ids["train"]),
        counts=counts,
    )
    return rows, sides["test"]


class OwnAnswers:
    """Answers that the student draws, to the share --lmbda of the prompts of a step, and to held-out prompts.

    An answer depends on the weights, its prompt, and (seed, step, place among the answers of the step). `written` are the
    held-out prompts, if the rows hold prompts alone.

    Raises:
        ConfigError: for a row without a prompt, if the longest leaves no room for an answer, and for a reward that cannot be
            loaded.
    """

    def __init__(
        self,
        run: Run[Any],
        tokenizer: PreTrainedTokenizerBase,
        rows: SupervisedRows,
        model: PreTrainedModel,
        written: datasets.Dataset | None,
    ):
        self.run, self.tokenizer, self.rows = run, tokenizer, rows
        args = run.args
        of_both = (model.config, load_config(args.teacher_model_name_or_path))
        room = min(room_for_prompts(args, config) for config in of_both)
        self.begins = begins_of_answers(rows.train)
        tell_left_out(run.print, model, KEPT)
        heldout = rows.heldout.chosen(np.arange(len(rows.heldout))[: args.num_eval_prompts or None])
        begins = begins_of_answers(heldout)
        for side, found in (("train", self.begins), ("test", begins)):
            if not found.all():
                raise ConfigError(
                    f"row {found.argmin() + 1:,} of those to {USES[side]} on has no prompt before its targets, to which the "
                    f"student could draw an answer (--lmbda {args.lmbda}); give rows with prompts, and train their answers "
                    "alone, or give --lmbda 0"
                )
            if found.max() > room:
                raise ConfigError(
                    f"the longest prompt to {USES[side]} on has {found.max():,} tokens, and answers of "
                    f"{args.max_completion_length:,} tokens leave room for {room:,}; give --max_length {room} or less"
                )
        self.prompts = [row["input_ids"][:begin] for row, begin in zip(heldout, begins, strict=True)]
        if written is None:
            answers = [row["input_ids"][begin:] for row, begin in zip(heldout, begins, strict=True)]
            texts = {"prompt": self.prompts, "expected": answers}
            shown = datasets.Dataset.from_dict({name: tokenizer.batch_decode(ids) for name, ids in texts.items()})
            begin = ""
        else:
            shown = written.select(range(len(heldout)))
            begin = end_of_prompt(tokenizer, shown[0]["prompt"], args.template_settings)
        samples = Samples(run.output_dir, run.resumed_from) if run.is_first and not args.data_only else None
        rewards = load_rewards(args.rewards, shown.column_names, begin, tokenizer)
        tell_of_rewards(run, tokenizer, {"evaluate": shown}, rewards)
        self.heldout = HeldoutAnswers(run, tokenizer, shown, rewards, samples, self.prompts)

    def draw(self, step: int, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replace the share --lmbda of the answers of the step after `step` by answers that the student draws now."""
        run, args, train = self.run, self.run.args, self.rows.train
        order = np.random.default_rng([seed_of("own answers", args.seed), step])
        is_own = order.random(args.total_batch_size) < args.lmbda
        numbers = is_own.cumsum() - 1
        size = args.per_device_train_batch_size
        first = run.data_rank * size * len(batches)
        mine = dict(enumerate((row for batch in batches for row in batch["row"].tolist()), first))
        asked = {place: row for place, row in mine.items() if is_own[place] and row >= 0}
        of_all = {place: row for part in on_all_data_ranks(asked) for place, row in part.items()}
        if not of_all:
            return batches
        prompts = [train[row]["input_ids"][: self.begins[row]] for row in of_all.values()]
        seed = seed_of(f"answers of step {step}", args.seed)
        sampling = Sampling(args.temperature, seed, numbers[[*of_all]].tolist())
        drawn = draw_texts(run, self.tokenizer, prompts, sampling, may_stop=False)
        answers = {place: answered(*both) for place, *both in zip(of_all, prompts, drawn.ids, strict=True)}
        rows = [answers.get(place) or without_targets(train[row], row) for place, row in mine.items()]
        return [
            batch | to_device(self.rows.collate(rows[i * size : (i + 1) * size]), run.accelerator.device)
            for i, batch in enumerate(batches)
        ]

    def evaluate(self, loss: DistillationLoss, step: int) -> dict[str, float]:
        """Measure both divergences, rewards, and the mean length, of answers to the held-out prompts, drawn now.

        They are drawn with the same random numbers in each evaluation. The first ones go to samples.html.

        Raises:
            Stopped: between two batches.
            ConfigError: if a reward fails.
        """
        run, args = self.run, self.run.args
        drawn = draw_texts(run, self.tokenizer, self.prompts, Sampling(args.temperature, args.seed))
        rows = Rows([*map(answered, self.prompts, drawn.ids)], without_targets)
        loader = make_eval_loader(rows, args, run.data_rank, run.data_world_size, collate_fn=self.rows.collate)
        sums = loss.of_rows(run, loader)
        of_each = {name: (sums[:, i] / np.maximum(sums[:, 2], 1)).tolist() for i, name in enumerate(DIVERGENCES)}
        scored = on_first_rank(lambda: self.heldout.score(step, drawn, "held out, drawn", of_each))
        measured = mean_divergences(sums) | scored
        return {f"drawn_{name}": value for name, value in measured.items()}


def answered(prompt: list[int], answer: list[int]) -> dict[str, list[int]]:
    """Make a row of a prompt and an answer, whose tokens are the targets."""
    return {"input_ids": prompt + answer, "labels": [IGNORE_INDEX] * len(prompt) + answer}
