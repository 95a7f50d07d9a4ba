"""Tests that the shipped YAMLs say what they do, and that preflight finds what Accelerate would silently drop."""

import errno
import re
import shutil
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import xxhash
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from helpers import CHILDREN, CONFIGS, ROOT, refused, refuses, without_runs
from huggingface_hub import constants

from accelerate_recipes import recipe
from accelerate_recipes.arguments import shipped
from accelerate_recipes.checkpoint.files import write_marker
from accelerate_recipes.errors import ConfigError
from accelerate_recipes.launch import requirements
from accelerate_recipes.launch import settings as launcher_module
from accelerate_recipes.launch.settings import launcher_problems, yaml_problems
from recipe_tools import machine
from recipe_tools.preflight import preflight
from recipe_tools.request import launch_environment, read_request

SHIPPED = sorted(CONFIGS.glob("*.yaml"))
LAPTOP = [str(ROOT / "recipes/chess.py"), "--config", str(ROOT / "recipes/configs/chess/laptop.yaml")]


pytestmark = pytest.mark.usefixtures("at_the_root")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped(path):
    assert yaml_problems(path) == []
    text, content = path.read_text(), yaml.safe_load(path.read_text())
    for word in ("# Choose it:", "# Costs:", "# Needs:"):
        assert word in text
    precisions = {"single_bf16": "no", "single_fp8": "fp8", "fsdp_fp8": "fp8"}
    assert content["mixed_precision"] == precisions.get(path.stem, "bf16")
    numbers = {"fsdp_hybrid": 4} if content["distributed_type"] != "NO" else {path.stem: 1}
    assert content["num_processes"] == numbers.get(path.stem, 2)
    if content["distributed_type"] == "FSDP":
        fsdp = content["fsdp_config"]
        strategy = "fsdp_reshard_after_forward" if fsdp["fsdp_version"] == 2 else "fsdp_sharding_strategy"
        assert {"fsdp_auto_wrap_policy", "fsdp_state_dict_type", strategy} <= set(fsdp)
        assert "fsdp_transformer_layer_cls_to_wrap" not in fsdp


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_key_reaches_the_environment(path):
    """The launcher passes on each FSDP setting."""
    content = yaml.safe_load(path.read_text())
    env = launch_environment(["--config_file", str(path), "recipe.py"])
    assert env["WORLD_SIZE"] == str(content["num_processes"])
    for key, value in (content.get("fsdp_config", {}) | content.get("parallelism_config", {})).items():
        assert env[key.upper()].lower() == str(value).lower()
    of_fp8 = {f"fp8_{key}": value for key, value in content.get("fp8_config", {}).items()}
    for key, value in (content.get("dynamo_config", {}) | of_fp8).items():
        assert env[f"ACCELERATE_{key.upper()}"].lower() == str(value).lower()


@pytest.mark.parametrize("flags, args, said", [
    ([], [], "2 processes; 16 sequences a step = 2 processes x 8 x 1"),
    (["--num_processes", "4"], ["--per_device_train_batch_size", "4"], "4 processes x 4 x 1"),
    ([], ["--max_steps", "6", "--warmup_steps", "100"], "warning: --warmup_steps 100 of 6 steps: "),
])  # fmt: skip
def test_what_preflight_says(flags, args, said):
    found, _ = preflight([str(CONFIGS / "fsdp_full.yaml"), *flags, *LAPTOP, *args])
    assert said in found and ("warmup" in found) == ("--warmup_steps" in args)


BROKEN = """
distributed_type: FSDP
mixed_precision: bf61
num_procesess: 2
parallelism_config:
  dp_replicate_size: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_polcy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_offload_params: maybe
"""


