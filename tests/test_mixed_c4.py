"""Tests of pretraining on a mixture: killed and resumed across the end of a source and a phase, longer rows, bad input."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, TIMES, killed_at_opening, log_of, losses, read_metrics, write_rows
from streaming import write_web

from accelerate_recipes.args import resolve
from accelerate_recipes.arguments import shipped
from accelerate_recipes.data.files import falls_under

C4 = SCRIPT = ROOT / "recipes" / "c4.py"
STEPS = 10
SIZES = (
    "--config_overrides", "vocab_size=300", "hidden_size=32", "intermediate_size=64", "num_hidden_layers=2",
    "num_attention_heads=2", "max_position_embeddings=64",
)  # fmt: skip
# In each stream, `few` ends before step 10; the phase begins after the step at which a killed run goes on.
PHASE = {"from": 8, "weights": {"few": 1, "notes": 3, "web": 1}, "lr_factor": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with a dataset, a file with eight documents, and texts, some of which are also in the dataset."""
    folder = tmp_path_factory.mktemp("sources")
    pages = write_web(folder / "web", 16)
    write_rows(folder / "few.jsonl", ({"content": text[:100]} for text in pages[2]))
    (folder / "notes").mkdir()
    for number, text in enumerate(pages[3][:8] + pages[0][:8]):
        (folder / f"notes/{number:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def write(folder):
    def write(name: str, **changes) -> Path:
        few = {"text_column": "content", "heldout_share": 0.3, "max_epochs": 1.5}
        sources = {
            "web": {"weight": 4, "dataset_name": f"{folder}/web"},
            "few": {"weight": 3, "train_files": [f"{folder}/few.jsonl"]} | few,
            "notes": {"weight": 2, "train_files": [f"{folder}/notes"]},
        }
        for source, values in changes.pop("sources", {}).items():
            sources[source] = {key: value for key, value in (sources[source] | values).items() if value is not None}
        named = [{"name": name} | values for name, values in sources.items()]
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"sources": named, "phases": [PHASE]} | changes))
        return folder / f"{name}.yaml"

    return write


