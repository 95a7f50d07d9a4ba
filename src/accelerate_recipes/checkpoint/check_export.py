"""Check of an export as its users see it: by transformers alone, without the model's training."""

import itertools
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from accelerate_recipes.checkpoint.export import arguments_of
from accelerate_recipes.checkpoint.files import other_kind
from accelerate_recipes.checkpoint.published import Published
from accelerate_recipes.data import rendering
from accelerate_recipes.data.dates import frozen_date
from accelerate_recipes.data.rendering import Rendering, differences, prompts_alone, shown_ends
from accelerate_recipes.disk import read_json, write_atomically
from accelerate_recipes.errors import ConfigError, first_line, raise_problems
from accelerate_recipes.models.positions import max_positions

ROWS = "rows.json"  # in the output directory, beside export/


class Exported(NamedTuple):
    """Tokenizer and settings that are loaded with an export's weights. `config` is None for adapters, which have none."""

    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig | None
    stops: set[int]  # tokens at which generation stops


def read_exported(folder: Path) -> Exported:
    """Read tokenizer and settings of an export, by transformers alone."""
    runs_no_code = {"trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, **runs_no_code) if (folder / "config.json").is_file() else None
    settings: Any = config
    if (folder / "generation_config.json").is_file():
        settings = GenerationConfig.from_pretrained(folder)
    return Exported(AutoTokenizer.from_pretrained(folder, **runs_no_code), config, stops_of(settings))


def as_exported(model: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Exported:
    """Return a model's tokenizer and settings as users of its export get them: saved, then loaded by transformers.

    Raises:
        ConfigError: for settings that cannot be saved.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            for artifact in (model.config, model.generation_config, Published(model.config, tokenizer)):
                artifact.save_pretrained(folder)  # pyright: ignore[reportOptionalMemberAccess]
        except ValueError as error:  # transformers refuses to save some settings that it loads
            raise ConfigError(f"the model's settings cannot be exported: {error}; mend its configuration") from error
        return read_exported(Path(folder))


def stops_of(settings: GenerationConfig | PreTrainedConfig | PreTrainedTokenizerBase | None) -> set[int]:
    """Return the tokens at which generation with these settings stops."""
    ends: Any = getattr(settings, "eos_token_id", None)
    return {*(ends if isinstance(ends, list) else [ends])} - {None}


@dataclass
class TrainedRows:
    """First rows of a run, and how they were trained.

    `rows` holds the rows as they were written, `trained` as they were rendered with the `settings` of
    `rendering.render`. `ends` are the tokens that end rows. `arguments` are those arguments of the run that decide what
    it trains.
    """

    rows: list[dict]
    trained: list[Rendering]
    settings: dict[str, Any]
    ends: list[int]
    arguments: dict[str, Any]

    @property
    def date(self) -> str | None:
        """Day that the chat template wrote; None if it writes none."""
        return self.arguments.get("template_date")

    def problems(self, exported: Exported) -> list[str]:
        """List where an export differs from what was trained, one sentence each."""
        tokenizer, config, stops = exported
        with frozen_date(self.date):
            found = differences(self.trained, self.rows, tokenizer, **self.settings)
        if lost := {*self.ends} - stops:
            said, known = (shown_ends(tokenizer, sorted(ends)) for ends in (lost, stops))
            remedy = "name that end in its generation_config.json (eos_token_id)"
            found.append(f"rows end with {said}, where its generation would not stop: it stops at {known}; {remedy}")
        largest = max((token for ids, *_ in self.trained for token in ids), default=0)
        if config and largest >= (number := config.get_text_config().vocab_size):
            found.append(f"rows have the token {largest}, its config.json a vocab_size of {number}")
        return found

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


def compare_with_export(exported: Exported, first: TrainedRows, folder: Path | None) -> None:
    """Compare the first rows of training with how the export will render them, and keep them in `folder`, if any.

    Raises:
        ConfigError: for each row that differs, and if a file of the user is in the way.
    """
    raise_problems("The export would not render what is trained", first.problems(exported))
    if folder:
        first.save(folder)


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


def compare_rows(export: Path, folder: Path) -> str:
    """Compare the first rows of a run, as its export renders them, with the trained rows. Returns a text about the result.

    `folder` is the output directory of the run.

    Raises:
        ConfigError: for each row that differs.
    """
    first = kept_rows(export, folder)
    if isinstance(first, str):
        return f"Rows of training: not compared, {first}"
    raise_problems(f"{export} does not render what was trained", first.problems(read_exported(export)))
    return f"The export renders the first {len(first.rows)} rows as they were trained"


def check_export(export: Path, prompts: Sequence[str] | None, max_new_tokens: int) -> str:
    """Load an export, compare its rows and generate. Returns the results in lines.

    Each prompt is a user's message if the tokenizer has a chat template; default: the beginning of the first row of
    training.

    Raises:
        ConfigError: for a folder without a model, or with one that cannot be loaded; for a prompt or a number of tokens that
            the model does not take; and if the export does not render what was trained.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"--max_new_tokens is {max_new_tokens}; it must be at least 1")
    if reason := other_kind(export, "export"):
        raise ConfigError(f"{export} is no export: {reason}")
    # What transformers, tokenizers, safetensors and PEFT raise for a damaged file has no common class.
    try:
        names = read_json(export / "config.json").get("architectures") if (export / "config.json").is_file() else None
        if any(name.endswith("ForImageClassification") for name in names or ()):
            raise ConfigError(f"{export} holds a model of images, which answers no prompt; see docs/vision.md")
        tokenizer = AutoTokenizer.from_pretrained(export, trust_remote_code=False)
        model: Any = load_export(export).eval()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{export} cannot be loaded: {first_line(error)}; export the checkpoint again") from error
    folder = export.resolve().parent
    try:
        compared, first = compare_rows(export, folder), kept_rows(export, folder)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{folder / ROWS} cannot be read: {type(error).__name__}: {first_line(error)}") from error
    if not model.can_generate():
        raise ConfigError(f"{export} holds a {type(model).__name__}, which writes no texts: there is nothing to ask it")
    ends = stops_of(model.generation_config)
    dtype = str(model.dtype).removeprefix("torch.")
    stops = shown_ends(tokenizer, sorted(ends))
    lines = [
        f"{export}: {type(model).__name__}, {model.num_parameters():,} parameters in {dtype}",
        f"Vocabulary: {len(tokenizer):,} tokens, {model.get_input_embeddings().weight.shape[0]:,} rows of the embedding",
        f"Chat template: {'yes' if tokenizer.chat_template else 'none'}; generation stops at {stops}",
        compared,
    ]
    if isinstance(first, TrainedRows) and {*first.ends} - ends:
        lines.append(ends_of_adapters(tokenizer, first.ends, ends))
    known = first if isinstance(first, TrainedRows) else None
    asked = [prompt_ids(tokenizer, prompt, known) for prompt in prompts or [None]]
    if not all(asked):
        raise ConfigError("--prompt has no tokens; give a text")
    most = max(map(len, asked))
    longest = max_positions(model.config) - (0 if model.config.is_encoder_decoder else most)
    if max_new_tokens > longest:
        said = f"--max_new_tokens {max_new_tokens} behind a prompt of {most} tokens"
        raise ConfigError(f"{said} is more than the model is made for; give at most {longest}")
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for ids in asked:
        inputs = torch.tensor([ids])
        written = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), **settings)[0].tolist()
        written = written if model.config.is_encoder_decoder else written[len(ids) :]
        how = "an end token" if written and written[-1] in ends else f"--max_new_tokens {max_new_tokens}"
        lines.append(f"Prompt: {tokenizer.decode(ids)!r}")
        lines.append(f"Answer: {tokenizer.decode(written)!r}, {len(written)} tokens, ended by {how}")
    return "\n".join(lines)