def test_all_problems_of_yaml_and_arguments_at_once(tmp_path):
    config = tmp_path / "broken.yaml"
    config.write_text(BROKEN)
    with refused(
        "unknown key 'num_procesess'; did you mean 'num_processes'?",
        "mixed_precision is 'bf61'; it must be one of bf16, fp16, fp8, no",
        "parallelism_config has an unknown key 'dp_replicate_size', which Accelerate ignores; "
        "did you mean 'parallelism_config_dp_replicate_size'?",
        "unknown key 'fsdp_auto_wrap_polcy', which Accelerate ignores; did you mean 'fsdp_auto_wrap_policy'?",
        "fsdp_sharding_strategy has no effect with fsdp_version: 2; use fsdp_reshard_after_forward",
        "fsdp_offload_params is 'maybe'; it must be one of false, true",
        "num_processes is None",
        "unknown argument 'lerning_rate' on the command line; did you mean 'learning_rate'?",
        "--train_files nowhere.pgn: no such file",
    ):
        preflight([str(config), *LAPTOP, "--lerning_rate", "1", "--train_files", "nowhere.pgn"])


@pytest.mark.parametrize(
    "content, reason", [(b"fsdp_config: [", "is not YAML"), (b"# gr\xfcn", "is not UTF-8"), (b"8", "holds no")]
)
@pytest.mark.parametrize("nodes", [[], ["--nodes", "2"]])
def test_an_unreadable_yaml(content, reason, nodes, tmp_path):
    """An unreadable YAML is one problem, also with a number of nodes, for which it is read beforehand."""
    (tmp_path / "config.yaml").write_bytes(content)
    said = refuses(rf"config\.yaml {reason}", preflight, [str(tmp_path / "config.yaml"), *nodes, *LAPTOP])
    assert said.count("  - ") == 1


WRONG_VALUES = {
    "mixed_precision: [bf16]": "mixed_precision is ['bf16']; it must be one of bf16, fp16, fp8, no",
    "mixed_precision: no": "mixed_precision is False; it must be one of bf16, fp16, fp8, no; put it in quotes",
    "num_processes: true": "num_processes is True; it must be a whole number",
    "num_processes: 0": "num_processes is 0; accelerate needs a number",
    "num_machines: two": "num_machines is 'two'; it must be a whole number",
    "gpu_ids: 0": "gpu_ids is 0; it must be a text; put it in quotes",
    "dynamo_config: 3": "dynamo_config must hold `dynamo_...: value` lines, not 3",
    "fsdp_config: {7: 1}": "fsdp_config has an unknown key 7, which Accelerate ignores",
    "fsdp_config: {fsdp_version: true}": "fsdp_version is True; it must be one of 1, 2",
    "fsdp_config: {fsdp_offload_params: 1}": "fsdp_offload_params is 1; it must be one of false, true",
    "fsdp_config: {fsdp_auto_wrap_policy: [[a]]}": "fsdp_auto_wrap_policy is [['a']]; it must be one of ",
    "fsdp_config: {fsdp_transformer_layer_cls_to_wrap: [A, B]}": "is ['A', 'B']; it must be one value",
    "parallelism_config: {parallelism_config_cp_size: [2]}": "parallelism_config_cp_size is [2]; it must be a whole number",
    "debug: false\ndebug: true": "debug stands twice, in lines ",
    "tpu_env: [&a [x], *a, &b [*a], *b]": "an alias repeats a list or a section with others in it",
}


@pytest.mark.parametrize("line", WRONG_VALUES)
def test_a_value_of_another_kind(line, tmp_path):
    """Each is one message, however many lines of a traceback Accelerate has for it."""
    key = line.partition(":")[0]
    text = "\n".join(kept for kept in MINIMAL if not kept.startswith(key))
    (tmp_path / "config.yaml").write_text(f"{text}\n{line}\n")
    (problem,) = yaml_problems(tmp_path / "config.yaml")
    assert WRONG_VALUES[line] in problem


MINIMAL = ["distributed_type: FSDP", "mixed_precision: 'no'", "num_processes: 2", "fsdp_config: {version: 2}"]


