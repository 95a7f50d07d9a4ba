"""Exports as their users get them, by transformers alone: tokenizer, settings, and rows compared with what was trained."""

import json
import tempfile
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from accelerate_recipes.checkpoint.base_form import BaseForm
from accelerate_recipes.checkpoint.export import arguments_of
from accelerate_recipes.conversations.dates import frozen_date
from accelerate_recipes.conversations.rendering import Rendering, render_read, shared_length
from accelerate_recipes.data.reading import without_nulls
from accelerate_recipes.data.template_values import MESSAGES, SETTINGS, parsed, with_objects
from accelerate_recipes.disk import read_json, write_atomically
from accelerate_recipes.errors import ConfigError, DataError, raise_problems
from accelerate_recipes.models.tokenizers import stops_of

ROWS = "rows.json"  # in the output directory, beside export/
NUM_COMPARED = 16  # number of rows whose rendering is compared
NUM_SHOWN = 8  # tokens on each side of a difference


Render = Callable[..., list[Rendering]]


class Exported(NamedTuple):
    """Tokenizer and settings that are loaded with an export's weights. `config` is None for adapters, which have none."""

    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig | None
    stops: set[int]  # tokens at which generation stops
    base_stops: Set[int] = frozenset()  # likewise, by the settings of the base, as it is published
    render: Render | None = None  # renders a row with images, by the exported processor


