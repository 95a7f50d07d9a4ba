"""Prompts of decisions, as `transformers` renders them when a model is served, and the rows that are made of them."""

import copy
import itertools
import json
import string
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import transformers
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.decision import DecisionConfig, label_token_ids
from transformers.decision.template_utils import MARK, SPLIT

from accelerate_recipes.conversations.chats import texts_in
from accelerate_recipes.conversations.dates import frozen_date
from accelerate_recipes.conversations.packed import cut, packed
from accelerate_recipes.conversations.trained_rows import USES, ReadRows, content_of_sides
from accelerate_recipes.data.control_tokens import Controls
from accelerate_recipes.data.files import text_hash
from accelerate_recipes.data.passes import map_rows, rows_in
from accelerate_recipes.decisions import rows
from accelerate_recipes.decisions.loss import Question, collate
from accelerate_recipes.decisions.rows import NUMBER, Labels, read_decisions, request_of, shares_of
from accelerate_recipes.errors import ConfigError, DataError, one_line, that_apply
from accelerate_recipes.hub import cache as hub
from accelerate_recipes.models import IGNORE_INDEX
from accelerate_recipes.models.composites import is_composite
from accelerate_recipes.models.pretrained import check_length, load_config
from accelerate_recipes.models.processors import load_image_tokenizer, load_processor
from accelerate_recipes.ranks import local_main_process_first
from accelerate_recipes.run import Run

LETTERS = string.ascii_uppercase
ASKED = "questions"
DOCUMENTS = datasets.Features({
    "input_ids": datasets.List(datasets.Value("int32")),
    "labels": datasets.List(datasets.Value("int64")),
    ASKED: datasets.Value("string"),  # fields of each `Question`, as JSON
})  # fmt: skip
ids_of_labels = cache(label_token_ids)
PROBE = {"state": "state", "questions": {"probe": {"type": "noul", "instructions": "?"}}}


def prepare_decisions(
    run: Run[Any], tokenizer: PreTrainedTokenizerBase
) -> tuple[ReadRows, DecisionConfig, list[dict[str, Any]]]:
    """Read rows, render and tokenise their prompts, pack these, and say what the template does to them.

    Returns:
        The rows as the model reads them; the settings with which they are served; and the held-out rows as they are asked.

    Raises:
        ConfigError: for a base or a template that cannot decide, and for rows of no form.
        DataError: names the first row that cannot be used.
    """
    args, name = run.args, run.args.model_name_or_path
    config = DecisionConfig.from_pretrained(args.decision_config or hub.folder("model", name) or name)
    for line in check_template(name, config, tokenizer):
        run.print(line)
    writing = copy.copy(tokenizer)
    writing.chat_template = config.chat_template or tokenizer.chat_template
    args.settle_date(writing)
    if args.template_date:
        run.print(f"The template writes the date: {args.template_date} here, that of each request when it is served")
    sides, labels = local_main_process_first(lambda: read_decisions(args))
    names, made, most = label_names(tokenizer), {}, 0
    readers = [tokenizer, *processor_of(name)]
    for side, table in sides.items():
        source, settled = args.origins[side] or args.source, with_labels(config, names)
        how = Rendering(settled, readers, labels, table.features, source, args.max_length, args.template_date)
        code, desc = (sys.modules[__name__], rows), f"Rendering prompts to {USES[side]} on"
        documents = local_main_process_first(
            partial(map_rows, table, partial(rendered, how=how), DOCUMENTS, code, desc=desc)
        )
        if not len(documents):
            raise ConfigError(f"none of {len(table):,} rows to {USES[side]} on has an answer that is not null")
        asked = ((one["row"], len(one["options"])) for text in documents[ASKED] for one in json.loads(text))
        answered, sizes = zip(*asked, strict=True)
        if unanswered := len(table) - len({*answered}):
            run.print(f"{unanswered:,} of {len(table):,} rows to {USES[side]} on have no answer, and are left out")
        whole = packed(documents, args.max_length, "bfd", args.seed) if args.packing else cut(documents)
        made[side] = replace(whole, are_apart=True, columns=[ASKED])
        most = max(most, *sizes)
    length = args.max_length if args.packing else 0
    check_length(name, length or int(max(packs.lengths.max() for packs in made.values())))
    in_batches, content = partial(collate, tokenizer.pad_token_id, length), content_of_sides(run, *made.values())
    requests = [request_of(row, sides["test"].features, labels)[0] for row in sides["test"]]
    return (
        ReadRows(run, made["train"], made["test"], in_batches, content),
        with_labels(config, names[:most]) if most > len(LETTERS) else config,
        requests,
    )


