"""Date that a chat template writes: that of the rows, on a later day too, in workers, and in comparisons with exports."""

import contextlib
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from transformers.utils import chat_template_utils

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
