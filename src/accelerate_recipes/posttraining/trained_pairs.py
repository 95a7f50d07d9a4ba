"""Pairs of DPO as the model reads them: tokenised by trl, counted, and compared with the export's rendering."""

import itertools
import json
import sys
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase
from trl import DPOConfig, DPOTrainer

from accelerate_recipes.checkpoint.check_export import Exported, as_exported
from accelerate_recipes.data.conversations import NUM_COMPARED, NUM_LAST, cut_at
from accelerate_recipes.data.dates import frozen_date, with_date_as_key
from accelerate_recipes.data.formats import PAIR
from accelerate_recipes.data.prepared import lengths_of
from accelerate_recipes.data.rendering import SETTINGS, Rendering, render, shown_ends, without_nulls
from accelerate_recipes.data.unwritten import same_answers
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.posttraining.preferences import PairTrainer
from accelerate_recipes.posttraining.settings import refused_by_trl
from accelerate_recipes.posttraining.trained_rows import (
    AS_IT_STANDS,
    ReadRows,
    check_rows_are_left,
    compare_with_rendering,
    content_of_sides,
    naming_rows,
)
from accelerate_recipes.ranks import on_first_rank
from accelerate_recipes.run import Run


def prepare_preferences(
    run: Run[Any], config: DPOConfig, pairs: dict[str, datasets.Dataset], tokenizer: PreTrainedTokenizerBase
) -> dict[str, datasets.Dataset]:
    """Tokenise the pairs of both sides by trl, and leave out those whose answers are the same tokens.

    Raises:
        ConfigError: for rows that cannot be rendered, and if no pair of a side is left.
    """
    # The cache key of `datasets` contains all values that a function holds. trl 1.16 gives its filter all arguments,
    # also those that differ between `prepare` and a run, or between two runs.
    needed: Any = {name: getattr(config, name) for name in ("dataset_num_proc", "max_length", "truncation_mode")}
    trl: Any = SimpleNamespace(_tokenizer=tokenizer)  # what trl's function reads of its trainer
    date, prepared = run.args.template_date, {}
    for side, given in pairs.items():
        name = "train" if side == "train" else "eval"
        rows = with_date_as_key(given, date)
        with refused_by_trl(), frozen_date(date), naming_rows(run.args, tokenizer):
            rows: Any = DPOTrainer._prepare_dataset(trl, rows, tokenizer, SimpleNamespace(**needed), name)
        prepared[side] = without_same(run, rows, config, name)
    check_rows_are_left(pairs, prepared, config.max_length)
    return prepared


def without_same(run: Run[Any], pairs: datasets.Dataset, config: DPOConfig, name: str) -> datasets.Dataset:
    """Leave out the pairs whose answers are the same tokens, and say how many there are.

    Raises:
        ConfigError: if no pair is left.
    """
    longest = config.max_length if config.truncation_mode == "keep_start" else None
    numbers = same_answers(pairs, longest)
    if not len(numbers):
        return pairs
    said = f"In {len(numbers):,} of {len(pairs):,} pairs to {'train' if name == 'train' else 'evaluate'} on"
    first = json.dumps(without_nulls({side: pairs[int(numbers[0])][side] for side in PAIR}), ensure_ascii=False)
    said += f", both answers are the same tokens, within --max_length {config.max_length}; the first: {first:.300}"
    if len(numbers) == len(pairs):
        raise ConfigError(
            f"{said}. No pair is left: raise --max_length, or give a chat template that writes in what they differ"
        )
    run.print(f"{said}. They are left out")
    return pairs.select(np.setdiff1d(np.arange(len(pairs)), numbers))


def read_pairs(trainer: PairTrainer, train: datasets.Dataset, heldout: datasets.Dataset | None = None) -> ReadRows:
    """Return tokenised pairs as rows of a run, with their checksum."""
    run, rows = trainer.run, train
    # Earlier versions computed it later, when the values of a reference had replaced the rows that were left out.
    if rows._indices is not None and run.args.precompute_ref_log_probs and not run.args.data_only:
        rows = rows.flatten_indices()
    return ReadRows(run, train, heldout, trainer.data_collator, content_of_sides(run, rows, heldout))