def test_what_accelerate_reads_is_read(tmp_path):
    """Keys without their section's prefix, an empty section, and a number of processes that only a flag gives."""
    config = tmp_path / "config.yaml"
    config.write_text("\n".join([*MINIMAL, "dynamo_config:", "main_process_port: 0"]).replace("num_processes: 2\n", ""))
    assert "3 processes" in preflight([str(config), "--num_processes", "3", *LAPTOP, "--total_batch_size", "24"])[0]
    refuses("num_processes is None; accelerate needs a number", preflight, [str(config), *LAPTOP])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_file_of_accelerate_config(path, tmp_path):
    """`accelerate config` writes all keys that the installed version knows."""
    ClusterConfig.from_yaml_file(path).to_yaml_file(tmp_path / "default_config.yaml")
    written = yaml.safe_load((tmp_path / "default_config.yaml").read_text())
    assert {"downcast_bf16", "tpu_use_cluster"} <= written.keys()
    assert yaml_problems(tmp_path / "default_config.yaml") == []


@pytest.mark.parametrize("flags, said", [
    (["--nodes", "0"], "--nodes is 0; it must be at least 1"),
    (["--nodes", "-1"], "--nodes is -1; it must be at least 1"),
    (["--nodes", "two"], "argument --nodes: invalid int value: 'two'"),
    (["--cpus-per-node", "0"], "--cpus-per-node is 0; it must be at least 1"),
    (["--num_processes", "0"], "0 processes (--num_processes) on 1 machines"),
    (["--num_processes", "two"], "accelerate launch refuses: argument --num_processes/--num-processes: invalid int"),
    (["--num_machines", "3"], "2 processes (--num_processes) on 3 machines"),
    (["--config_file", "other.yaml"], "--config_file other.yaml: the accelerate YAML is given once"),
    (["--num_proceses", "2"], "refuses: unrecognized arguments: --num_proceses; did you mean '--num_processes'?"),
    (["--node", "2"], "refuses: unrecognized arguments: --node; did you mean '--nodes'?"),
    (["--nodes", "2", "--gpus-per-nod", "8"], "--gpus-per-nod; did you mean '--gpus-per-node'?"),
    (["--nodes", "2", "--lora_r", "8"], "--lora_r; arguments of the recipe come after the recipe"),
])  # fmt: skip
def test_wrong_flags_of_the_launcher(flags, said):
    with refused(said):
        preflight([str(CONFIGS / "fsdp_full.yaml"), *flags, *LAPTOP])


@pytest.mark.parametrize("content, expected", [
    ("import nowhere", " cannot be imported: ModuleNotFoundError: No module named 'nowhere' (line 1)"),
    ("import torch.nowhere", " cannot be imported: ModuleNotFoundError: No module named 'torch.nowhere' (line 1)"),
    ("def f(:", " cannot be imported: SyntaxError: invalid syntax (broken.py, line 1)"),
    ("\nint('q')", " cannot be imported: ValueError: invalid literal for int() with base 10: 'q' (line 2)"),
])  # fmt: skip
def test_a_recipe_that_cannot_be_imported(content, expected, tmp_path):
    (tmp_path / "broken.py").write_text(content)
    said = re.escape(f"{tmp_path}/broken.py{expected}")
    refuses(f"^{said}$", preflight, [str(CONFIGS / "fsdp_full.yaml"), str(tmp_path / "broken.py")])


@pytest.mark.parametrize("pattern", ["/abs/*.json", "**x/*.json", "."])
def test_patterns_that_are_none(pattern, tmp_path):
    (tmp_path / "a.json").touch()
    c4 = [
        "recipes/c4.py", "--dataset_name", str(tmp_path), "--dataset_files", pattern, "--max_steps", "3", "--sed",
        "1",
    ]  # fmt: skip
    refuses(r"argument 'sed'(.|\n)*is no pattern of files inside ", preflight, [str(CONFIGS / "fsdp_full.yaml"), *c4])