def read_exported(folder: Path) -> Exported:
    """Read tokenizer and settings of an export, by transformers alone."""
    runs_no_code = {"trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, **runs_no_code) if (folder / "config.json").is_file() else None
    settings: Any = config
    if (folder / "generation_config.json").is_file():
        settings = GenerationConfig.from_pretrained(folder)
    return Exported(AutoTokenizer.from_pretrained(folder, **runs_no_code), config, stops_of(settings))


def as_exported(
    model: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase, base_stops: Set[int]
) -> Exported:
    """Return a model's tokenizer and settings as users of its export get them: saved, then loaded by transformers.

    Raises:
        ConfigError: for settings that cannot be saved.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            for artifact in (model.config, model.generation_config, BaseForm(model.config, tokenizer)):
                artifact.save_pretrained(folder)  # pyright: ignore[reportOptionalMemberAccess]
        except ConfigError:
            raise
        except ValueError as error:  # transformers refuses to save some settings that it loads
            raise ConfigError(f"the model's settings cannot be exported: {error}; mend its configuration") from error
        return read_exported(Path(folder))._replace(base_stops=base_stops)


def shown_ends(tokenizer: PreTrainedTokenizerBase, ends: Iterable[int]) -> str:
    """Return the tokens at which generation stops, in readable form."""
    return " or ".join(repr(tokenizer.decode([end])) for end in ends) or "nothing"


def render(row: dict, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> list[Rendering]:
    """Render a row, as it was written, as users of the exported tokenizer would, by transformers alone: `render_read`."""
    return render_read([read_of(row)], tokenizer, **settings)[0]


def read_of(row: dict) -> dict:
    """Return a row, as it was written, as a run reads it."""
    read = {name: value for name, value in row.items() if value is not None}
    read |= {name: with_objects(without_nulls(read[name])) for name in MESSAGES if name in read}
    return read | {name: parsed(without_nulls(row.get(name)), name, 0, "") for name in SETTINGS}


@dataclass
class TrainedRows:
    """First rows of a run, and how they were trained.

    `rows` holds the rows as they were written, `trained` as they were rendered with the `settings` of `render`. `ends` are
    the tokens that end rows. `arguments` are those arguments of the run that decide what it trains.
    """

    rows: list[dict]
    trained: list[Rendering]
    settings: dict[str, Any]
    ends: list[int]
    arguments: dict[str, Any]

    def problems(self, exported: Exported) -> list[str]:
        """List where an export differs from what was trained, one sentence each."""
        tokenizer, config, stops, *_ = exported
        with frozen_date(self.arguments.get("template_date")):
            problems = self.differences(exported)
        if lost := {*self.ends} - stops:
            last, known = (shown_ends(tokenizer, sorted(ends)) for ends in (lost, stops))
            remedy = "name that end in its generation_config.json (eos_token_id)"
            problems.append(f"rows end with {last}, where its generation would not stop: it stops at {known}; {remedy}")
        largest = max((token for ids, *_ in self.trained for token in ids), default=0)
        if config and largest >= (number := config.get_text_config().vocab_size):
            problems.append(f"rows have the token {largest}, its config.json a vocab_size of {number}")
        return problems

    def differences(self, exported: Exported) -> list[str]:
        """List where the rendering of an export differs from what was trained, one sentence for each row."""
        problems, ours, tokenizer = [], [], exported.tokenizer
        render_row = exported.render or partial(render, tokenizer=tokenizer)
        for number, row in enumerate(self.rows, 1):
            try:
                ours += [(number, rendered) for rendered in render_row(row, **self.settings)]
            except (TemplateError, ValueError, TypeError) as error:
                problems.append(f"row {number} cannot be rendered: {error}")
        for (ids, targets, _), (number, other) in zip(self.trained, [] if problems else ours, strict=False):
            if ids != other.ids:
                index = shared_length(ids, other.ids)
                window = slice(max(0, index - NUM_SHOWN), index + NUM_SHOWN)
                one, two = (tokenizer.decode(side[window]) for side in (ids, other.ids))
                problems.append(f"row {number}, token {index + 1}: {one!r} was trained, the export renders {two!r}")
            elif targets != other.targets:
                index = shared_length(targets, other.targets)
                token, kind = tokenizer.decode(ids[index : index + 1]), "a target" if targets[index] else "no target"
                problems.append(
                    f"row {number}, token {index + 1}, {token!r}, was {kind} of the loss, unlike in the export's rendering"
                )
        if not problems and len(ours) != len(self.trained):
            problems.append(f"{len(self.trained)} rows were trained, the export renders {len(ours)} instead")
        return problems

    def save(self, folder: Path) -> None:
        """Write the rows into a folder, for a comparison with the export that will be written there.

        Raises:
            ConfigError: if there is a file of this name that no run has written.
        """
        file = folder / ROWS
        if file.exists() and not is_of_a_run(file):
            raise ConfigError(f"{file} was not written by a run, and would be overwritten; move it away")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(vars(self), default=str) + "\n")


def is_of_a_run(file: Path) -> bool:
    """Tell whether a file is one that `TrainedRows.save` writes."""
    try:
        return TrainedRows.__dataclass_fields__.keys() == {*read_json(file)} - {"accepted"}  # of earlier versions
    except (ValueError, TypeError):
        return False


def kept_rows(export: Path, folder: Path) -> TrainedRows | str:
    """Read the first rows of the run of an export from the run's `folder`. Returns a reason if there are none."""
    file = folder / ROWS
    if not file.exists():
        return f"there is no {ROWS} in {folder}"
    if not is_of_a_run(file):
        return f"{file} was not written by a run"
    kept = read_json(file)
    if "accepted" in kept:
        return f"{file} was written by an earlier version"
    first = TrainedRows(**kept | {"trained": [Rendering(*row) for row in kept["trained"]]})
    try:
        arguments = json.loads(json.dumps(arguments_of(export), default=str))
    except (ConfigError, OSError) as error:
        return f"nothing says that {file} is of the same run: {error}"
    for name, value in first.arguments.items():
        if arguments.get(name) != value:
            return f"{file} is of another run, with --{name} {value!r:.60}, not {arguments.get(name)!r:.60}"
    return first


def compare_rows(
    export: Path, folder: Path, with_images: Callable[[Path, PreTrainedTokenizerBase], Render] | None = None
) -> str:
    """Compare the first rows of a run, as its export renders them, with the trained rows. Returns a text about the result.

    `folder` is the output directory of the run. `with_images`, as `pictures.renderer_of`, is needed for rows with images.

    Raises:
        ConfigError: for each row that differs.
    """
    first = kept_rows(export, folder)
    if isinstance(first, str):
        return f"Rows of training: not compared, {first}"
    exported = read_exported(export)
    if with_images and any("images" in row for row in first.rows):
        exported = exported._replace(render=with_images(export, exported.tokenizer))
    try:
        problems = first.problems(exported)
    except DataError as error:
        return f"Rows of training: not compared, {error}"
    raise_problems(f"{export} does not render what was trained", problems)
    return f"The export renders the first {len(first.rows)} rows as they were trained"


def ends_of_adapters(tokenizer: PreTrainedTokenizerBase, ends: Iterable[int], stops: Set[int]) -> str:
    """Say that adapters learn to end with a token at which generation, by the settings of their model, does not stop."""
    lost, known = (shown_ends(tokenizer, sorted(tokens)) for tokens in ({*ends} - stops, stops))
    problem = f"Rows end with {lost}, but adapters are loaded with the settings of their model, which stop at {known}"
    return f"{problem}; give the end to `generate` as eos_token_id, or merge the adapters (--merge_adapter)"
