"""Tests of download, verify, list, and of runs that need no network, with a Hub on the loopback interface."""

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import CONFIGS, ROOT, log_of, read_metrics, refuses
from huggingface_hub import constants
from loopback_hub import C4, CHESS, Commands, LoopbackHub, model_files

from accelerate_recipes import recipe
from accelerate_recipes.data.files import read_split
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.hub import cache as hub_cache
from accelerate_recipes.hub import download
from accelerate_recipes.hub.cache import MANIFEST, HubDataset, HubModel, bytes_of, dataset_files, folder, lacking
from accelerate_recipes.launch import requirements

CARD = """---
configs:
- config_name: cs-en
  data_files: [{split: train, path: cs-en/train-*}]
- config_name: fr-en
  data_files: [{split: train, path: fr-en/train-*}, {split: validation, path: fr-en/validation-*}]
---
"""
TABLE_CARD = """---
configs:
- config_name: default
  sep: "\\t"
  data_files: [{split: test, path: table.csv}]
---
"""


def parquet(rows) -> bytes:
    file = io.BytesIO()
    pq.write_table(rows, file)
    return file.getvalue()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = LoopbackHub()
    files = model_files(tmp_path_factory.mktemp("model"))
    server.push("models/tiny/llama", files)
    server.push("models/codellama/CodeLlama-7b-hf", files)
    server.push("models/meta-llama/Llama-3.1-8B", files)
    server.push("models/gated/llama", files, gated=True)
    games = pq.read_table(ROOT / "data/chess/games_20k.parquet")
    parts = {f"data/chess_game_000{i + 1}.parquet": parquet(games.slice(100 * i, 100)) for i in range(3)}
    server.push("datasets/tiny/games", parts | {"README.md": b"A card."})
    server.push("datasets/laion/strategic_game_chess", parts)
    pages = ROOT / "data/c4_pydoc"
    server.push("datasets/allenai/c4", {f"en/{path.name}": path.read_bytes() for path in pages.glob("en/*")})
    pairs = pa.Table.from_pylist([{"translation": {"en": f"dog {i}", "fr": f"chien {i}"}} for i in range(9)])
    wmt = {f"{to}/train-0000{i}.parquet": parquet(pairs.slice(4 * i, 4)) for to in ("cs-en", "fr-en") for i in (0, 1)}
    wmt |= {"README.md": CARD.encode(), "fr-en/validation-0.parquet": parquet(pairs.slice(8))}
    server.push("datasets/wmt/wmt14", wmt)
    server.push("datasets/tiny/table", {"README.md": TABLE_CARD.encode(), "table.csv": b"a\tb\n1\t2\n"})
    server.moved["datasets/wmt14"] = "datasets/wmt/wmt14"
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def commands(server, tmp_path_factory):
    commands = Commands(server.url, tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def home(server, commands, tmp_path_factory):
    """Cache with what both recipes need, downloaded once. Tests that change it use a copy."""
    home = tmp_path_factory.mktemp("home")
    server.sent.clear()
    commands.ok(home / "hf/hub", "download", *CHESS)
    commands.ok(home / "hf/hub", "download", *C4, "--max_shards", 2)
    return home


@pytest.fixture
def cache(home, tmp_path):
    shutil.copytree(home / "hf/hub", tmp_path / "hf/hub", symlinks=True)
    return tmp_path / "hf/hub"


def test_fetches_what_the_run_reads(server, commands, home):
    names = {path.partition("/")[2] for path in server.sent}
    assert {name for name in names if name.startswith("tiny/llama/")} == {
        f"tiny/llama/{name}"
        for name in (
            "config.json", "generation_config.json", "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
            "tokenizer_config.json", "additional_chat_templates/short.jinja",
        )
    }  # fmt: skip
    assert {name for name in names if "games" in name} == {f"tiny/games/data/chess_game_000{i}.parquet" for i in (1, 2)}
    assert sorted(name for name in names if "c4" in name) == [
        "allenai/c4/en/c4-train.00000-of-01024.json.gz",
        "allenai/c4/en/c4-train.00001-of-01024.json.gz",
        "allenai/c4/en/c4-validation.00000-of-00008.json.gz",
    ]
    assert len(server.sent) == len(names)  # once each, though both recipes need the tokenizer
    found = commands.ok(home / "hf/hub", "list")
    assert found.count("complete") == 3 and "commit " + server.repositories["datasets/tiny/games"].main[:12] in found
    assert "    for recipes/chess.py --model_name_or_path tiny/llama" in found
    assert "    for --max_shards 2 recipes/c4.py" in found
    assert "13 files" in commands.ok(home / "hf/hub", "verify")
    assert "all here" in commands.ok(home / "hf/hub", "download", *CHESS) and len(server.sent) == len(names)


def test_runs_without_network(server, home, forks, monkeypatch):
    """Both recipes run without a request to the Hub, whose address is set; after `--update` they use another model."""
    hub = {"TESTED_CACHE": home / "hf/hub", "HF_ENDPOINT": server.url}
    asked = len(server.requests)
    for command, more in (
        (CHESS, ["--num_positions", 6, "--heldout_share", 0.1, "--max_length", 128, "--max_steps", 2]),
        (C4, ["--config_overrides", "hidden_size=32", "intermediate_size=32", "num_attention_heads=2", "num_hidden_layers=1",
              "--num_validation_rows", 4, "--max_length", 64]),
    ):  # fmt: skip
        out = home / Path(command[0]).stem
        batch = ["--total_batch_size", 4, "--per_device_eval_batch_size", 2]
        batch += ["--data_cache_dir", home / "data"] if command is CHESS else []
        code = forks.run(out, *command[1:], *more, *batch, script=ROOT / command[0], **hub)
        assert code == 0, log_of(out)[-4000:]
        assert read_metrics(out)[-1]["step"] == 2 and (out / "export/model.safetensors").is_file()
    assert len(server.requests) == asked
    assert "1 shards" not in (home / "c4.log").read_text() and "Data: 2 shards" in (home / "c4.log").read_text()

    # Each rank reports missing files before there is a process group, with the command.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hf/hub"))
    lost = folder("model", "tiny/llama") / "model-00002-of-00002.safetensors"
    link = os.readlink(lost)
    lost.unlink()
    assert forks.run(home / "missing", *CHESS[1:], script=ROOT / CHESS[0], **hub) == 2
    lost.symlink_to(link)
    log = (home / "missing.log").read_text()
    assert "model 'tiny/llama' is incomplete in " in log and "it lacks model-00002-of-00002.safetensors" in log
    assert f"python -m accelerate_recipes download {ROOT}/recipes/chess.py --output_dir" in log
    assert "Strategy" not in log and not (home / "missing").exists()


def test_stays_at_its_commit(server, commands, cache):
    """A repository stays at its commit until --update, even if the branch moves and more is requested."""
    games = server.repositories["datasets/tiny/games"]
    before, first = games.main, next(iter(games.commits.values()))
    after = games.push({name: data[::-1] for name, data in first.items()})
    more = ["--dataset_files", "data/*.parquet"]
    try:
        assert before[:12] in commands.ok(cache, "download", *CHESS, *more)
        assert commands.ok(cache, "verify")
        manifest = json.loads((cache / "datasets--tiny--games" / MANIFEST).read_text())
        assert manifest["revision"] == before and len(manifest["files"]) == 3 and len(manifest["asked"]) == 2
        assert after[:12] in commands.ok(cache, "download", "--update", *CHESS, *more)
        snapshot = cache / "datasets--tiny--games/snapshots" / after
        assert (snapshot / "data/chess_game_0003.parquet").read_bytes() == first["data/chess_game_0003.parquet"][::-1]
    finally:
        games.main = before


def test_killed_and_gone_on_with(server, commands, tmp_path):
    cache = tmp_path / "hub"
    server.sent.clear()
    server.seconds_per_chunk = 0.1
    process = commands.start(cache, "download", *CHESS)
    deadline = time.monotonic() + 60
    while len(list(cache.glob("models--tiny--llama/snapshots/*/*"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    assert commands.end()[0] == -signal.SIGKILL
    server.seconds_per_chunk = 0.0
    linked = cache.glob("models--tiny--llama/snapshots/*/*")
    here = {f"models/tiny/llama/{path.name}" for path in linked if path.exists()}
    assert len(here) >= 4
    assert "model-00001-of-00002.safetensors" in commands.ok(cache, "list")
    code, output = commands.run(cache, "verify")
    assert code == 1 and "model-00001-of-00002.safetensors is missing; run: " in output
    server.sent.clear()
    commands.ok(cache, "download", *CHESS)
    assert not here & set(server.sent) and "models/tiny/llama/model-00001-of-00002.safetensors" in server.sent
    assert "complete and unchanged" in commands.ok(cache, "verify")


def test_a_changed_byte_is_found(commands, cache):
    (weights,) = cache.glob("models--tiny--llama/snapshots/*/model-00001-of-00002.safetensors")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.resolve().write_bytes(data)
    (config,) = cache.glob("models--tiny--llama/snapshots/*/config.json")
    config.resolve().write_text(config.read_text().replace("1", "2", 1))
    code, output = commands.run(cache, "verify")
    assert code == 1 and output.count("is damaged") == 2
    again = next(line for line in output.splitlines() if weights.name in line).partition("; run: ")[2]
    remove, _, download = again.partition(" && ")
    subprocess.run(remove, shell=True, check=True)
    assert download.startswith("python -m accelerate_recipes download recipes/")
    commands.ok(cache, *shlex.split(download)[3:])
    code, output = commands.run(cache, "verify")
    assert code == 1 and output.count("is damaged") == 1 and "config.json" in output


def test_gated_and_secret(server, commands, tmp_path):
    gated = [*CHESS, "--model_name_or_path", "gated/llama"]
    code, output = commands.run(tmp_path / "hub", "download", *gated)
    assert code == 1 and f"accept its terms at {server.url}/gated/llama" in output
    output = commands.ok(tmp_path / "hub", "download", *gated, HF_TOKEN=server.token)
    assert (tmp_path / "hub/models--gated--llama").is_dir()
    places = [tmp_path, commands.log.parent]
    written = [path.read_bytes() for place in places for path in place.rglob("*") if path.is_file()]
    assert len(written) > 10 and not any(server.token.encode() in data for data in written)


def test_all_that_cannot_be_had_at_once(commands, tmp_path):
    argv = [
        "recipes/chess.py", "--model_name_or_path", "no/model", "--dataset_name", "tiny/games", "--dataset_files",
        "*.pgn",
    ]  # fmt: skip
    code, output = commands.run(tmp_path / "hub", "download", *argv)
    assert code == 1 and "model 'no/model' is not on http://127" in output
    assert "dataset 'tiny/games' (*.pgn) has no file" in output
    code, output = commands.run(tmp_path / "hub", "download", "recipes/chess.py", "--max_shard", 2)
    assert code == 1 and "unknown argument 'max_shard'" in output
    code, output = commands.run(tmp_path / "hub", "download", *CHESS, HF_ENDPOINT="ignored: read at import")
    assert code == 0, output


def test_too_little_space(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not/yet"))
    plan = {"type": "model", "name": "a/b", "files": {"w": {"size": 2**60, "checksum": "sha256:00"}}}
    with pytest.raises(ConfigError, match=r"1073741824.00 GiB are to be fetched, but .* has .* GiB free; .*HF_HOME"):
        download.check_download_fits([plan])
    (tmp_path / "not/yet/models--a--b/blobs").mkdir(parents=True)
    with open(tmp_path / "not/yet/models--a--b/blobs/00", "wb") as blob:
        blob.truncate(5)
    plan["files"]["w"]["size"] = 5
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(5, 5, 0))
    download.check_download_fits([plan])  # nothing to fetch


def test_fewer_shards_take_the_place_of_more(server, commands, cache, monkeypatch):
    """The run needs and reads only the last request, for example after a download of all of C4 was given up."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    need = HubDataset("allenai/c4", files="en/c4-train.*.json.gz")
    manifest = cache / "datasets--allenai--c4" / MANIFEST
    assert len(dataset_files("allenai/c4", need.files)) == 2
    commands.ok(cache, "download", *C4)
    assert len(dataset_files("allenai/c4", need.files)) == 4
    assert bytes_of(need) == sum(Path(file).stat().st_size for file in dataset_files("allenai/c4", need.files)) > 0
    assert bytes_of(HubDataset("nobody/nothing")) == 0
    Path(dataset_files("allenai/c4", need.files)[3]).unlink()
    assert lacking(need) == ["en/c4-train.00003-of-01024.json.gz"]
    assert lacking(HubDataset("allenai/c4", files="en/*.0000[12]-*")) == []
    assert lacking(HubDataset("allenai/c4", files="en/*.0001*")) == ["a file that matches 'en/*.0001*'"]
    commands.ok(cache, "download", *C4, "--max_shards", 1)
    assert lacking(need) == [] and len(dataset_files("allenai/c4", need.files)) == 1
    assert len(json.loads(manifest.read_text())["files"]) == 2  # and one to validate on
    assert lacking(HubDataset("allenai/c4", files="en/*train*")) == []


def test_a_cache_is_carried_with_tar(cache, commands, tmp_path):
    subprocess.run(["tar", "-C", cache.parent, "-cf", tmp_path / "hub.tar", "hub"], check=True)
    (tmp_path / "there").mkdir()
    subprocess.run(["tar", "-C", tmp_path / "there", "-xf", tmp_path / "hub.tar"], check=True)
    shutil.rmtree(cache)
    assert "13 files" in commands.ok(tmp_path / "there/hub", "verify")


def test_configurations_of_datasets(server, commands, tmp_path, monkeypatch):
    """Splits of one configuration, under an old name, are downloaded as a recipe for pairs needs them, then read offline."""
    script = tmp_path / "pairs.py"
    script.write_text(
        "from accelerate_recipes.args import TrainArgs as Args\n"
        "from accelerate_recipes.hub.cache import HubDataset\n"
        "from accelerate_recipes.recipe import Requirements\n"
        "main = None\n"
        "def requirements(args):\n"
        "    datasets = [HubDataset('wmt14', config='fr-en', splits=('train[:5]+validation', '')), HubDataset('tiny/table')]\n"
        "    return Requirements(datasets=datasets)\n"
    )
    cache = tmp_path / "hub"
    server.sent.clear()
    commands.ok(cache, "download", script)
    assert sorted(path for path in server.sent if not path.endswith("README.md")) == [
        "datasets/tiny/table/table.csv",
        "datasets/wmt/wmt14/fr-en/train-00000.parquet",
        "datasets/wmt/wmt14/fr-en/train-00001.parquet",
        "datasets/wmt/wmt14/fr-en/validation-0.parquet",
    ]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "arrow")
    needs = requirements.needs_of([str(script)])
    assert not any(map(lacking, needs))
    split = "train[:5]+validation"
    rows = read_split(HubDataset("wmt14", config="fr-en", splits=(split,)), split)
    assert [row["translation"]["fr"] for row in rows] == [f"chien {i}" for i in (0, 1, 2, 3, 4, 8)]
    assert read_split(HubDataset("tiny/table", splits=("test",)), "test")[0] == {"a": 1, "b": 2}
    with pytest.raises(ConfigError, match=r"dataset 'wmt14' \(cs-en\) was not downloaded"):
        read_split(HubDataset("wmt14", config="cs-en", splits=("train",)), "train")
    assert lacking(HubDataset("wmt14", config="fr-en", splits=("test",))) == ["split test"]
    assert lacking(HubDataset("wmt14", config="cs-en")) == ["all of it"]
    (file,) = cache.glob("datasets--wmt14/snapshots/*/fr-en/train-00001.parquet")
    file.unlink()
    assert lacking(needs[0]) == ["fr-en/train-00001.parquet"] and not lacking(needs[1])


def test_t5_by_revision_and_pattern(server, commands, tmp_path, monkeypatch):
    """T5's presets need files of one branch, a validation split of another dataset, and weights without safetensors."""
    old = server.repositories["datasets/wmt/wmt14"].main
    server.push("datasets/wmt/wmt14", {"README.md": b"Moved on."})
    model = server.repositories["models/tiny/llama"]
    files = {name: data for name, data in model.commits[model.main].items() if not name.startswith("model")}
    server.push("models/tiny/old", files)
    argv = [
        "recipes/t5.py", "--model_name_or_path", "tiny/old", "--dataset_name", "wmt/wmt14", "--dataset_config", "",
        "--dataset_revision", old, "--dataset_files", "fr-en/*-0000[01].parquet", "--train_split", "train[:3]",
        "--eval_dataset_name", "tiny/table", "--eval_split", "test",
    ]  # fmt: skip
    cache = tmp_path / "hub"
    try:
        output = commands.ok(cache, "download", *argv)
    finally:
        server.repositories["datasets/wmt/wmt14"].main = old
    assert f"wmt/wmt14 at commit {old[:12]}: 2 files" in output and "tiny/table" in output
    assert list(cache.glob("models--tiny--old/snapshots/*/pytorch_model.bin"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "arrow")
    needs = requirements.needs_of([str(ROOT / argv[0]), *argv[1:]])
    assert [lacking(need) for need in needs] == [[], [], []]
    (train,) = [need for need in needs if need.name == "wmt/wmt14"]
    assert len(read_split(train, "train[:3]")) == 3
    assert lacking(HubDataset("wmt/wmt14", files="fr-en/*-0000[01].parquet")) == ["revision main"]


def test_what_others_put_into_the_cache(server, tmp_path, monkeypatch):
    """A cache from `hf download`, without a manifest, is accepted if it has the files that every model needs."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--tiny--llama"
    for name, data in next(iter(server.repositories["models/tiny/llama"].commits.values())).items():
        file = repository / "snapshots/abc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    assert lacking(HubModel("tiny/llama")) == ["all of it"]
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    assert lacking(HubModel("tiny/llama")) == [] and hub_cache.pinned("tiny/llama")["revision"] == "abc"
    (repository / "snapshots/abc/model-00001-of-00002.safetensors").unlink()
    assert lacking(HubModel("tiny/llama")) == ["model-00001-of-00002.safetensors"]
    (repository / "snapshots/abc/tokenizer.json").unlink()
    assert lacking(HubModel("tiny/llama", weights=False)) == ["tokenizer.json"]
    assert lacking(HubDataset(str(repository), files="snapshots/*/config.json")) == []
    assert lacking(HubDataset(str(repository), files="*.gz")) == ["a file that matches '*.gz'"]
    shutil.rmtree(repository / "snapshots")  # as after a download that was interrupted
    assert lacking(HubModel("tiny/llama")) == lacking(HubModel("tiny/llama", weights=False)) == ["all of it"]
    (problem, remedy) = requirements.lacking_problems([HubModel("tiny/llama")], ["recipes/some.py"])
    assert problem == f"model 'tiny/llama' is not in {tmp_path}" and "download recipes/some.py" in remedy


def test_an_online_run_downloads_first(monkeypatch, tmp_path):
    """The first process of a machine downloads; another waits until everything is here. Streamed data are not downloaded."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    here, fetched = [], []
    monkeypatch.setattr("accelerate_recipes.hub.cache.lacking", lambda need: [] if need in here else ["all of it"])
    monkeypatch.setattr(requirements, "download", lambda needs, command: here.extend(needs) or fetched.extend(needs))
    monkeypatch.setattr(requirements, "check_models", lambda args, needed: ([], []))
    needed = requirements.Requirements(models=["a/b"], datasets=[HubDataset("c/d", files="*", streamed=True)])
    requirements.provide(recipe.TrainArgs(), needed, ["recipes/some.py"])
    assert fetched == [HubModel("a/b")]
    monkeypatch.setenv("LOCAL_RANK", "1")
    here.clear()
    needed.datasets.append(HubDataset(str(tmp_path), files="*.gz", streamed=True))
    monkeypatch.setattr(time, "sleep", lambda seconds: here.append(HubModel("a/b")))
    with pytest.raises(ConfigError, match=r"is a folder, but lacks all of it"):  # because `lacking` is replaced here
        requirements.provide(recipe.TrainArgs(), needed, ["recipes/some.py"])
    assert here == fetched == [HubModel("a/b")]
    # No repository can have the name of this folder, so nobody waits for it.
    missing = HubModel(f"{tmp_path}/typo")
    for fn in (
        lambda: requirements.provide(recipe.TrainArgs(), requirements.Requirements(models=[missing.name]), ["some.py"]),
        lambda: download.download([missing], ["some.py"]),
    ):
        refuses(f":\n  - model '{missing.name}': no such folder$", fn)


def test_preflight_says_what_is_not_here(commands, tmp_path):
    """A missing file is a warning online, since the run would download it, and an error offline."""
    argv = ["preflight", CONFIGS / "fsdp_full.yaml", *CHESS, "--output_dir", tmp_path / "out"]
    output = commands.ok(tmp_path / "hub", *argv)
    assert "warning: model 'tiny/llama' is not in" in output
    assert f"download {shlex.join(CHESS)}" in output


def test_commands_of_the_pages(commands, tmp_path):
    """Run the downloads and checks of docs/start.md and docs/offline.md with what this Hub has under those names."""
    pages = (ROOT / "docs/start.md").read_text() + (ROOT / "docs/offline.md").read_text()
    blocks = re.findall(r"```bash\n# (?:where|on) .*?```", pages, re.DOTALL)
    commands_shown = ("python -m accelerate_recipes download", "python -m accelerate_recipes preflight")
    lines = {line for block in blocks for line in block.splitlines() if line.startswith(commands_shown)}
    found = sorted(shlex.split(line)[3:] for line in lines)
    assert [words[0] for words in found] == ["download", "download", "preflight"]
    for words in found:
        output = commands.ok(tmp_path / "hub", *words)
        assert "warning: model" not in output and "warning: dataset" not in output
    assert len(list((tmp_path / "hub").glob(f"*/{MANIFEST}"))) == 4
    assert not list(tmp_path.glob("hub/models--meta-llama--*/snapshots/*/*.safetensors"))  # only its tokenizer is used


RECORD = {
    "name": "tiny/llama", "type": "model", "branch": "main", "revision": "0123", "configs": {},
    "files": {"config.json": {"size": 2, "checksum": "sha256:0"}},
    "asked": {"model": {"files": ["config.json"], "recipes": ["recipes/c4.py"]}},
}  # fmt: skip
DAMAGED = [
    "", json.dumps(RECORD)[:50], "null", "[]", "{}", "[" * 10**5, json.dumps(RECORD | {"revision": None}), json.dumps(RECORD | {"files": []}),
    json.dumps(RECORD | {"files": {"config.json": {"size": "2"}}}), json.dumps(RECORD | {"asked": {}}),
    json.dumps(RECORD | {"asked": {"model": {"files": ["config.json"], "recipes": []}}}), json.dumps(RECORD | {"configs": None}),
]  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_record_is_one_message(tmp_path, monkeypatch, command, content):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    file = hub_cache.repository("model", "tiny/llama") / MANIFEST
    file.parent.mkdir()
    file.write_text(json.dumps(RECORD))
    assert lacking(HubModel("tiny/llama")) == ["config.json"], "this one is whole"
    file.write_text(content)
    preflight = ["preflight", str(CONFIGS / "single.yaml"), *C4]
    for words in (["list"], ["verify"], preflight):
        done = command(*words)
        assert done.returncode == 1 and done.stderr.count("\n") == 1
        assert f"error: {file}, the record of a download, is damaged; remove it" in done.stderr