@pytest.mark.parametrize(
    "name, flags, remedy",
    [("fsdp_full", ("--cpu",), "leave out --cpu"), ("ddp", ("--cpu",), "leave out --cpu"), ("single", (), "take fsdp_full.yaml")],
)  # fmt: skip
def test_fewer_processes_than_asked_for(name, flags, remedy):
    """The launcher would start one, in silence."""
    with pytest.raises(ConfigError, match=rf"3 processes .*{name}.yaml, but accelerate launch starts 1; {remedy}"):
        preflight([str(CONFIGS / f"{name}.yaml"), *flags, "--num_processes", "3", *LAPTOP])


@pytest.mark.parametrize("launcher", [
    ["python", "/venv/bin/accelerate", "launch"],
    ["python", "-m", "accelerate.commands.launch"],
    ["python", "-m", "accelerate_recipes", "launch"],
    ["python", "/env/bin/accelerate-recipes", "launch"],
    ["/venv/bin/python3", "-u", "-m", "accelerate.commands.accelerate_cli", "launch"],
    ["python", "/venv/bin/accelerate-launch"],
], ids=lambda words: " ".join(words[1:]))  # fmt: skip
@pytest.mark.parametrize("named", [True, False], ids=["--config_file", "the user's default"])
def test_a_launch_says_what_preflight_says(launcher, named, tmp_path, monkeypatch):
    """The launched process finds the YAML of its launcher, behind a wrapper too, and refuses the same with the same words."""
    monkeypatch.chdir(tmp_path)
    Path("typo.yaml").write_text(
        (CONFIGS / "fsdp_full.yaml").read_text().replace("reshard_after_forward", "reshard_afterforward")
    )
    (problem,) = yaml_problems(Path("typo.yaml"))
    assert "unknown key 'fsdp_reshard_afterforward', which Accelerate ignores; did you mean" in problem
    if not named:
        monkeypatch.setattr(launcher_module, "default_config_file", "typo.yaml")
    flags = ["--config_file", "typo.yaml"] if named else []
    command = [*launcher, *flags, "--num_processes", "2", "recipes/chess.py", "--config_file", "not/the/launchers.yaml"]

    def parents(self) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(cmdline=lambda words=words: words, cwd=lambda: str(tmp_path))
            for words in (["bash", "-c", "accelerate launch x.yaml"], command, ["srun", *command[1:]])
        ]

    monkeypatch.setattr(psutil.Process, "parents", parents)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert re.search("^2 processes .*typo.yaml.* starts 1; take fsdp_full.yaml", launcher_problems()[1])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launcher_problems() == [problem]
    assert problem in requirements.problems_here(shipped.load(ROOT / "recipes/chess.py").Args(output_dir="out"))
    command[len(launcher) : len(launcher)] = ["--parallelism_config_cp_size", "2"]
    assert len(launcher_problems()) == 2 and "typo.yaml has no parallelism_config" in launcher_problems()[1]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # the file may be another one by now
    assert launcher_problems() == []
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    monkeypatch.chdir("/")
    assert problem.replace("typo.yaml", f"{tmp_path}/typo.yaml") in launcher_problems()
    (tmp_path / "typo.yaml").unlink()
    assert launcher_problems() == []