def count_pairs(config: DPOConfig, pairs: datasets.Dataset) -> tuple[np.ndarray, dict[str, int]]:
    """Count the targets of each pair, and what is cut of all pairs."""
    prompts, *answers = (lengths_of(pairs, f"{name}_ids") for name in ("prompt", *PAIR))
    longest = config.max_length or sys.maxsize
    room = longest - prompts if config.truncation_mode == "keep_start" else longest
    num_targets = np.sum([np.minimum(number, room) for number in answers], axis=0)
    counts = cut_at(np.concatenate([prompts + number for number in answers]), longest)
    counts["cut"] = int((prompts + np.maximum(*answers) > longest).sum())  # pairs, not answers
    return num_targets, counts


def compare_pairs(trainer: PairTrainer, pairs: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> int:
    """Compare the first pairs with how the export will render them; return how many chosen answers have an end.

    Raises:
        ConfigError: if they differ, and if the model would not learn to stop.
    """
    config, exported = trainer.args, as_exported(trainer.model, tokenizer)
    found = [exported.stops & {*kept_answer(config, pair)[-NUM_LAST:]} for pair in pairs]
    if not any(found):
        last = exported.tokenizer.decode(kept_answer(config, pairs[0])[-2:])
        stops = shown_ends(exported.tokenizer, sorted(exported.stops))
        raise ConfigError(
            f"no chosen answer has an end at which the model would stop: generation stops at {stops}, the first answer "
            f"ends with {last!r}; raise --max_length, mend the chat template, or name its end in the model's "
            "generation_config.json (eos_token_id)"
        )
    first = [pairs[i] for i in range(min(NUM_COMPARED, len(pairs)))]
    on_first_rank(lambda: compare_first_pairs(trainer, first, exported, set().union(*found)))
    return sum(map(bool, found))


def kept_answer(config: DPOConfig, pair: dict) -> list[int]:
    """Return the tokens of the chosen answer that fit into --max_length."""
    longest = config.max_length
    if longest is None or config.truncation_mode != "keep_start":
        return pair["chosen_ids"]
    return pair["chosen_ids"][: longest - len(pair["prompt_ids"])]


def compare_first_pairs(trainer: PairTrainer, pairs: list[dict], exported: Exported, ends: set[int]) -> None:
    """Compare pairs with their rendering by the export, and tell of prompts that trl reads without their end."""
    # As JSON texts, which hold only the nulls that the user wrote.
    settings = [{name: json.dumps(pair[name]) for name in SETTINGS if pair.get(name)} for pair in pairs]
    prompts = [{"prompt": pair["prompt"]} | own for pair, own in zip(pairs, settings, strict=True)]
    rows, trained = [], []
    for (pair, prompt), side in itertools.product(zip(pairs, prompts, strict=True), PAIR):
        ids = pair["prompt_ids"] + pair[f"{side}_ids"]
        rows.append(prompt | {"completion": pair[side]})
        trained.append(Rendering(ids, [True] * len(ids)))
    run = trainer.run
    compare_with_rendering(run, exported, trainer.base_stops, rows, trained, ends)
    with frozen_date(run.args.template_date):
        asked = [render(prompt, exported.tokenizer, **AS_IT_STANDS)[0].ids for prompt in prompts]
    lost = [ids[len(pair["prompt_ids"]) :] for pair, ids in zip(pairs, asked, strict=True)]
    lost = [ids for ids in lost if ids]
    if lost:
        run.print(
            f"In {len(lost)} of the first {len(pairs)} pairs trl reads the prompt without its end "
            f"{exported.tokenizer.decode(lost[0])!r}: the template renders the prompt differently alone and with its "
            "answer, so trl counts this end as part of the answer"
        )
