"""Tests of templates that write the date of the day: rows keep theirs on a later day, and so do comparisons with exports."""

import json
import re
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from conversations import PAIRS, PROMPTS, conversation, prepare, save_base, template_of, write
from datasets import Dataset
from helpers import CHILDREN, log_of
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from accelerate_recipes.checkpoint.files import complete_checkpoints, saved_arguments
from accelerate_recipes.conversations import dates
from accelerate_recipes.conversations.dates import frozen_date
from accelerate_recipes.conversations.exported import ROWS
from accelerate_recipes.conversations.trained_rows import FirstRows
from accelerate_recipes.errors import ConfigError

SCRIPT = CHILDREN / "days.py"
CHATS = [conversation(i, tools=False, system=True) for i in range(30)]
ROWS_OF = {"sft": CHATS, "dpo": PAIRS, "grpo": PROMPTS}
END = "<|eot_id|>"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), template_of("llama3_2"), END)


@pytest.fixture
def on_day(monkeypatch):
    """Set the clock that templates and rows read."""

    def set_clock(day: str) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.fromisoformat(day)

        for module in (chat_template_utils, dates):
            monkeypatch.setattr(module, "datetime", Clock)

    return set_clock


def days_in(text: str) -> set[str]:
    return {*re.findall(r"\d\d [A-Z][a-z]{2} 20\d\d", text.replace("|", ""))}


def test_upstream_still_needs_the_frozen_clock(base):
    """For this `frozen_date` replaces the clock of transformers; a template cannot be given another one."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    said = [{"role": "user", "content": "And?"}]
    with frozen_date("2024-02-29"):
        assert days_in(tokenizer.apply_chat_template(said, tokenize=False)) == {"29 Feb 2024"}
    today = {f"{datetime.now():%d %b %Y}"}
    assert days_in(tokenizer.apply_chat_template(said, tokenize=False)) == today, "the clock goes on"
    given = {"strftime_now": lambda form: "29 Feb 2024"}
    with pytest.raises(TypeError, match="not callable"):
        tokenizer.apply_chat_template(said, tokenize=False, **given)


@pytest.mark.parametrize("name", ROWS_OF)
def test_rows_keep_their_date(base, capsys, on_day, name):
    """On a later day the same rows are found again, with their date, by workers and in the comparison with the export."""
    rows = [{column: row[column] for column in row if column != "tools"} for row in ROWS_OF[name]]
    workers = ("--dataset_num_proc", "2") if name != "grpo" else ()
    for day, flags, written in (
        ("2025-03-01", workers, "01 Mar 2025"),
        ("2025-03-02", (), "01 Mar 2025"),
        ("2025-03-03", ("--template_date", "2024-07-26"), "26 Jul 2024"),
        ("2025-03-04", (*workers, "--template_date", "2023-01-31"), "31 Jan 2023"),
        ("2025-03-05", (), "01 Mar 2025"),
    ):
        on_day(day)
        prepare(base, rows, *flags, name=name)
        assert days_in(capsys.readouterr().out) == {written}
    on_day("2025-03-06")
    prepare(base, [*rows[:-1], rows[0]], name=name)
    assert days_in(capsys.readouterr().out) == {"06 Mar 2025"}, "other rows are prepared today"


def test_a_date_that_nobody_writes(base, tmp_path):
    plain = save_base(tmp_path, "{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    with pytest.raises(ConfigError, match=r"--template_date 2024-07-26: "):
        prepare(plain, CHATS, "--template_date", "2024-07-26")
    for wrong in ("26.07.2024", "2024-02-30", "2024-7-6"):
        with pytest.raises(ConfigError, match=rf"--template_date is '{wrong}'; it must be a day as YYYY-MM-DD"):
            prepare(base, CHATS, "--template_date", wrong)
    dated = write(tmp_path / "dated.jinja", [])
    dated.write_text(template_of("llama3_2"))
    prepare(base, CHATS, "--template_date", "2024-07-26", "--chat_template_path", str(dated))
    assert days_in((base / "out/rows.txt").read_text()) == {"26 Jul 2024"}


def test_a_run_over_midnight(forks, base, tmp_path):
    """Each reading of the clock is a day later. The run ends well, goes on later without its cache, and so does its export."""
    out, rows = tmp_path / "out", write(tmp_path / "rows.jsonl", CHATS)
    arguments = ("--model_name_or_path", base, "--train_files", rows, "--max_length", 1200, "--heldout_share", 0.3)
    arguments = (*arguments, "--total_batch_size", 2, "--async_save", "false")
    said = "The export renders the first 16 rows as they were trained"
    log = forks.succeed(out, *arguments, "--max_steps", 2, DAY="2025-03-01", RECIPE="sft")
    assert said in log
    elsewhere = {"TESTED_MACHINES": tmp_path / "elsewhere", "DAY": "2026-03-01", "RECIPE": "sft"}
    log = forks.succeed(out, *arguments, "--max_steps", 3, **elsewhere)
    assert said in log and "template_date is now" not in log
    dates_of = {saved_arguments(path)["template_date"] for path in complete_checkpoints(out)}
    assert dates_of == {json.loads((out / ROWS).read_text())["arguments"]["template_date"]} == {"2025-03-01"}
    assert forks.run(out, *arguments, "--max_steps", 4, "--template_date", "2026-01-01", **elsewhere) == 2
    assert "--template_date was '2025-03-01' and is now '2026-01-01'" in log_of(out)


def test_a_checkpoint_of_an_earlier_version_without_a_date(tmp_path):
    """Its rows have the day on which it began, which the user can give."""
    run = SimpleNamespace(args=SimpleNamespace(template_date="2026-03-01"), resumed_from=tmp_path)
    first = FirstRows(run, Dataset.from_dict({}), dict, "now")
    for saved, remedy in (
        ("seed: 1", "give by --template_date, which is now 2026-03-01, .*; "),
        ("template_date: x", ""),
    ):
        (tmp_path / "args.yaml").write_text(saved)
        with pytest.raises(ConfigError, match=f"their checksum is now, was then; {remedy}put the files back"):
            first.check([{"content": "then"}])