def test_wrap_class_and_missing_model(tmp_path, monkeypatch):
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=32, num_hidden_layers=1, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "m")
    config = tmp_path / "config.yaml"
    content = yaml.safe_load((CONFIGS / "fsdp_full.yaml").read_text())
    content["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = "LlamaDecodrLayer"
    config.write_text(yaml.safe_dump(content))
    chess = [str(ROOT / "recipes/chess.py"), "--train_files", "data/chess/games_20k.parquet", "--model_name_or_path"]
    with pytest.raises(ConfigError, match=r"LlamaDecodrLayer is not in .*; did you mean 'LlamaDecoderLayer'\?"):
        preflight([str(config), *chess, str(tmp_path / "m")])
    download = r"model 'nobody/nothing' is not in .*\n.* python -m accelerate_recipes download .*chess.py --train_files"
    refuses(download, preflight, [str(CONFIGS / "fsdp_full.yaml"), *chess, "nobody/nothing"])
    with pytest.raises(ConfigError, match=f"model '{tmp_path}/n': no such folder$"):
        preflight([str(CONFIGS / "fsdp_full.yaml"), *chess, str(tmp_path / "n")])


def test_what_the_job_will_have(monkeypatch):
    """With nodes and GPUs that this machine lacks, the rules of a CPU do not apply, but the number of processes does."""
    asked = ["--nodes", "4", "--gpus-per-node", "8"]
    batch = ["--total_batch_size", "64", "--per_device_train_batch_size", "2"]
    found, _ = preflight([str(CONFIGS / "fsdp_full.yaml"), *asked, *LAPTOP, *batch])
    assert "with 32 processes; 64 sequences a step = 32 processes x 2 x 1" in found
    hybrid = [str(CONFIGS / "fsdp_hybrid.yaml"), *asked]
    found, assignments = preflight([*hybrid, *LAPTOP, *batch])
    assert "32 processes" in found
    sizes = "--parallelism_config_dp_replicate_size 4 --parallelism_config_dp_shard_size 8"
    assert f"--num_machines 4 --num_processes 32 {sizes})" in assignments
    with pytest.raises(ConfigError, match="4 replicas x 4 shards = 16 processes, but 32 were launched"):
        preflight([*hybrid, "--parallelism_config_dp_shard_size", "4", *LAPTOP, *batch])
    with pytest.raises(ConfigError, match="FSDP1 hybrid sharding on a CPU"):
        hybrid1 = ["--fsdp_sharding_strategy", "HYBRID_SHARD"]
        hybrid1 += ["--cpus-per-node", "2", *LAPTOP, "--optim", "adamw_torch_fused"]
        preflight([str(CONFIGS / "fsdp1_full.yaml"), *hybrid1])


@pytest.mark.parametrize("flags, said", [
    (["--num_processes", "8"], "--num_processes 8 contradicts --nodes 2"),
    (["--num_processes=2"], "--num_processes 2 contradicts --nodes 2"),
    (["--num_machines", "4"], "--num_machines 4 contradicts --nodes 2"),
    (["--num_machines", "2", "--num_processes", "4"], ""),
])  # fmt: skip
def test_the_size_of_the_job_has_one_owner(flags, said):
    """A number of the launcher that differs would leave GPUs idle, or be one that no machine has."""
    found = read_request([str(CONFIGS / "ddp.yaml"), "--nodes", "2", "--gpus-per-node", "2", *flags, *LAPTOP])
    assert found.config_problems == [] if not said else said in found.config_problems[0]
    on_cpus = [str(CONFIGS / "ddp.yaml"), "--cpus-per-node", "8", "--num_processes", "2", *LAPTOP]
    assert read_request(on_cpus).config_problems == [], "each has more cores"


def test_everything_wrong_at_once(monkeypatch, tmp_path):
    """Preflight reports at once what a launch would find one after the other, partly only after the queue."""
    shipped.load(ROOT / "recipes/chess.py")  # what it imports asks for versions too
    monkeypatch.setattr(metadata, "version", lambda name: {"accelerate": "0.34.0"}.get(name) or missing(name))
    argv = [
        str(CONFIGS / "fsdp_full.yaml"), "--num_processes", "3", str(ROOT / "recipes/chess.py"), "--total_batch_size", "16",
        "--model_name_or_path", "nobody/nothing", "--lerning_rate", "1", "--output_dir", "/proc/nowhere",
        "--data_cache_dir", "/proc/cache", "--resume_from_checkpoint", str(tmp_path / "checkpoint-1"),
    ]  # fmt: skip
    with refused(
        "torch==2.14.1 is not installed; run: pip install -r ", "is not a multiple of --per_device_train_batch_size 1 x 3 ",
        "unknown argument 'lerning_rate' on the command line; did you mean 'learning_rate'?",
        "--output_dir /proc/nowhere cannot be written to: ", "--data_cache_dir /proc/cache cannot be written to: ",
        "/checkpoint-1: there is no such folder", "model 'nobody/nothing' is not in ",
        "dataset 'laion/strategic_game_chess' (**/chess_game_0001.parquet) is not in ",
    ) as caught:  # fmt: skip
        preflight(argv)
    assert "accelerate==" not in str(caught.value)  # another version is a warning


def missing(name: str) -> None:
    raise metadata.PackageNotFoundError(name)


def test_output_directory(monkeypatch, tmp_path):
    """Preflight reports the filesystem, the space for checkpoints to come, and the checkpoint to resume, with its damage."""
    config, out = str(CONFIGS / "fsdp_full.yaml"), ["--output_dir", str(tmp_path / "new/out")]
    two_nodes = [config, "--nodes", "2", "--gpus-per-node", "1", *LAPTOP, *out]
    monkeypatch.setattr(machine, "filesystem", lambda path: "nfs4")
    assert "must all see it there" not in preflight(two_nodes)[0]
    monkeypatch.setattr(machine, "filesystem", lambda path: "ext4")
    assert f"{tmp_path}/new/out lies on ext4; 2 machines must" in preflight(two_nodes)[0]

    # 1,357,952 parameters, of which Muon trains 851,968 with one moment, AdamW the others with two; of 10 saves 2 are kept while
    # a third is written.
    short = [config, *LAPTOP, *out, "--max_steps", "100", "--save_steps", "10", "--save_total_limit"]
    saved = 12 * 1_357_952 - 4 * 851_968
    needs = 3 * saved + 4 * 1_357_952
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(2**60, 0, needs))
    said = preflight([*short, "2"])[0]
    assert f"Parameters: 1,357,952; {tmp_path}/new/out needs 42.052 MiB for 3 checkpoints" in said
    refuses(r"needs 54.342 MiB for 4 checkpoints of .* 42.052 MiB free", preflight, [*short, "3"])
    assert not (tmp_path / "new").exists()
    leftover = tmp_path / "new/out/checkpoint-5.partial/state"
    leftover.mkdir(parents=True)
    with (leftover / "__0_0.distcp").open("w") as file:
        file.truncate(saved)
    assert "4 checkpoints" in preflight([*short, "3"])[0], "what is left unfinished goes first"


