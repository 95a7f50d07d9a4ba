"""Pairs of DPO as the model reads them: tokenised, counted, and compared with the export's rendering."""

import itertools
import json
import sys
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase

from accelerate_recipes.conversations.dates import frozen_date
from accelerate_recipes.conversations.exported import NUM_COMPARED, Exported, render, shown_ends
from accelerate_recipes.conversations.formats import PAIR
from accelerate_recipes.conversations.packed import NUM_LAST
from accelerate_recipes.conversations.preferences import DPOArgs, PairLoss
from accelerate_recipes.conversations.rendering import Rendering, render_read, shared_length, texts_read
from accelerate_recipes.conversations.settings import check_documents
from accelerate_recipes.conversations.trained_rows import (
    USES,
    ReadRows,
    check_rows_are_left,
    compare_with_rendering,
    content_of_sides,
    cut_at,
    tokenized_rows,
)
from accelerate_recipes.data.passes import rows_in
from accelerate_recipes.data.prepared import chunks_of, lengths_of
from accelerate_recipes.data.reading import without_nulls
from accelerate_recipes.data.template_values import SETTINGS, in_texts
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.models.pretrained import load_config
from accelerate_recipes.ranks import on_first_rank
from accelerate_recipes.run import Run

# Columns that `tokenized` adds.
TOKENS = dict.fromkeys((f"{name}_ids" for name in ("prompt", *PAIR)), datasets.List(datasets.Value("int64")))


def prepare_preferences(
    run: Run[Any], loss: PairLoss, pairs: dict[str, datasets.Dataset], tokenizer: PreTrainedTokenizerBase
) -> ReadRows:
    """Tokenise the pairs of both sides; leave out those without room for an answer, and those whose answers are the same.

    Raises:
        ConfigError: for rows that cannot be rendered, if no pair of a side is left, and if one is too long for the model.
    """
    args, prepared = loss.args, {}
    for side, given in pairs.items():
        rows = tokenized_rows(run, given, tokenized, TOKENS, tokenizer, f"Tokenizing pairs to {USES[side]} on")
        if args.truncation_mode == "keep_start":
            rows = chosen_rows(rows, lengths_of(rows, "prompt_ids") < args.max_length)
        prepared[side] = without_same(run, rows, args, USES[side])
    check_rows_are_left(pairs, prepared, args.max_length)
    lengths = ([lengths_of(rows, f"{name}_ids") for name in ("prompt", *PAIR)] for rows in prepared.values())
    documents = [prompts + np.maximum(*answers) for prompts, *answers in lengths]
    check_documents(args, args.base_model, load_config(args.base_model), *documents)
    train, heldout = prepared["train"], prepared["test"]
    rows = train
    # Earlier versions computed it later, when the values of a reference had replaced the rows that were left out.
    if rows._indices is not None and args.precompute_ref_log_probs and not run.args.data_only:
        rows = rows.flatten_indices()
    collate, content = loss.collator(tokenizer.pad_token_id), content_of_sides(run, rows, heldout)
    return ReadRows(run, train, heldout, collate, content)


def chosen_rows(rows: datasets.Dataset, is_chosen: np.ndarray) -> datasets.Dataset:
    """Return some of the rows of a table, as numbers of rows: a checksum of rows is of the table and of these numbers."""
    numbers = pa.table({"indices": pa.array(np.flatnonzero(is_chosen), pa.uint64())})
    return datasets.Dataset(rows.data, indices_table=InMemoryTable(numbers))


def tokenized(table: pa.Table, first: int, tokenizer: PreTrainedTokenizerBase, date: str) -> pa.Table:
    """Tokenise pairs. Return their columns and those of TOKENS; texts are returned as they are read.

    An answer begins where the tokens of the prompt alone, and with either answer, part.
    """
    rows = rows_in(table)
    asked = [{name: row[name] for name in ("prompt", *SETTINGS) if name in row} for row in rows]
    answered = {side: [own | {"completion": row[side]} for own, row in zip(asked, rows, strict=True)] for side in PAIR}
    with frozen_date(date):
        alone, *whole = (
            [made[0].ids for made in render_read(given, tokenizer)] for given in (asked, *answered.values())
        )
    columns = dict(zip(table.column_names, table.columns, strict=True))
    if isinstance(rows[0]["prompt"], str):
        read = {side: texts_read(given, tokenizer, "") for side, given in answered.items()}
        columns |= {side: [texts["completion"] for texts in given] for side, given in read.items()}
        columns["prompt"] = [texts["prompt"] for texts in read["chosen"]]
    begins = [min(shared_length(prompt, ids) for ids in both) for prompt, *both in zip(alone, *whole, strict=True)]
    columns["prompt_ids"] = [ids[:begin] for ids, begin in zip(alone, begins, strict=True)]
    for side, ids_of_rows in zip(PAIR, whole, strict=True):
        columns[f"{side}_ids"] = [ids[begin:] for ids, begin in zip(ids_of_rows, begins, strict=True)]
    return pa.table(columns)


