"""Arguments of the recipes that render conversations by a chat template."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from accelerate_recipes.args import arg
from accelerate_recipes.data.dates import ASKS, first_prepared, is_day
from accelerate_recipes.data.heldout import RowsArgs
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.pretrained import read_tokenizer
from accelerate_recipes.ranks import on_first_rank


@dataclass
class ChatArgs(RowsArgs):
    """Arguments of a recipe that renders conversations. Put it before TrainArgs in the bases of its arguments."""

    group = "data"
    template_date: str = arg(
        "",
        "Day that a chat template writes as today's, as YYYY-MM-DD; default: the day on which the rows were first prepared.",
        group="rare",
    )

    def problems(self, world_size: int) -> list[str]:
        found = super().problems(world_size)
        if self.template_date and not is_day(self.template_date):
            found.append(f"--template_date is {self.template_date!r}; it must be a day as YYYY-MM-DD: 2026-01-31")
        return found

    def settle(self, saved: Mapping[str, Any]) -> list[str]:
        self.template_date = self.template_date or saved.get("template_date") or ""
        return super().settle(saved)

    def template_of(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the chat template that renders the rows; "" if there is none."""
        template: Any = tokenizer.chat_template
        if path := getattr(self, "chat_template_path", None):
            name = getattr(self, "template_model", "")
            template = read_tokenizer(name).chat_template if name else Path(path).read_text(encoding="utf-8")
        return str(template or "")  # some tokenizers have several templates, by name

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