def test_the_checkpoint_to_go_on_from(tmp_path):
    checkpoint = tmp_path / "checkpoint-7"
    checkpoint.mkdir()
    files = {"args.yaml": b"seed: 42\n", "weights": b"1234"}
    for name, data in files.items():
        (checkpoint / name).write_bytes(data)
    entries = {name: {"size": len(data), "checksum": xxhash.xxh3_128_hexdigest(data)} for name, data in files.items()}
    write_marker(checkpoint, {"step": 7, "files": entries})
    argv = [str(CONFIGS / "fsdp_full.yaml"), *LAPTOP, "--output_dir", str(tmp_path)]
    assert f"The run continues from {checkpoint}; its checksums are right" in preflight(argv)[0]
    (checkpoint / "weights").write_bytes(b"1235")
    assert f"warning: {checkpoint} is damaged" in preflight(argv)[0]
    with pytest.raises(ConfigError, match=r"the checksum of weights is .*; give an older one, or latest"):
        preflight([*argv, "--resume_from_checkpoint", str(checkpoint)])
    refuses("--seed was 42 and is now 1; set it back", preflight, [*argv, "--seed", "1"])


@pytest.fixture
def started(monkeypatch):
    """Run a recipe's `main` in this process and return its error; `recipe.run_recipe` would end the process."""
    said = []

    def fail(args, reason):
        said.append(reason)
        raise SystemExit(2)

    watched = SimpleNamespace(tell_first_rank=lambda reason: False)
    monkeypatch.setattr(recipe, "fail", fail)
    monkeypatch.setattr(requirements, "launch_problems", lambda *_: [])
    monkeypatch.setattr(recipe.parent, "follow_launcher", lambda: None)
    monkeypatch.setattr(recipe.watch, "start_watch", lambda *_: watched)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return said