def without_same(run: Run[Any], pairs: datasets.Dataset, args: DPOArgs, name: str) -> datasets.Dataset:
    """Leave out the pairs whose answers are the same tokens, and say how many there are.

    Raises:
        ConfigError: if no pair is left.
    """
    longest = args.max_length if args.truncation_mode == "keep_start" else None
    numbers = same_answers(pairs, longest)
    if not len(numbers):
        return pairs
    problem = f"In {len(numbers):,} of {len(pairs):,} pairs to {name} on"
    first = json.dumps(without_nulls({side: pairs[int(numbers[0])][side] for side in PAIR}), ensure_ascii=False)
    problem += f", both answers are the same tokens, within --max_length {args.max_length}; the first: {first:.300}"
    if len(numbers) == len(pairs):
        raise ConfigError(
            f"{problem}. No pair is left: raise --max_length, or give a chat template that writes in what they differ"
        )
    run.print(f"{problem}. They are left out")
    return pairs.select(np.setdiff1d(np.arange(len(pairs)), numbers))


def same_answers(pairs: datasets.Dataset, max_length: int | None) -> np.ndarray:
    """List the tokenised pairs whose answers are the same tokens, of a prompt and an answer the first `max_length`."""
    numbers, start = [], 0
    columns = (chunks_of(pairs, f"{name}_ids") for name in ("prompt", "chosen", "rejected"))
    for (prompts, _), (better, chosen), (worse, rejected) in zip(*columns, strict=True):
        rooms = np.maximum(max_length - prompts, 0) if max_length else np.maximum(better, worse)
        begins = zip(better.cumsum() - better, worse.cumsum() - worse, strict=True)
        kept = zip(np.minimum(better, rooms), np.minimum(worse, rooms), strict=True)
        for number, ((a, b), (length, other)) in enumerate(zip(begins, kept, strict=True), start):
            if length == other and np.array_equal(chosen[a : a + length], rejected[b : b + length]):
                numbers.append(number)
        start += len(prompts)
    return np.array(numbers, dtype=int)


def count_pairs(args: DPOArgs, pairs: datasets.Dataset) -> tuple[np.ndarray, dict[str, int]]:
    """Count the targets of each pair, and what is cut of all pairs."""
    prompts, *answers = (lengths_of(pairs, f"{name}_ids") for name in ("prompt", *PAIR))
    longest = args.max_length or sys.maxsize
    room = longest - prompts if args.truncation_mode == "keep_start" else longest
    num_targets = np.sum([np.minimum(number, room) for number in answers], axis=0)
    counts = cut_at(np.concatenate([prompts + number for number in answers]), longest)
    counts["cut"] = int((prompts + np.maximum(*answers) > longest).sum())  # pairs, not answers
    return num_targets, counts


def compare_pairs(run: Run[Any], args: DPOArgs, exported: Exported, pairs: datasets.Dataset) -> int:
    """Compare the first pairs with how the export will render them; return how many chosen answers have an end.

    `args` are those of a PairLoss.

    Raises:
        ConfigError: if they differ, and if the model would not learn to stop.
    """
    ends = [exported.stops & {*kept_answer(args, pair)[-NUM_LAST:]} for pair in pairs]
    if not any(ends):
        last = exported.tokenizer.decode(kept_answer(args, pairs[0])[-2:])
        stops = shown_ends(exported.tokenizer, sorted(exported.stops))
        raise ConfigError(
            f"no chosen answer has an end at which the model would stop: generation stops at {stops}, the first answer "
            f"ends with {last!r}; raise --max_length, mend the chat template, or name its end in the model's "
            "generation_args.json (eos_token_id)"
        )
    first = [pairs[i] for i in range(min(NUM_COMPARED, len(pairs)))]
    on_first_rank(lambda: compare_first_pairs(run, first, exported, set().union(*ends)))
    return sum(map(bool, ends))


def kept_answer(args: DPOArgs, pair: dict) -> list[int]:
    """Return the tokens of the chosen answer that fit into --max_length."""
    longest = args.max_length
    if longest is None or args.truncation_mode != "keep_start":
        return pair["chosen_ids"]
    return pair["chosen_ids"][: longest - len(pair["prompt_ids"])]


def compare_first_pairs(run: Run[Any], pairs: list[dict], exported: Exported, ends: set[int]) -> None:
    """Compare pairs with their rendering by the export, and tell of prompts that trl reads without their end."""
    prompts = [in_texts({name: pair[name] for name in ("prompt", *SETTINGS) if pair.get(name)}) for pair in pairs]
    rows, trained = [], []
    for (pair, prompt), side in itertools.product(zip(pairs, prompts, strict=True), PAIR):
        ids = pair["prompt_ids"] + pair[f"{side}_ids"]
        rows.append(in_texts(prompt | {"completion": pair[side]}))
        trained.append(Rendering(ids, [True] * len(ids)))
    compare_with_rendering(run, exported, rows, trained, ends)
    with frozen_date(run.args.template_date):
        asked = [render(prompt, exported.tokenizer)[0].ids for prompt in prompts]
    lost = [ids[len(pair["prompt_ids"]) :] for pair, ids in zip(pairs, asked, strict=True)]
    lost = [ids for ids in lost if ids]
    if lost:
        run.print(
            f"In {len(lost)} of the first {len(pairs)} pairs trl reads the prompt without its end "
            f"{exported.tokenizer.decode(lost[0])!r}: the template renders the prompt differently alone and with its "
            "answer, so trl counts this end as part of the answer"
        )