@pytest.fixture(scope="module")
def arguments(write) -> tuple:
    return (
        "--mixture", write("mixture"), *SIZES, "--max_length", 32, "--max_steps", STEPS, "--total_batch_size", 24,
        "--per_device_train_batch_size", 2, "--num_validation_rows", 12, "--learning_rate", 1e-2, "--logging_steps", 1,
        "--save_steps", 4, "--save_total_limit", 0, "--async_save", "false", "--eval_steps", 4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(run) -> Path:
    """Output of a whole run on 2 ranks."""
    return run()


def test_sources_in_the_log(undisturbed):
    """Rows, epochs, shares and losses of each source; and what is validated on by source."""
    records = [record for record in read_metrics(undisturbed) if "loss" in record]
    names = ["few", "notes", "web"]
    for record in records:
        assert sum(record[f"{name}_rows"] for name in names) == 24 * record["step"]
        assert sum(record[f"{name}_share"] for name in names) == pytest.approx(1)
        assert sum(record[f"{name}_tokens"] for name in names) == record["tokens_seen"] == 24 * 32 * record["step"]
    first, *_, before, last = records
    assert before["few_rows"] == last["few_rows"] > first["few_rows"], "the source has ended"
    assert abs(records[3]["web_share"] - records[3]["web_asked"]) < 0.1 and last["notes_epochs"] > 0
    assert last["learning_rate"] < 0.6 * records[6]["learning_rate"]
    evaluated = [record for record in read_metrics(undisturbed) if "eval_loss" in record]
    assert len(evaluated) == 4 and evaluated[-1]["eval_web_loss"] < evaluated[0]["eval_web_loss"]
    log, shown = log_of(undisturbed), (undisturbed / "rows.txt").read_text()
    assert "validation on 12 rows" in log and "30.0% of the documents" in log
    assert re.search(r"Source few: 1 shards; \d+\.\d\d% of the run's rows", log)
    assert re.findall(r"^(\w+, \w+)$", shown, re.M) == [f"{s}, {n}" for s in ("Training", "Evaluation") for n in names]


@pytest.fixture(scope="module")
def killed(forks, arguments, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("killed") / "out"
    # When rank 0 would log step 6.
    assert forks.run(out, *arguments, **killed_at_opening(11)) == -9, log_of(out)[-3000:]
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-4"] and max(losses(out)) == 5
    return out


def test_killed_and_resumed_is_as_if_it_had_not_been(forks, arguments, killed, undisturbed, tmp_path):
    """Bit for bit, across the end of a source and a phase, also with data workers."""
    shutil.copytree(killed, tmp_path / "out")
    forks.succeed(tmp_path / "out", *arguments, "--dataloader_num_workers", 2)
    for one, other in zip(read_metrics(undisturbed), read_metrics(tmp_path / "out"), strict=True):
        assert {name for name in one if one[name] != other[name]} <= TIMES, one["step"]


def assert_same_sources(found: Path, wanted: Path) -> None:
    """Assert that two runs have the same losses and targets of all sources."""
    for one, other in zip(read_metrics(found), read_metrics(wanted), strict=True):
        for name in other:
            if name.endswith(("loss", "_targets", "_rows")):
                assert one[name] == pytest.approx(other[name], rel=1e-5), name


@pytest.mark.slow
def test_resumed_where_ranks_share_rows(forks, arguments, killed, undisturbed, tmp_path):
    """As one reader of the streams; the two ranks of each row find losses and targets of the sources in their parts."""
    shutil.copytree(killed, tmp_path / "out")
    forks.succeed(tmp_path / "out", *arguments, config="fsdp_long")
    assert_same_sources(tmp_path / "out", undisturbed)


def test_tokenised_once_is_the_same_run(forks, arguments, undisturbed, folder, tmp_path):
    """Each source has a folder of its own; what one source holds out is left out of all of them. One rank, whole logits."""
    more = "--pretokenize", tmp_path / "tokens", "--tokenizer_name", undisturbed / "export", "--whole_logits"
    forks.succeed(tmp_path / "out", *arguments, *more, num_processes=1, config="single")
    assert_same_sources(tmp_path / "out", undisturbed)
    manifests = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("tokens/*/manifest.json")}
    assert {name: found["heldout_share"] for name, found in manifests.items()} == dict.fromkeys(
        ("few", "notes", "web"), 0.3
    )


def test_longer_rows_from_a_step_on(forks, arguments, write, tmp_path):
    """The model is made for the longest of them."""
    mixture = write("longer", sources={"few": {"max_epochs": None}}, phases=[{"from": 4, "max_length": 64}])
    args = (*arguments, "--mixture", mixture, "--max_steps", 6)
    forks.succeed(tmp_path / "out", *args)
    tokens = [record["tokens_seen"] for record in read_metrics(tmp_path / "out") if "loss" in record]
    assert tokens == [24 * 32 * step for step in range(1, 5)] + [24 * (4 * 32 + 64 * step) for step in (1, 2)]


def test_steps_for_which_flops_are_counted(write):
    sources = {"few": {"max_epochs": None}}
    for name, phases, number in (
        ("same", [{"from": 2, "lr_factor": 0.5}], math.inf),
        ("back", [{"from": 2, "max_length": 32}, {"from": 0.5, "max_length": 64}, {"from": 7, "max_length": 32}], 4),
    ):
        argv = ["--mixture", str(write(name, sources=sources, phases=phases)), "--max_steps", "8", "--max_length", "32"]
        args, _ = resolve(shipped.load(C4).Args, argv)
        assert args.steps_alike == number


def test_what_one_source_holds_out_none_trains_on(write, folder):
    args, problems = resolve(shipped.load(C4).Args, ["--mixture", str(write("held")), "--max_steps", "9"])
    assert problems == [] and args.sources[0].share_left_out == 0.3
    few, notes, web = ([*one.train_texts()] for one in args.sources)
    assert few and notes and web and not any(falls_under(text, 0.3) for text in (*few, *notes, *web))
    assert [bool(one.share_heldout) for one in args.sources] == [True, True, False]
    assert args.sources[1].validation_text.__self__.validation_shards() == args.sources[1].train_shards()
    mixed = [*args.texts_in_turns()]
    assert sorted(mixed) == sorted([*few, *notes, *web]), "a new tokenizer reads them all"
    assert abs(sum(text in few for text in mixed[:9]) - 3) <= 1, "in turns"


PROBLEMS = {
    "max_epochs of web": (
        {"sources": {"web": {"dataset_name": "allenai/c4", "max_epochs": 2}}},
        "source web: max_epochs 2 needs text that is counted before the run: give train_files on a disk",
    ),
    "size": (
        {"sources": {name: {"weight": "size"} for name in ("few", "notes", "web")}},
        "source web: weight: size needs text that is counted",
    ),
    "lengths that are not counted": ({"phases": [{"from": 4, "max_length": 64}]}, "max_epochs and weight: size cannot count rows of another max_length"),
    "a length that is none": ({"phases": [{"from": 4, "max_length": 1.5}]}, "phase 1: max_length is 1.5; it must be a number"),
    "a phase of nothing": ({"phases": [{"from": 4}]}, "phase 1 changes nothing; give weights or lr_factor or max_length"),
    "validated by another": (
        {"sources": {"web": {"dataset_name": None, "train_files": ["{}/notes/00.txt"], "validation_files": ["{}/few.jsonl"]}}},
        "few trains on {}/few.jsonl, which web validates on; remove it from one",
    ),
    "no such file": ({"sources": {"few": {"train_files": ["{}/none.jsonl"]}}}, "source few: --train_files {}/none.jsonl: no such"),
    "too long": (
        {"sources": {"few": {"max_epochs": None}}, "phases": [{"from": 4, "max_length": 128}]},
        "--max_length is 128, but the model is made for max_position_embeddings 64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("changes, message", PROBLEMS.values(), ids=PROBLEMS)
def test_problems_are_told_before_anything_is_loaded(write, folder, changes, message):
    changes = json.loads(json.dumps(changes).replace("{}", str(folder)))
    mixture = str(write("wrong", **changes))
    found = resolve(shipped.load(C4).Args, ["--mixture", mixture, "--max_steps", "9", "--max_length", "32", *SIZES])[1]
    assert message.replace("{}", str(folder)) in "\n".join(found)


def test_flags_that_name_data_beside_a_mixture(write):
    flags = ["--validation_files", "a.txt", "--train_files", "b.txt", "--dataset_name", "c", "--max_steps", "9"]
    found = resolve(shipped.load(C4).Args, ["--mixture", str(write("plain")), *flags])[1]
    assert sorted(problem.split()[0] for problem in found) == ["--dataset_name", "--train_files", "--validation_files"]