@pytest.mark.parametrize("place", ["/proc/nowhere", "{file}", "{file}/below", "", "x" * 300, "{gone}", "{gone}/below"])
def test_a_run_that_cannot_write_says_so_at_once(place, tmp_path, monkeypatch, started):
    """A run that cannot write says at its start what preflight says."""
    (tmp_path / "file").write_text("a user's")
    (tmp_path / "gone").symlink_to("nowhere")
    is_link = "{gone}" in place
    toy, place = shipped.load(CHILDREN / "toy.py"), place.format(file=tmp_path / "file", gone=tmp_path / "gone")
    monkeypatch.setattr("sys.argv", ["toy.py", "--output_dir", place])
    refuses("2", recipe.run_recipe, lambda args: pytest.fail("it ran"), toy.Args, toy.requirements, error=SystemExit)
    (said,) = started
    assert f"--output_dir {place} cannot be written to: " in said or (not place and "--output_dir is empty" in said)
    assert is_link == (f"{tmp_path / 'gone'} is a link to nowhere, which is not there" in said)
    assert (tmp_path / "file").read_text() == "a user's"


def test_a_cache_that_others_have_filled_may_be_read_only(tmp_path):
    args = shipped.load(ROOT / "recipes/chess.py").Args(output_dir=str(tmp_path), data_cache_dir="/proc/self")
    assert requirements.write_problems(args) == []
    args.data_cache_dir = "/proc/nowhere"
    (problem,) = requirements.write_problems(args)
    assert problem.startswith("--data_cache_dir /proc/nowhere cannot be written to: ")


def test_an_hf_home_that_cannot_be_written_to(tmp_path, monkeypatch):
    """Recipes whose libraries write there say so before they begin, each cache once; a stream of text needs none."""
    found = {}
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE"):
        monkeypatch.setenv(name, f"/proc/nowhere/{name}")
    for name in ("chess", "t5", "sft", "template", "c4"):
        args = shipped.load(ROOT / f"recipes/{name}.py").Args(output_dir=str(tmp_path))
        if name in ("chess", "t5"):
            args.data_cache_dir = str(tmp_path)
        found[name] = requirements.write_problems(args)
    assert [len(said) for said in found.values()] == [1, 1, 2, 2, 0]
    assert found["chess"][0].startswith("/proc/nowhere/HF_MODULES_CACHE cannot be written to: ")
    assert f"set HF_HOME to a folder of your own, and HF_HUB_CACHE to {constants.HF_HUB_CACHE}" in found["chess"][0]


def test_recipes_that_prepare_rows_have_a_fork_server(tmp_path, monkeypatch, started):
    """Also without workers of loaders; recipes that prepare nothing start none."""
    servers = []

    def main(args):
        raise PermissionError(errno.EACCES, "Permission denied", "/shared/rows")

    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    monkeypatch.setattr(recipe.workers, "start_fork_server", lambda **how: servers.append(how))
    paths = [f"--{name}={tmp_path / name}" for name in ("output_dir", "data_cache_dir")]
    for script, *more in (
        (CHILDREN / "toy.py", paths[0]),
        *((ROOT / f"recipes/{name}.py", *paths, f"--train_files={file}", "--from_scratch") for name in ("chess", "t5")),
    ):
        monkeypatch.setattr("sys.argv", [script.name, "--dataloader_num_workers=0", *more])
        with pytest.raises(SystemExit, match="2"):
            recipe.run_recipe(main, shipped.load(script).Args, lambda args: requirements.Requirements())
    assert started == ["[Errno 13] Permission denied: '/shared/rows'"] * 3
    assert servers == [{"of_loaders": False}] * 2


def test_no_test_sees_what_runs_have_left(tmp_path):
    for name in ("outputs/chess/checkpoint-7", ".cache/data", "recipes"):
        (tmp_path / name).mkdir(parents=True)
    links = without_runs(tmp_path)
    assert [path.name for path in Path(links.name).iterdir()] == ["recipes"]
    assert Path.cwd() == ROOT.resolve() and not Path("outputs/chess").exists()
