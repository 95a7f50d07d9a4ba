"""Arguments of the recipes that render conversations by a chat template."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from accelerate_recipes.args import arg
from accelerate_recipes.data.dates import ASKS, first_prepared, frozen_date, is_day
from accelerate_recipes.data.heldout import RowsArgs
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.hub import cache
from accelerate_recipes.models.pretrained import load_config, read_tokenizer
from accelerate_recipes.ranks import on_first_rank

if TYPE_CHECKING:
    import datasets


@dataclass
class ChatArgs(RowsArgs):
    """Arguments of a recipe that renders conversations. Put it before TrainArgs in the bases of its arguments."""

    group = "data"
    template_date: str = arg(
        "",
        "Day that a chat template writes as today's, as YYYY-MM-DD; default: the day on which the rows were first prepared.",
        group="rare",
    )
    control_tokens: str = arg(
        "refuse",
        "Messages whose texts hold control tokens: refuse them, keep them, or drop_rows, which leaves their rows out.",
        choices=["refuse", "keep", "drop_rows"],
    )

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if self.template_date and not is_day(self.template_date):
            found.append(f"--template_date is {self.template_date!r}; it must be a day as YYYY-MM-DD: 2026-01-31")
        return found

    def settle(self, saved: Mapping[str, Any]) -> list[str]:
        self.template_date = self.template_date or saved.get("template_date") or ""
        return super().settle(saved)

    @property
    def given_template(self) -> str | None:
        """Chat template of --chat_template_path; None if the tokenizer's own is used."""
        path, name = (getattr(self, field, None) for field in ("chat_template_path", "template_model"))
        if name:
            try:
                return read_tokenizer(name).get_chat_template()  # trl takes this one of several
            except ValueError as error:
                raise ConfigError(f"--chat_template_path {name}: {error}") from None
        return Path(path).read_text(encoding="utf-8") if path else None

    def stop_tokens(self, tokenizer: PreTrainedTokenizerBase) -> set[int]:
        """Return the tokens at which generation stops, by the arguments or the tokenizer, and by the base's settings."""
        name: str = self.base_model  # pyright: ignore[reportAttributeAccessIssue]
        end = getattr(self, "eos_token", None) or tokenizer.eos_token
        found: set[Any] = {tokenizer.convert_tokens_to_ids(end)}
        if name:
            try:
                settings = GenerationConfig.from_pretrained(name, **cache.pinned(name))
            except OSError:  # a model need not have such settings
                settings = load_config(name).get_text_config()
            ends: Any = settings.eos_token_id
            found |= {*(ends if isinstance(ends, list) else [ends])}
        return found - {None}

    def template_of(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the chat template with which the rows are rendered; all of them if a tokenizer has several, by name."""
        return str(self.given_template or tokenizer.chat_template)

    def without_controls(
        self, rows: "dict[str, datasets.Dataset]", columns: Collection[str], tokenizer: PreTrainedTokenizerBase
    ) -> "dict[str, datasets.Dataset]":
        """Do as --control_tokens says with each side of the rows.

        Raises:
            DataError: for messages with control tokens, unless --control_tokens accepts them.
            ConfigError: if no row is left.
        """
        from accelerate_recipes.data.control_tokens import without_controls

        tokenizers, stops = [tokenizer], self.stop_tokens(tokenizer)
        if name := getattr(self, "template_model", ""):  # its tokens are added later
            tokenizers.append(read_tokenizer(name))
        return {
            side: without_controls(
                part, columns, tokenizers, stops, self.template_of(tokenizer), self.sources[side], self.control_tokens
            )
            for side, part in rows.items()
        }

    def check_written(
        self,
        rows: "dict[str, datasets.Dataset]",
        columns: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        unit: str = "row",
    ) -> None:
        """Look for what messages hold and the chat template does not write. `unit` names what a row is.

        Raises:
            ConfigError: for calls of tools, and for tools.
        """
        from accelerate_recipes.data.unwritten import check_written

        with frozen_date(self.template_date):
            for side, part in rows.items():
                check_written(part, columns, tokenizer, self.given_template, f"{self.sources[side]}, {unit}")

    def settle_date(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Settle --template_date, alike on all ranks, if the chat template writes the date of the day.

        Raises:
            ConfigError: for a date that the template does not write.
        """
        template = self.template_of(tokenizer)
        if ASKS in template:
            self.template_date = self.template_date or on_first_rank(
                lambda: first_prepared(self.read_rows()["train"], template)
            )
        elif self.template_date:
            raise ConfigError(
                f"--template_date {self.template_date}: the chat template does not ask for the date ({ASKS}); remove it"
            )