def check_template(name: str, config: DecisionConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Check how a base and its template ask for a decision; yield what one should know.

    Raises:
        ConfigError: for a base that decides by another head or by an adapter, and for a template that asks for no answer.
    """
    remedy, folder = "give --decision_config, a folder with a decision_template.jinja", hub.folder("model", name)
    heads = [kind for kind in load_config(name).architectures or () if kind.endswith("ForDecision")]
    if heads or (folder and (folder / "decision_config.json").is_file()):
        raise ConfigError(f"{name} decides by a head of its own, not by the labels of options; give a language model")
    if config.adapter:
        raise ConfigError(f"decision.json names the adapter {config.adapter}: give the merged model, without it")
    template = tokenizer.chat_template
    if not config.chat_template and not template:
        raise ConfigError(f"{name} has no chat template and no decision_template.jinja; {remedy}")
    try:
        config.prepare_inputs(PROBE, serving_copy(tokenizer))
    except (TemplateError, ValueError, TypeError) as error:
        raise ConfigError(f"the template of {name} cannot ask for a decision ({one_line(error)}); {remedy}") from None
    if config.chat_template:
        return
    user, told = [{"role": "user", "content": "state"}], {"tokenize": False, "enable_thinking": False}
    before, whole = (tokenizer.apply_chat_template(user, add_generation_prompt=ask, **told) for ask in (False, True))
    if before == whole:
        raise ConfigError(f"the chat template of {name} begins no answer: it has no generation prompt; {remedy}")
    opens = {"a thought": whole.rstrip().endswith("<think>")}
    opens["a channel"] = "<|channel|>" in template and "<|channel|>" not in whole
    for what in that_apply(opens):
        yield f"An answer of {name} begins with {what}: the labels of options are trained in its place"


@cache
def serving_copy(tokenizer: Any) -> Any:
    """Copy a tokenizer or processor for `prepare_inputs`, which adds two tokens and always asks for the whole vocabulary."""
    copied = copy.deepcopy(tokenizer)
    inner = getattr(copied, "tokenizer", copied)
    inner.add_tokens([transformers.AddedToken(token, special=True, normalized=False) for token in (MARK, SPLIT)])
    vocabulary = inner.get_vocab()
    inner.get_vocab = lambda: vocabulary
    return copied


def processor_of(name: str) -> list[ProcessorMixin]:
    """Load the processor by which a composite checkpoint is served; none for others."""
    folder, files = hub.folder("model", name), ("preprocessor_config.json", "processor_config.json")
    has_files = folder and any((folder / file).is_file() for file in files) and is_composite(load_config(name))
    return [load_processor(name, load_image_tokenizer(name))] if has_files else []


def label_names(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """List A to Z, and of AA, AB, ... those that are one token of a tokenizer."""
    pairs, unknown = ["".join(pair) for pair in itertools.product(LETTERS, repeat=2)], [tokenizer.unk_token_id]
    ids: Any = tokenizer(pairs, add_special_tokens=False)["input_ids"]
    return [*LETTERS, *(pair for pair, own in zip(pairs, ids, strict=True) if len(own) == 1 and own != unknown)]


def with_labels(config: DecisionConfig, names: list[str]) -> DecisionConfig:
    """Set the labels of options, unless the settings have their own."""
    return replace(config, labels=dict.fromkeys(("choice", "score"), names) | config.labels)


class Rendering(NamedTuple):
    """Settings by which the rows of a side become prompts."""

    config: DecisionConfig
    readers: Sequence[Any]  # the tokenizer, and the processor if the model is served by one
    labels: Labels | None
    features: datasets.Features
    source: str
    longest: int  # tokens of a prompt
    date: str


def rendered(table: pa.Table, first: int, how: Rendering) -> pa.Table:
    """Render the prompts of rows as DOCUMENTS, with the most probable label at each token that is read.

    `first` is the number of the first row on its side.

    Raises:
        DataError: names the first row that cannot be used.
    """
    documents = []
    with frozen_date(how.date):
        for row, item in enumerate(rows_in(table, how.features), first):
            try:
                request, answers = request_of(item, how.features, how.labels)
                if answers:
                    documents += documents_of(row, request, answers, how)
            except (TemplateError, TypeError, ValueError) as error:
                raise DataError(f"{how.source}, row {item[NUMBER] + 1}: {error}") from error
    return pa.Table.from_pylist(documents, schema=DOCUMENTS.arrow_schema)


def documents_of(row: int, request: dict, answers: dict, how: Rendering) -> Iterator[dict[str, Any]]:
    """Render a request as one prompt for each question that has an answer, or as one for all of them.

    Raises:
        ValueError: for a request that cannot be used, and for what is no answer.
    """
    config, readers = how.config, how.readers
    controls = () if config.sanitize_control_tokens else map(Controls(readers[0], ()).first_in, texts_in(request))
    if control := next(filter(None, controls), ""):
        raise ValueError(f"it holds {control!r}, which the template does not escape (sanitize_control_tokens is false)")
    state = text_hash(json.dumps(request["state"], ensure_ascii=False))
    made = [config.prepare_inputs(request, serving_copy(reader)) for reader in readers]
    for (inputs, asked), *others in zip(*made, strict=True):
        ids, marks = inputs["input_ids"][0].tolist(), inputs["marks"].tolist()
        if any(other["input_ids"][0].tolist() != ids for other, _ in others):
            raise ValueError("the processor, by which the model is served, reads it otherwise than the tokenizer")
        if len(ids) > how.longest:
            raise ValueError(f"a prompt has {len(ids):,} tokens, and none is cut; raise --max_length {how.longest}")
        if len({*marks} - {0}) != len(asked):
            raise ValueError(f"the template marks {len({*marks} - {0})} places to read for {len(asked)} questions")
        labels, questions = [IGNORE_INDEX] * len(ids), []
        for mark, question in zip(marks, asked, strict=True):  # marks ascend
            name, label_ids = question.name, ids_of_labels(serving_copy(readers[0]), tuple(question.labels))
            if name in answers:
                target = shares_of(question, answers[name])
                labels[mark - 1] = label_ids[int(np.argmax(target))]
                questions.append(asdict(Question(row, state, name, question.type, question.options, label_ids, target)))
        if questions:
            yield {"input_ids": ids, "labels": labels, ASKED: json.dumps(questions)}
