"""Tests of reading: which files, found again by content, and rows exactly as they are written, wherever a field appears."""

import datetime
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ROOT

from accelerate_recipes.args import TrainArgs
from accelerate_recipes.arguments import shipped
from accelerate_recipes.data import tables
from accelerate_recipes.data.files import read_files, read_split
from accelerate_recipes.data.heldout import RowsArgs
from accelerate_recipes.data.shards import named_shards
from accelerate_recipes.disk import read_json_lines
from accelerate_recipes.errors import ConfigError, DataError
from accelerate_recipes.hub.cache import HubDataset
from accelerate_recipes.text.text_pairs import PairArgs
from chess_games.games import GamesArgs


@dataclass
class Rows(RowsArgs, TrainArgs):
    pass


@dataclass
class Pairs(PairArgs, TrainArgs):
    pass


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(file: Path, rows: list[dict]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif file.suffix == ".csv":
        file.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]), encoding="utf-8")
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("name", ["t[1]", "a*", "a?", "a::b", "[x] * ?/{a}/t", "zip:::t", "%41"])
@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_name_is_no_pattern(name, suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for other in ("t1", "ab", "abc", "a", "b", "x a b/a/t", "A"):
        write(tmp_path / f"{other}.{suffix}", [{"text": other}])
    write(tmp_path / f"{name}.{suffix}", [{"text": "mine"}])
    assert read_files([f"{name}.{suffix}"])["text"][:] == ["mine"]
    assert RowsArgs(train_files=[f"{name}.{suffix}"]).read_rows()["train"]["text"][:] == ["mine"]


def replace(file: str, text: str) -> None:
    """Give a file another content of the same size, with the same times."""
    stat = os.stat(file)
    Path(file).write_text(text, encoding="utf-8")
    assert os.path.getsize(file) == stat.st_size
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_another_content_gives_other_rows(tmp_path):
    """Also if neither name, size nor time tell; whatever is computed of the rows is computed anew."""
    file = write(tmp_path / "folder/train.jsonl", [{"text": f"a{i}"} for i in range(40)])
    nested, other = (write(tmp_path / "folder" / name, [{"text": "a"}]) for name in ("en/b.jsonl", "readme.txt"))
    args = RowsArgs(train_files=[file], heldout_share=0.5)
    folder = HubDataset(str(tmp_path / "folder"), splits=("train",))

    def seen() -> list:
        sides = args.sides(args.read_rows(), "text")
        return [{*side["text"]} for side in (sides["train"], sides["test"], read_split(folder, "train"))]

    def keys() -> tuple[list, list]:
        """Return the keys of games and of pairs: of the file, and of the files of the folder."""
        files, some = {"train_files": [file]}, {"dataset_name": folder.name, "dataset_files": "**/*.jsonl"}
        return tuple([GamesArgs(**named).game_key, PairArgs(**named).version()] for named in (files, some))

    before, keys_before = seen(), keys()
    replace(other, Path(other).read_text(encoding="utf-8").replace("a", "b"))
    assert keys() == keys_before
    whole = PairArgs(dataset_name=folder.name).version()
    replace(nested, Path(nested).read_text(encoding="utf-8").replace("a", "b"))
    (of_file, of_folder), nested_before = keys(), keys_before
    assert of_file == nested_before[0] and whole != PairArgs(dataset_name=folder.name).version()
    assert all(one != other for one, other in zip(of_folder, nested_before[1], strict=True))
    replace(file, Path(file).read_text(encoding="utf-8").replace("a", "b"))
    after, keys_after = seen(), keys()
    for one, other in zip(before, after, strict=True):
        assert one and {text[0] for text in one} == {"a"} and {text[0] for text in other} == {"b"}
    for old, new in zip((keys_before[0], of_folder), keys_after, strict=True):
        assert all(one != other for one, other in zip(old, new, strict=True))
    # And the same content elsewhere is what was read before.
    moved = write(tmp_path / "elsewhere/x.jsonl", [{"text": f"b{i}"} for i in range(40)])
    assert read_files([moved]).cache_files == read_files([file]).cache_files
    assert GamesArgs(train_files=[moved]).game_key == keys_after[0][0]


def test_texts_of_csv_stay_texts(tmp_path):
    """Numbers keep their zeros, wherever a text stands among them; a quoted cell may have several lines."""
    cells = [f"{i:05}" for i in range(25_000)] + ["1.50", "NA", "", "x", '"a ""b"",\nc"', "é"]
    (tmp_path / "a.csv").write_text(
        "\ufeffcode,n\n" + "".join(f"{cell},0{i}\n" for i, cell in enumerate(cells)), encoding="utf-8"
    )
    rows = read_files([str(tmp_path / "a.csv")])
    assert rows["code"][:] == [*cells[:-2], 'a "b",\nc', "é"]
    assert rows["n"][:3] == ["00", "01", "02"]
    for (name, content), message in {
        ("b.csv", b"a,a\n1,2\n"): "it has several columns called 'a'", ("b.csv", b"a,b\n1,2\n1\n"): "Row #3: Expected 2 columns, got 1",
        ("b.csv", "a\né\n".encode("latin-1")): "codec can't decode byte 0xe9.*; save it as UTF-8", ("b.csv", b""): "it has 0 rows",
        ("b.csv", b"a,b\n"): "it has 0 rows", ("b.csv", b"prompt;completion\n1;2\n"): "its columns are separated by ';', not by ",
        ("b.csv", b"a\tb\n"): r"its columns are separated by '\\t', not by ", ("b.tsv", b"a,b\n1,2\n"): "its columns are separated by ',', not",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"{name} cannot be read: .*{message}"):
            read_files([str(tmp_path / name)])
    (tmp_path / "c.csv").write_text('"a;b"\n1\n')
    assert read_files([str(tmp_path / "c.csv")]).column_names == ["a;b"]


LATE = {
    "a field": ({"score": 1.5}, None, 1.5),
    "a field of another type": ({"n": "text"}, 7, "text"),
    "a number with a fraction": ({"n": 0.12345678901234567}, 7.0, 0.12345678901234567),
    "a text of digits": ({"n": "5"}, 7, "5"),
    "an object": ({"n": {"a": None}}, 7, {"a": None}),
    "a field inside": ({"m": [{"role": "a", "more": 1}]}, [{"role": "a"}], [{"role": "a", "more": 1}]),
    "no date": ({"at": "soon"}, "2026-01-02", "soon"),
    "a list": ({"x": ["a"]}, [], ["a"]),
    "a large number": ({"n": 2**70 + 1}, 7, 2**70 + 1),
    "a number beside fractions": ({"n": 2.5}, 2**53 + 1, 2.5),
    "null in an object": ({"o": {"a": None, "b": [0.7]}}, {"a": 1, "b": [1e-12]}, {"a": None, "b": [0.7]}),
    "null in a list": ({"x": [None, {"a": None}]}, [], [None, {"a": None}]),
    "a weight": ({"m": [{"role": "a", "weight": 0.0}]}, [{"role": "a", "weight": 1}], [{"role": "a", "weight": 0.0}]),
}


@pytest.mark.parametrize("case", LATE)
@pytest.mark.parametrize("second_file", [False, True])
def test_a_field_may_appear_or_change_anywhere(case, second_file, tmp_path, monkeypatch):
    """In whatever block or file of JSON a field is another one, all rows are read, each as it is written."""
    change, early, late = LATE[case]
    first = {"text": "a", "n": 7, "m": [{"role": "a"}], "at": "2026-01-02", "x": [], "o": {"a": 1, "b": [1e-12]}}
    (name,) = change
    first |= {name: early} if name in first else {}
    rows = [first] * 20 + [first | change]
    parts = [rows[:20], rows[20:]] if second_file else [rows]
    files = [write(tmp_path / f"{i}.jsonl", part) for i, part in enumerate(parts)]
    monkeypatch.setattr(tables, "BYTES_PARSED", 200)
    found = read_files(files)
    if case == "a weight":
        assert found.features["m"].feature["weight"] == datasets.Value("float64"), "a recipe reads it as a number"
    else:
        assert repr(found[name][:]) == repr([early] * 20 + [late])
    assert found["text"][:] == ["a"] * 21 and found["at"][0] == "2026-01-02"


NUMBERS = [
    0.7, 48.85837012345679, 1e-12, -0.0, 5, 2.5, 2**53 + 1, 2**64, 12345678901234567890123, 1e22, True, "0.7", "01",
]  # fmt: skip


def test_numbers_stay_as_they_are_written(tmp_path):
    """Alone, in lists and in objects of any fields, read from a file and once more after `map`, as Python's json has them."""
    rows = [
        {"n": n, "all": NUMBERS, "one": {"amount": n}, "other": {f"a{i % 2}": [{"n": n}]}}
        for i, n in enumerate(NUMBERS)
    ]
    for i, row in enumerate(rows):
        row |= {"float": row["n"] + 0.1 if i < 4 else 0.1, "pay": {"amount": (100, 2.5)[i % 2]}}
    found = read_files([write(tmp_path / "a.jsonl", rows)])
    assert [*map(json.dumps, found)] == [*map(json.dumps, rows)]
    kinds = datasets.Features(found.features | {"again": datasets.List(datasets.Json())})
    again = found.map(lambda row: {"again": [row["one"], row["other"]]}, features=kinds)
    wanted = [row | {"again": [row["one"], row["other"]]} for row in rows]
    assert [*map(json.dumps, again)] == [*map(json.dumps, wanted)]
    texts = again.data.column("again")[0].as_py()
    assert json.loads(texts[0]) == {"amount": 0.7} and [*map(json.dumps, again.select([3]))] == [json.dumps(wanted[3])]


def test_upstream_needs_it():
    """`datasets` writes 1e-12 as 0, reads 0.7 as another number, and the text "5" as 5; checksums are of what it writes."""
    spec = importlib.util.find_spec("datasets.utils.json")
    spec.loader.exec_module(own := importlib.util.module_from_spec(spec))
    assert own.ujson_dumps(1e-12) == "0.0" and own.ujson_loads("0.7") != 0.7
    with pytest.raises(ValueError):
        own.ujson_loads("12345678901234567890123")
    assert own.json_encode_field("5", []) == "5", "a text that is JSON is taken for a value that is written"

    def stored(value: object) -> str:
        kinds = datasets.Features({"a": datasets.Json()})
        return datasets.Dataset.from_dict({"a": [value]}, features=kinds).data.column("a").chunk(0).storage[0].as_py()

    day = datetime.datetime(2026, 1, 2)
    for value in ({"a/b": "\x7f\u00e9", "c": [1, 1e-5, 1e16, True, None]}, {"at": day, "n": 0.5}):
        assert stored(value) == own.ujson_dumps(value)
    assert [*map(stored, ("5", {"at": day, "n": 1e-12}))] == ['"5"', '{"at": 1767312000000, "n": 1e-12}']


def test_json_in_other_forms(tmp_path):
    """A byte order mark, blank lines, DOS lines, a list, objects on many lines."""
    rows = [{"text": "a\u2028b\u0085"}, {"text": "c", "n": None}]
    contents = {
        "a.jsonl": "\ufeff\n" + "\r\n \r\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
        "b.json": json.dumps(rows, indent=1),
        "c.json": "\n".join(json.dumps(row, indent=1) for row in rows),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert read_files([str(tmp_path / name)])["text"][:] == ["a\u2028b\u0085", "c"]
    (tmp_path / "d.json").write_text('["x", "y"]', encoding="utf-8")
    assert read_files([str(tmp_path / "d.json")])["text"][:] == ["x", "y"]


def test_a_prediction_may_hold_any_line_end(tmp_path):
    """Those of Unicode stand in our own files as they are."""
    texts = ["a\u2028b\u2029c\x85d\x0be\r\nf", "é"]
    t5 = shipped.load(ROOT / "recipes/t5.py")
    t5.write_predictions(tmp_path / "step-3.jsonl", texts, [["x"]] * 2, texts)
    assert [line["prediction"] for line in read_json_lines(tmp_path / "step-3.jsonl")] == texts


def test_tables_of_polars_and_of_pandas(tmp_path):
    """Other forms of texts, lists and categories are read as the usual ones, beside an image that `datasets` wrote."""
    message = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
    messages = [[{"role": "user", "content": "a"}], [], None]
    table = pa.table(
        {
            "messages": pa.array(messages, pa.large_list(message)),
            "text": pa.array(["a", None, "b"], pa.string_view()),
            "label": pa.array(["x", "y", "x"]).dictionary_encode(),
            "image": pa.array([b"1", b"2", None], pa.binary_view()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    rows = read_files([str(tmp_path / "a.parquet")])
    columns = {"text": ["a", None, "b"], "label": ["x", "y", "x"], "image": [b"1", b"2", None]}
    assert rows.to_dict() == {"messages": messages} | columns
    text = datasets.Value("string")
    assert rows.features["messages"] == datasets.List({"role": text, "content": text})
    assert (rows.features["text"], rows.features["label"]) == (text, text)
    typed = datasets.Features(label=datasets.ClassLabel(names=["n", "y"]), image=datasets.Image())
    datasets.Dataset.from_dict({"label": [1], "image": [None]}, features=typed).to_parquet(tmp_path / "b.parquet")
    assert read_files([str(tmp_path / "b.parquet")]).features == typed


def test_tables_of_spark(tmp_path):
    """A map is read as a list of its entries, a UUID as its bytes: they do no harm beside what is trained."""
    entry = [("a", 1), ("b", None)]
    meta = pa.array([entry], pa.map_(pa.string(), pa.int64()))
    table = pa.table({"text": ["x"], "meta": meta, "id": pa.array([b"0" * 16], pa.uuid())})
    pq.write_table(table, tmp_path / "a.parquet")
    (row,) = read_files([str(tmp_path / "a.parquet")])
    pairs = [{"key": key, "value": value} for key, value in entry]
    assert row == {"text": "x", "meta": pairs, "id": b"0" * 16}


@pytest.mark.parametrize("levels", [9, 80])
def test_values_as_deep_as_a_thread(levels, tmp_path):
    """Arrow cannot hold 64 lists and objects in each other."""
    thread: dict = {"said": "a", "replies": []}
    for _ in range(levels):
        thread = {"said": "a", "replies": [thread]}
    rows = [{"text": "x", "thread": thread}, {"text": "y", "thread": thread | {"said": None}}]
    assert [*read_files([write(tmp_path / "a.jsonl", rows)])] == rows


def test_a_folder_whose_path_is_a_pattern(tmp_path):
    """`datasets` would read another folder, or none: it is refused by name, unless its files are known."""
    write(tmp_path / "v[1]" / "train.jsonl", [{"text": "mine"}])
    write(tmp_path / "v1" / "train.jsonl", [{"text": "other"}])
    said = "v[1]: `datasets` takes [, * and ?"
    name = str(tmp_path / "v[1]")
    for args in (Rows(dataset_name=name), Pairs(dataset_name=name), Pairs(eval_dataset_name=name, eval_split="x")):
        assert said in str(args.problems(1))
    assert said not in str(Pairs(dataset_name=name, train_files=[f"{name}/train.jsonl"]).problems(1))
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "s[1]")
    assert said not in str(Rows(dataset_name=str(tmp_path / "s[1]")).problems(1))


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_a_pointer_of_git_is_no_data(suffix, tmp_path):
    """It is told before anything is read, or where a folder's files are read, with the remedy."""
    (tmp_path / "a").mkdir()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
    (file := tmp_path / f"a/train.{suffix}").write_text(pointer)
    chess = shipped.load(ROOT / "recipes/chess.py")
    found = [Rows(train_files=[str(file)]).problems(1), Rows(eval_files=[str(tmp_path / "a")]).problems(1)]
    found += [chess.Args(train_files=[str(file)]).problems(1)] if suffix != "csv" else []
    for problems in map(str, found):
        assert f"{file} is a git-LFS pointer" in problems and "git lfs pull" in problems
    if suffix != "csv":
        with pytest.raises(ConfigError, match="is a git-LFS pointer"):
            named_shards([str(file)])
    with pytest.raises(DataError, match="is a git-LFS pointer"):
        read_split(HubDataset(str(tmp_path / "a")), "train")


def test_a_folder_of_save_to_disk_is_read(tmp_path):
    parts = {name: datasets.Dataset.from_dict({"text": [name] * 9}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both [1]")
    parts["train"].save_to_disk(tmp_path / "one", num_shards=2)
    assert read_split(HubDataset(str(tmp_path / "both [1]")), "test[:3]")["text"][:] == ["test"] * 3
    args = RowsArgs(dataset_name=str(tmp_path / "one"))
    assert args.read_rows()["train"]["text"][:] == ["train"] * 9
    args = RowsArgs(train_files=[str(tmp_path / "one"), str(tmp_path / "both [1]/test")])
    assert args.read_rows()["train"]["text"][:] == ["train"] * 9 + ["test"] * 9
    assert f"both [1] holds the splits train, test; name that of one, {tmp_path}/both [1]/test" in str(
        Rows(train_files=[str(tmp_path / "both [1]")]).problems(1)
    )
    with pytest.raises(DataError, match="one, split test cannot be read: there is no split test; there are train"):
        read_split(HubDataset(str(tmp_path / "one")), "test")