def ends_of_adapters(tokenizer: PreTrainedTokenizerBase, ends: Iterable[int], stops: set[int]) -> str:
    """Say that adapters learn to end with a token at which generation, by the settings of their model, does not stop."""
    lost, known = (shown_ends(tokenizer, sorted(tokens)) for tokens in ({*ends} - stops, stops))
    said = f"Rows end with {lost}, but adapters are loaded with the settings of their model, which stop at {known}"
    return f"{said}; give the end to `generate` as eos_token_id, or merge the adapters (--merge_adapter)"


def load_export(export: Path) -> transformers.PreTrainedModel:
    """Load a model of any kind. Adapters are loaded with their model, from the place that they name."""
    if not (export / "config.json").is_file():
        from peft import AutoPeftModel, AutoPeftModelForCausalLM, AutoPeftModelForSeq2SeqLM

        task = read_json(export / "adapter_config.json").get("task_type")
        kinds = {None: AutoPeftModel, "SEQ_2_SEQ_LM": AutoPeftModelForSeq2SeqLM}
        adapted = kinds.get(task, AutoPeftModelForCausalLM)
        return adapted.from_pretrained(export)  # pyright: ignore[reportReturnType]
    names = read_json(export / "config.json").get("architectures") or []
    if len(names) != 1 or not hasattr(transformers, names[0]):
        raise ConfigError(f"{export}/config.json names the architectures {names}, not one that transformers has")
    model, info = getattr(transformers, names[0]).from_pretrained(export, output_loading_info=True)
    if missing := ", ".join(sorted(info["missing_keys"])):  # transformers would draw random weights
        raise ConfigError(f"{export} lacks the weights {missing}; export the checkpoint again")
    return model


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | None, first: TrainedRows | None) -> list[int]:
    """Tokenise the text to answer: the prompt, or by default the beginning of the first row of training."""
    if prompt is not None:
        asked = [{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt
        return prompts_alone(tokenizer, [asked], {})[0]
    if first:
        row = rendering.without_nulls(first.rows[0])
        asked = row.get("prompt")
        if "messages" in row:
            asked = list(itertools.takewhile(lambda message: message.get("role") != "assistant", row["messages"]))
        tools, more = (rendering.parsed(row.get(name), name, 0, "") for name in rendering.SETTINGS)
        settings = {"tools": tools or None} | (more or {})
        return prompts_alone(tokenizer, [asked], settings)[0] if asked else first.trained[0].ids[:8]
    begin: Any = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return [begin]
