"""Date that a chat template writes: that of the rows, on a later day too, in workers, and in comparisons with exports."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from accelerate_recipes.args import arg
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.ranks import on_first_rank

if TYPE_CHECKING:
    from datasets import Dataset

ASKS = "strftime_now"  # function by which a chat template reads the clock
DAY = "%Y-%m-%d"


@contextlib.contextmanager
def frozen_date(date: str | None) -> Iterator[None]:
    """Let chat templates read this date (YYYY-MM-DD) from the clock in this process; none: today's.

    transformers (5.17 to 5.23) defines the function that templates call, and refuses an argument of its name.
    """
    if not date:
        yield
        return
    moment = datetime.strptime(date, DAY)

    class Frozen(datetime):
        @classmethod
        def now(cls, tz=None):
            return moment

    clock, chat_template_utils.datetime = chat_template_utils.datetime, Frozen
    try:
        yield
    finally:
        chat_template_utils.datetime = clock


def is_day(date: str) -> bool:
    """Tell whether a text is a date as YYYY-MM-DD."""
    try:
        return datetime.strptime(date, DAY).strftime(DAY) == date
    except ValueError:
        return False


def today(row: dict, template: str) -> dict[str, str]:
    """Return today's date, for a row and a chat template; `datasets` keeps it."""
    return {"date": datetime.now().strftime(DAY)}


def first_prepared(rows: "Dataset", template: str) -> str:
    """Return the day on which rows were first prepared for a chat template: that in the cache of `datasets`, or today."""
    settings = {"fn_kwargs": {"template": template}, "remove_columns": rows.column_names, "desc": "Dating the rows"}
    return rows.select([0]).map(today, **settings)["date"][0]


@dataclass
class DateArgs:
    """Argument of a recipe whose rows a chat template renders. Put it before RowsArgs in the bases of its arguments."""

    template_date: str = arg(
        "",
        "Day that a chat template writes as today's, as YYYY-MM-DD; default: the day on which the rows were first prepared.",
        group="rare",
    )

    def problems(self, world_size: int) -> list[str]:
        problems = super().problems(world_size)  # pyright: ignore[reportAttributeAccessIssue]
        if self.template_date and not is_day(self.template_date):
            problems.append(f"--template_date is {self.template_date!r}; it must be a day as YYYY-MM-DD: 2026-01-31")
        return problems

    def settle(self, saved: Mapping[str, Any]) -> list[str]:
        self.template_date = self.template_date or saved.get("template_date") or ""
        return super().settle(saved)  # pyright: ignore[reportAttributeAccessIssue]

    def settle_date(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Settle --template_date, alike on all ranks, if the chat template writes the date of the day.

        Raises:
            ConfigError: for a date that the template does not write.
        """
        template = str(tokenizer.chat_template)  # all of them if it has several, by name
        if ASKS in template:
            self.template_date = self.template_date or on_first_rank(
                lambda: first_prepared(self.sources[0].read_rows()["train"], template)
            )
        elif self.template_date:
            raise ConfigError(
                f"--template_date {self.template_date}: the chat template does not ask for the date ({ASKS}); remove it"
            )
