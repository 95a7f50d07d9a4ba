"""Tests, in one process, of which directories are checkpoints, what a run may continue, and what is never lost."""

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import pickle
import re
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import Accelerator
from helpers import refuses
from safetensors.torch import load_file
from tiny import tiny_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.checkpoint._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from accelerate_recipes import disk, recipe
from accelerate_recipes.args import TrainArgs
from accelerate_recipes.bad_steps import stop_run
from accelerate_recipes.checkpoint import checkpointer, files, resume
from accelerate_recipes.checkpoint.checkpointer import Checkpointer
from accelerate_recipes.checkpoint.export import export
from accelerate_recipes.checkpoint.files import SaveError, complete_checkpoints, defect
from accelerate_recipes.checkpoint.resume import agree_on_resume, settle_resume
from accelerate_recipes.distributed import prepare
from accelerate_recipes.errors import ConfigError, NonFiniteError
from accelerate_recipes.life import lock, stop
from accelerate_recipes.life.status import read_status
from accelerate_recipes.models.loading import new_model, with_classes
from accelerate_recipes.optim import make_scheduler


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """Make a Checkpointer of a tiny model that has taken one optimizer step."""
    monkeypatch.setattr(stop, "_asked_by", None)  # also restored after the test: it belongs to the process

    def build(resumed_from: Path | None = None, hidden_size: int = 16, **overrides) -> Checkpointer:
        args = TrainArgs(output_dir=str(tmp_path / "run"), save_total_limit=2, **overrides)
        accelerator = Accelerator(cpu=True)
        model = new_model(
            tiny_config(vocab_size=50, hidden_size=hidden_size, intermediate_size=32, tie_word_embeddings=True), "sdpa"
        )
        config, generation_config = model.config, model.generation_config
        model, optimizer, _ = prepare(accelerator, model, args)
        scheduler = make_scheduler(optimizer, args, 100)
        Path(args.output_dir).mkdir(exist_ok=True)
        (Path(args.output_dir) / "metrics.jsonl").touch()
        run = Checkpointer(accelerator, model, optimizer, scheduler, args, [config, generation_config], resumed_from)
        model(input_ids=torch.arange(10)[None]).logits.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return run

    yield build
    lock.release()


@pytest.fixture
def run(make_run) -> Checkpointer:
    return make_run()


@pytest.fixture
def output_dir(run) -> Path:
    return Path(run.args.output_dir)


def save(run: Checkpointer, step: int) -> Path:
    """Save, and wait for the end of it."""
    path = run.save(step, {})
    run.wait()
    return path


def test_what_could_not_be_saved_is_refused_before_training(run):
    """`save_pretrained` would raise for a temperature without sampling, which some published models have."""
    settings = GenerationConfig(do_sample=False, temperature=0.5)
    refuses(r"(?s)correct its generation_config\.json: .*temperature", dataclasses.replace, run, artifacts=[settings])


def test_a_checkpoint_is_complete_and_the_oldest_goes(run):
    saved = [save(run, step) for step in (10, 20, 100)]
    assert [defect(path) for path in saved[1:]] == [None, None]
    assert complete_checkpoints(saved[0].parent) == saved[1:]  # by number, not by name
    assert contents(saved[0].parent) == {"checkpoint-20", "checkpoint-100"}
    marker = json.loads((saved[2] / "complete.json").read_text())
    assert marker["step"] == 100 and marker["world_size"] == 1 and marker["strategy"] == "single process"
    assert {"state/.metadata", "rng-0.pt", "args.yaml", "metrics.jsonl", "config.json"} <= set(marker["files"])


class Copies(TorchDispatchMode):
    """The copies of this thread, each with whether it was waited for."""

    def __enter__(self):
        self.are_awaited: list[bool] = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.are_awaited.append(not (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)))
        return func(*args, **kwargs or {})


def test_a_background_save_leaves_nothing_to_copy_beside_the_next_step(run, monkeypatch):
    """When `save` returns, each tensor has been copied, by a copy that was waited for: the thread gets memory of its own.

    A copy that is still under way on a GPU would slow down the next steps, which also change what it reads.
    """
    handed, execute = [], _ThreadBasedAsyncCheckpointExecutor.execute_save

    def watched(self, state, **settings):
        handed.append(state)
        return execute(self, state, **settings)

    monkeypatch.setattr(_ThreadBasedAsyncCheckpointExecutor, "execute_save", watched)
    for step in (10, 20):  # the second time into memory that exists already
        with Copies() as copies:
            run.save(step, {})
        trained = tensors_of(run._trained_state())
        run.wait()
        written = tensors_of(handed.pop())
        assert len(written) == len(trained) > 50 and len(copies.are_awaited) >= len(written) and all(copies.are_awaited)
        ours = {tensor.untyped_storage().data_ptr() for tensor in trained}
        assert ours.isdisjoint(tensor.untyped_storage().data_ptr() for tensor in written)
        assert all(map(torch.equal, written, trained))


def tensors_of(state) -> list[torch.Tensor]:
    assert isinstance(state, dict), f"{state} is to come"
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("damage, reason", [
    (lambda c: (c / "complete.json").unlink(), "has no complete.json: the save was interrupted"),
    (lambda c: (c / "complete.json").write_text("{"), r"complete\.json is damaged: Expecting property name"),
    (lambda c: (c / "complete.json").write_text("[]"), "it does not list the files of a checkpoint"),
    (lambda c: (c / "complete.json").write_text((c / "complete.json").read_text().replace("20", "21", 1)), "its checksum is"),
    (lambda c: (c / "args.yaml").write_text((c / "args.yaml").read_text().replace("seed: 42", "seed: 43")), r"checksum of args\.yaml"),
    (lambda c: (c / "state/__0_0.distcp").unlink(), "state/__0_0.distcp is missing"),
    (lambda c: (c / "rng-0.pt").write_bytes(b"x"), "rng-0.pt has 1 bytes instead of"),
])  # fmt: skip
def test_a_damaged_one_is_skipped_with_its_reason(run, damage, reason):
    older, newer = save(run, 10), save(run, 20)
    damage(newer)
    with pytest.warns(UserWarning, match=reason):
        assert settle_resume(run.args) == older
    run.args.resume_from_checkpoint = str(newer)
    with pytest.raises(ConfigError, match=reason), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settle_resume(run.args)


def contents(output_dir: Path) -> set[str]:
    """Return what a save may leave in the folder."""
    return {path.name for path in output_dir.iterdir()} - {"metrics.jsonl", "status.json", "lock.json"}


def test_no_bit_of_the_marker_can_change(run):
    older, newer = save(run, 10), save(run, 20)
    content, whole = (newer / "complete.json").read_bytes(), files.read_marker(newer)
    unseen = []
    for i in range(0, len(content), 5):
        (newer / "complete.json").write_bytes(content[:i] + bytes([content[i] ^ 1 << i % 8]) + content[i + 1 :])
        if defect(newer) is None and not whole.items() <= files.read_marker(newer).items():
            unseen.append(i)
    assert not unseen
    with warnings.catch_warnings(record=True):
        assert settle_resume(run.args) == older


@pytest.mark.parametrize("name", ["../mine.txt", "/etc/hostname"])
def test_a_strangers_marker_names_no_file_elsewhere(make_run, tmp_path, name):
    """An export would copy such a file, and write outside of its folder."""
    saved = save(make_run(), 10)
    file = saved / name
    if not file.exists():
        file.write_text("mine")
    marker = files.read_marker(saved)
    entry = {"size": file.stat().st_size, "checksum": disk.checksum(file)}
    marker["files"][name] = entry
    files.write_marker(saved, marker)
    assert defect(saved) == f"its complete.json is damaged: it names {name}, which is not in the checkpoint"


def test_a_file_that_the_disk_cannot_read_is_damage(run, monkeypatch):
    older, newer = save(run, 10), save(run, 20)
    read = disk.checksum

    def fail(file: Path) -> str:
        if file == newer / "rng-0.pt":
            raise OSError(errno.EIO, "Input/output error")
        return read(file)

    monkeypatch.setattr(files, "checksum", fail)
    with pytest.warns(UserWarning, match=r"rng-0\.pt cannot be read: .*Input/output error"):
        assert agree_on_resume(run.accelerator, run.args) == older


def test_what_stands_in_the_way_is_set_aside(run):
    """Checkpoints damaged twice at one step, and another program's directory with the same name, are set aside."""
    older = save(run, 10)
    for _ in range(2):
        flip_a_byte(save(run, 20) / "state/__0_0.distcp")
        with pytest.warns(UserWarning, match="the file is damaged"):
            assert agree_on_resume(run.accelerator, run.args) == older
    other = older.with_name("checkpoint-20")
    other.mkdir()
    (other / "pytorch_model.bin").write_text("mine")
    with pytest.warns(UserWarning, match=r"skipping .*checkpoint-20: it has no complete\.json"):
        assert agree_on_resume(run.accelerator, run.args) == older
    assert defect(save(run, 20)) is None
    names = {f"checkpoint-20{end}" for end in ("", ".damaged", ".damaged-2", ".damaged-3")}
    assert contents(older.parent) == names | {"checkpoint-10"}
    assert (older.with_name("checkpoint-20.damaged-3") / "pytorch_model.bin").read_text() == "mine"


def flip_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_flipped_byte_is_found_and_the_next_older_taken(run):
    older, newer = save(run, 10), save(run, 20)
    assert agree_on_resume(run.accelerator, run.args) == newer
    flip_a_byte(newer / "state/__0_0.distcp")
    assert defect(newer) is None  # its sizes are right
    with pytest.warns(UserWarning, match=r"checksum of state/__0_0\.distcp is .* the file is damaged"):
        assert agree_on_resume(run.accelerator, run.args) == older
    assert newer.with_name("checkpoint-20.damaged").is_dir()
    save(run, 20)
    assert agree_on_resume(run.accelerator, run.args) == newer
    flip_a_byte(newer / "rng-0.pt")
    run.args.resume_from_checkpoint = str(newer)
    refuses(r"the checksum of rng-0\.pt is", agree_on_resume, run.accelerator, run.args)


def test_commands(run, command, tmp_path):
    """The commands verify, list and export work as typed."""
    older, newer = save(run, 10), save(run, 20)
    verified = command("checkpoint", "verify", newer)
    assert verified.returncode == 0, verified.stderr
    assert "step 20, saved by 1 x single process" in verified.stdout and "complete and unchanged" in verified.stdout
    flip_a_byte(older / "state/__0_0.distcp")
    assert command("checkpoint", "verify", older).returncode == 1
    refused = command("export", older, tmp_path / "out")
    assert refused.returncode == 1 and "the checksum of state/__0_0.distcp is" in refused.stderr
    refused = command("export", newer, newer.parent)
    assert refused.returncode == 1 and "run is, holds or lies in the checkpoint" in refused.stderr
    with files_limited_to(5000):
        full = command("export", newer, tmp_path / "out")
    assert full.returncode == 1 and re.search("error: .*out could not be written: .*File too large", full.stderr)
    assert not list(tmp_path.glob("out*"))
    (newer / "rng-0.pt").unlink()
    broken = command("checkpoint", "verify", newer)
    assert broken.returncode == 1 and "rng-0.pt is missing" in broken.stderr
    listed = command("checkpoint", "list", newer.parent).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["checkpoint-10", "checkpoint-20"]
    assert "complete" in listed[0] and "rng-0.pt is missing" in listed[1]
    assert command("export", newer, tmp_path / "out").returncode == 1
    exported = command("export", save(run, 30), tmp_path / "out", "--dtype", "bf16", "--max_shard_size", "4KB")
    assert exported.returncode == 0, exported.stderr
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.model.embed_tokens.weight, run.model.model.embed_tokens.weight.bfloat16())
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


@contextlib.contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """Make the kernel refuse larger files (EFBIG), an OSError like that of a full disk or a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [0, 1000, 20_000])
def test_a_save_that_cannot_write_loses_nothing(run, num_bytes):
    """The older checkpoint is unchanged, the half-written one is gone, and the next save succeeds."""
    good = save(run, 10)
    assert sum(entry["size"] for entry in files.read_marker(good)["files"].values()) > 30_000
    with files_limited_to(num_bytes), pytest.raises(SaveError, match=r"-20 could not be written.*File too large"):
        save(run, 20)
    assert contents(good.parent) == {"checkpoint-10"}
    assert agree_on_resume(run.accelerator, run.args) == good == run.newest
    save(run, 20)
    assert contents(good.parent) == {"checkpoint-10", "checkpoint-20"}


def large_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({f"word{i}": i for i in range(30_000)})))


@pytest.mark.parametrize("where", ["tokenizer", "whole weights", "random state"])
def test_a_full_disk_is_known_by_whatever_a_library_raises(make_run, monkeypatch, where):
    run = make_run(async_save=False)
    good = save(run, 10)
    if where == "tokenizer":
        run.artifacts = [SimpleNamespace(save_pretrained=limited(large_tokenizer().save_pretrained))]
    elif where == "whole weights":
        plugin = SimpleNamespace(state_dict_type=SimpleNamespace(name="FULL_STATE_DICT"))
        monkeypatch.setattr(run.accelerator.state, "fsdp_plugin", plugin, raising=False)
        monkeypatch.setattr(checkpointer, "write_safetensors", limited(checkpointer.write_safetensors))
    else:
        monkeypatch.setattr(torch, "save", limited(torch.save))
    said = r"could not be written: rank 0: .*[Ff]ile too large.* good checkpoint: .*-10"
    refuses(said, save, run, 20, error=SaveError)
    assert contents(good.parent) == {"checkpoint-10"}


def limited(write: Callable) -> Callable:
    """Let a function of a library write into files of 1000 bytes."""
    return files_limited_to(1000)(write)


def test_a_full_disk_is_one_message_from_beginning_to_end(run, output_dir, capsys):
    (output_dir / "checkpoint-20.partial").mkdir()
    with files_limited_to(0), pytest.raises(ConfigError, match=r"cannot be written to: .*-20\.partial may be removed"):
        agree_on_resume(run.accelerator, run.args)
    (output_dir / "lock.json").unlink()  # else the lock is watched for 15 seconds
    lock.take(output_dir)
    with files_limited_to(0):
        recipe.end_with(run.args, state="failed")
    assert "warning: status.json could not be written: [Errno 27]" in capsys.readouterr().err


def test_a_mistake_of_the_program_leaves_nothing_and_stays_one(run, output_dir):
    run.artifacts = [SimpleNamespace(save_pretrained=lambda folder: {}["key"])]
    with pytest.raises(KeyError):
        save(run, 10)
    assert contents(output_dir) == set()


def test_leftovers_go_before_anything_is_written(run, output_dir, monkeypatch):
    """Leftovers of a run that was killed while it saved or exported are removed; other files stay."""
    save(run, 10)
    export(output_dir / "checkpoint-10", output_dir / "export")
    (output_dir / "export").rename(output_dir / "export.partial")
    (output_dir / "checkpoint-20.partial/state").mkdir(parents=True)
    (output_dir / "checkpoint-best.partial").mkdir()
    assert {path.name for path in files.leftovers(output_dir)} == {"checkpoint-20.partial", "export.partial"}
    agree_on_resume(run.accelerator, run.args)
    assert contents(output_dir) == {"checkpoint-10", "checkpoint-best.partial"}


def test_weights_that_are_not_finite_are_never_the_last_good_checkpoint(make_run, run, monkeypatch):
    good = save(run, 10)
    weight = run.model.model.norm.weight
    for value in (float("nan"), float("-inf")):
        with torch.no_grad():
            weight[3] = value
        with pytest.raises(SaveError, match=r"-20 is not saved: model\.norm\.weight holds NaN.*good checkpoint: .*-10"):
            save(run, 20)
    assert contents(good.parent) == {"checkpoint-10"}
    monkeypatch.setattr(checkpointer, "broken_weight", lambda model: None)
    broken = save(run, 20)
    monkeypatch.undo()
    monkeypatch.setattr(stop, "_asked_by", None)
    refuses(r"-20 is of no use: model\.norm\.weight holds NaN", make_run(resumed_from=broken).resume)


def test_a_checkpoint_whose_weights_give_no_finite_loss_is_not_good(run):
    older, newest = save(run, 10), save(run, 20)

    def last_good(step: int, *micro_losses: float) -> Path:
        error = NonFiniteError("loss nan", list(micro_losses))
        said = str(stop_run(error, run, step, [{"row": torch.tensor([3])}] * len(micro_losses)))
        good = json.loads((newest.parent / "non_finite.json").read_text())["checkpoint"]
        assert said.startswith(f"step {step + 1}: loss nan. ") and said.endswith(f"Last good checkpoint: {good}")
        return Path(good)

    nan = float("nan")
    assert last_good(20, nan, nan) == older
    assert last_good(20, nan, 1.0) == last_good(20, 1.0, 1.0) == newest, "it is the row"
    assert last_good(21, nan, nan) == newest, "with other weights"


def test_too_little_room_is_known_before(run, output_dir, monkeypatch):
    save(run, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 10, 10))
    refuses(r"0\.000 MiB are free, the last checkpoint has .*; make room", save, run, 20, error=SaveError)
    assert contents(output_dir) == {"checkpoint-10"}


def test_a_run_that_was_taken_over_touches_nothing(run, output_dir):
    """Such a run touches neither the other run's save of the same step nor its status."""
    lock.take(output_dir)
    save(run, 10)
    (output_dir / "lock.json").write_text(
        json.dumps({"host": "elsewhere", "process": 1, "job": "17", "restarts": 0, "run": "other"})
    )
    (output_dir / "checkpoint-20.partial").mkdir()
    refuses("another run has taken over", save, run, 20, error=SaveError)
    recipe.end_with(run.args, state="failed")
    assert contents(output_dir) == {"checkpoint-10", "checkpoint-20.partial"}
    assert "state" not in read_status(output_dir)


def test_arguments_that_are_gone(run):
    """An earlier version stretched positions, or left rows out: refused. Where the flags were unset, the run goes on."""
    file = save(run, 10) / "args.yaml"
    unset = {"rope_theta": 0.0, "rope_scaling_factor": 1.0, "rope_low_freq_factor": 1.0, "exclude_rows": ""}
    saved = yaml.safe_load(file.read_text()) | unset
    file.write_text(yaml.safe_dump(saved))
    resume.settle_arguments(file.parent, run.args)
    for flag, value in (("rope_theta", 5e5), ("rope_scaling_factor", 8.0), ("exclude_rows", "skipped.jsonl")):
        file.write_text(yaml.safe_dump(saved | {flag: value}))
        with pytest.raises(ConfigError, match=rf"--{flag} was {value!r}, .* export of this checkpoint"):
            resume.settle_arguments(file.parent, run.args)


def test_resume_takes_what_the_optimizer_is_told_from_the_command_line(make_run):
    old = {"learning_rate": 1e-3, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "weight_decay": 0.3}
    new = {"learning_rate": 5e-4, "adam_beta1": 0.7, "adam_beta2": 0.99, "adam_epsilon": 1e-7, "weight_decay": 0.2}
    second = make_run(resumed_from=save(make_run(**old), 10), **new)
    second.resume()
    decayed, spared = second.optimizer.param_groups
    for group in (decayed, spared):
        assert group["betas"] == (0.7, 0.99) and group["eps"] == 1e-7 and group["initial_lr"] == 5e-4
        assert group["lr"] == second.scheduler.get_last_lr()[0]
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.2, 0.0)


class Payload:
    """Object that writes a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


@pytest.mark.parametrize("place", ["metadata", "value", "random state", "arguments"])
def test_a_strangers_checkpoint_runs_no_code(make_run, run, tmp_path, monkeypatch, place):
    """Each of its files that could name code is refused, with the name, and without torch's advice to run it."""
    proof, real, run.args.async_save = tmp_path / "it ran", checkpointer.get_state_dict, False

    def with_payload(model, optimizer):
        weights, rest = real(model, optimizer)
        rest["param_groups"][0]["betas"] = Payload(proof)
        return weights, rest

    with monkeypatch.context() as patched:
        if place == "value":
            patched.setattr(checkpointer, "get_state_dict", with_payload)
        strange = save(run, 10)
    if place == "metadata":
        metadata = pickle.loads((strange / "state/.metadata").read_bytes())
        metadata.storage_meta.modules = [Payload(proof)]
        (strange / "state/.metadata").write_bytes(pickle.dumps(metadata))
    elif place == "random state":
        torch.save({"numpy": Payload(proof)}, strange / "rng-0.pt")
    elif place == "arguments":
        (strange / "args.yaml").write_text(f"seed: !!python/object/apply:pathlib.Path.touch [{proof}]")
    assert not proof.exists()
    resume = make_run(resumed_from=strange).resume
    told = {
        "metadata": (r"state/\.metadata names \S+, which would run", resume, lambda: export(strange, tmp_path / "export")),
        "value": (r"betas in .*state/: it names \S+, which would run", resume),
        "random state": (r"rng-0\.pt .*: it names \S+, which would run", resume),
        "arguments": (r"args\.yaml holds no arguments .*python/object/apply", lambda: export(strange, tmp_path / "export")),
    }  # fmt: skip
    message, *loads = told[place]
    for load in loads:
        assert "weights_only" not in refuses(message, load) and not proof.exists()


@pytest.mark.parametrize("attribute, is_known", [("TORCH_CONTIGUOUS_FORMAT", True), ("__init_subclass__", False)])
def test_checkpoint_of_an_older_python(make_run, tmp_path, monkeypatch, attribute, is_known):
    """Python 3.11.2, Debian's, writes a member of an enumeration as a call of getattr, which runs for that member only."""
    checkpoint = save(make_run(), 10)
    file = checkpoint / "state/.metadata"
    metadata = pickle.loads(file.read_bytes())
    owner = _MEM_FORMAT_ENCODING
    with monkeypatch.context() as patch:
        patch.setattr(owner, "__reduce_ex__", lambda self, _: (getattr, (owner, attribute)))
        file.write_bytes(pickle.dumps(metadata))
    assert b"getattr" in file.read_bytes()
    with contextlib.nullcontext() if is_known else pytest.raises(ConfigError, match=rf"{attribute} of .*would run"):
        export(checkpoint, tmp_path / "export")
    assert (tmp_path / "export").exists() == is_known


def test_pinned_memory_is_not_rounded_up(monkeypatch):
    """torch knows the setting, and keeps the others. Once torch does not round, remove this."""
    header = Path(torch.__file__).parent / "include/ATen/core/CachingHostAllocator.h"
    assert "size <= pinned_max_round_threshold()" in header.read_text()
    given = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings("garbage_collection_threshold:0.6")
    try:
        for _ in range(2):
            checkpointer.pin_what_is_asked_for()
        wanted = "garbage_collection_threshold:0.6,pinned_max_round_threshold_mb:1"
        assert torch._C._accelerator_getAllocatorSettings() == wanted
        with monkeypatch.context() as older:  # torch 2.11 neither tells its settings nor knows this one
            older.delattr(torch._C, "_accelerator_getAllocatorSettings")
            checkpointer.pin_what_is_asked_for()
    finally:
        torch._C._accelerator_setAllocatorSettings(given)


def test_a_checkpoint_of_another_model_is_refused(make_run):
    checkpoint = save(make_run(), 10)
    other = make_run(resumed_from=checkpoint, hidden_size=32)
    refuses(r"another model: lm_head\.weight .*\(50, 16\) there and \(50, 32\) here", other.resume)


def test_a_checkpoint_of_other_classes_is_refused(make_run, run):
    """A class is a number in the labels and a row in the weights: other names would train other rows."""
    with_classes(run.artifacts[0], ["0", "1", "10", "2"])
    saved = save(run, 10)
    for names, number, before, now in ((["0", "1", "2", "10"], 2, "10", "2"), (["0", "1", "10"], 3, "2", "none")):
        other = make_run(resumed_from=saved)
        with_classes(other.artifacts[0], names)
        refuses(rf"4 classes, .* {len(names)}: number {number} is '{before}' .* '{now}'", other.resume)
    same = make_run(resumed_from=saved)
    with_classes(same.artifacts[0], ["0", "1", "10", "2"])
    assert same.resume() == 10


def test_what_is_kept(make_run):
    """A run keeps the two newest, every 30th, and the best by the evaluation; the newest in any case."""
    run = make_run(keep_every_n_steps=30, metric_for_best_model="accuracy")
    out = Path(run.args.output_dir)

    def evaluated(step: int, **measured: float) -> None:
        with (out / "metrics.jsonl").open("a") as file:
            print(json.dumps({"step": step} | measured), file=file)

    for step, accuracy in {10: 0.1, 20: 0.9, 30: 0.3, 40: 0.2, 50: 0.5, 60: 0.4, 70: 0.6}.items():
        evaluated(step, eval_accuracy=accuracy)
        save(run, step)
    assert contents(out) == {f"checkpoint-{step}" for step in (20, 30, 60, 70)}
    run.args.greater_is_better = False
    save(run, 80)  # without an evaluation of its own
    assert contents(out) == {f"checkpoint-{step}" for step in (30, 60, 70, 80)}
    run.args.metric_for_best_model = "loss"
    run.args.keep_every_n_steps = 0
    run.args.save_total_limit = 1
    save(run, 90)
    assert contents(out) == {"checkpoint-90"}
    for step, loss in {100: float("nan"), 110: 0.5, 120: 0.6, 130: 0.7}.items():
        evaluated(step, eval_loss=loss)
        if step == 130:
            assert contents(out) == {"checkpoint-110", "checkpoint-120"}, "NaN is not the best"
            flip_a_byte(out / "checkpoint-110/metrics.jsonl")
        save(run, step)
    assert contents(out) == {"checkpoint-120", "checkpoint-130"}, "110 is damaged"


def test_a_failing_removal_is_no_failing_save(run, monkeypatch):
    save(run, 10), save(run, 20)

    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(f"not allowed: {path}")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match="an old checkpoint could not be removed: not allowed"):
        newest = save(run, 30)
    assert run.newest == newest and defect(newest) is None


def test_what_a_run_may_continue(run, tmp_path, capsys):
    args = run.args
    assert settle_resume(args) is None
    old, new = save(run, 10), save(run, 20)
    assert settle_resume(args) == new
    args.resume_from_checkpoint = "none"
    refuses(r"would overwrite .*checkpoint-20", settle_resume, args)
    args.resume_from_checkpoint = str(old)
    refuses(r"would overwrite .*checkpoint-20", settle_resume, args)
    args.output_dir = str(tmp_path / "other")
    assert settle_resume(args) == old
    args.max_steps = 9
    refuses("checkpoint-10 is further on than the 9 steps", settle_resume, args)
    args.max_steps = 10
    args.learning_rate = 0.5
    assert agree_on_resume(run.accelerator, args) == old
    assert "--learning_rate is now 0.5; until step 10 it was 1e-05" in capsys.readouterr().out
    args.total_batch_size = 99
    refuses("--total_batch_size was 16 and is now 99", settle_resume, args)
    args.resume_from_checkpoint = str(tmp_path / "nothing")
    refuses("nothing: there is no such folder; give latest, none, or", settle_resume, args)
    args.resume_from_checkpoint = str(old.parent)
    refuses(f"a run, whose newest checkpoint is {new}; give latest, none, or", settle_resume, args)
    args.resume_from_checkpoint = str(shutil.copytree(old, tmp_path / "best"))
    refuses("best: its name must be checkpoint-STEP", settle_resume, args)


@pytest.mark.parametrize("begins_with", ["a path elsewhere", "a path here", "none"])
def test_the_same_command_goes_on(run, tmp_path, begins_with):
    """A requeued job or restarted pod continues from its own checkpoint, even if its first checkpoint is gone."""
    args = run.args
    old = save(run, 10)
    if begins_with != "a path here":
        args.output_dir = str(tmp_path / "new")
    args.resume_from_checkpoint = "none" if begins_with == "none" else str(old)
    wanted = None if begins_with == "none" else old
    assert agree_on_resume(run.accelerator, args) == wanted
    (Path(args.output_dir) / "metrics.jsonl").touch()
    newer, newest = save(run, 20), save(run, 30)
    shutil.rmtree(old, ignore_errors=True)  # as retention does where it is here
    assert agree_on_resume(run.accelerator, args) == settle_resume(args) == newest
    flip_a_byte(newest / "rng-0.pt")
    with pytest.warns(UserWarning, match="the file is damaged"):
        assert agree_on_resume(run.accelerator, args) == newer
    args.learning_rate = 0.5  # another command
    refuses(r"would overwrite .*checkpoint-20|no such folder", settle_resume, args)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_export_takes_no_place_but_an_exports(run, tmp_path, monkeypatch):
    """Other files stay, to the byte, and the error says what is wrong."""
    saved = save(run, 10)
    mine = tmp_path / "mine"
    (mine / "deep/empty").mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(mine)
    (tmp_path / "beside.partial").mkdir()
    (tmp_path / "beside.partial/notes.txt").write_text("mine")
    (tmp_path / "forged").mkdir()
    forged = {"files": ["accelerate_recipes.json", "../mine/notes.txt", str(mine / "notes.txt")]}
    (tmp_path / "forged/accelerate_recipes.json").write_text(json.dumps(forged))
    (tmp_path / "not-ours").mkdir()
    (tmp_path / "not-ours/accelerate_recipes.json").write_text("[]")
    before = tree(tmp_path)
    monkeypatch.chdir(saved)
    for out, message in {
        "..": "is, holds or lies in the checkpoint",
        ".": "is, holds or lies in the checkpoint",
        "state/out": "is, holds or lies in the checkpoint",
        "../../run": "is, holds or lies in the checkpoint",
        "/": "is, holds or lies in the checkpoint",
        mine: "mine holds .*, which no export wrote",
        tmp_path / "link": "mine holds .*, which no export wrote",
        mine / "deep": "deep holds empty, which no export wrote",
        mine / "notes.txt": r"notes\.txt is a file; an export needs a folder",
        tmp_path / "beside": r"beside\.partial, .* holds something else",
        tmp_path / "not-ours": r"not-ours holds accelerate_recipes\.json",
    }.items():
        refuses(message, export, Path("."), Path(out))
        assert tree(tmp_path) == before
    export(saved, tmp_path / "forged")
    assert (mine / "notes.txt").read_text() == "mine"

    first = tmp_path / "new/first"
    export(saved, first, max_shard_size=4000)
    monkeypatch.chdir(first)
    (mine / "notes.txt").unlink()
    shutil.rmtree(mine / "deep")
    export(saved, tmp_path / "link")  # to a folder that is empty now
    assert (tmp_path / "link").is_symlink() and (mine / "config.json").is_file()
    export(saved, Path("."))  # an earlier export, and the working directory
    assert len(list(first.glob("*.safetensors"))) == 1, "nothing of the earlier one is left"
    (first / "config.json").unlink()  # its removal was interrupted
    export(saved, first)
    assert {path.name for path in first.parent.iterdir()} == {"first"}
    (first / "notes.txt").write_text("mine")
    before = tree(first)
    refuses(r"first holds notes\.txt, which no export wrote", export, saved, first)
    assert tree(first) == before


def test_an_export_that_could_not_be_written_is_known_before_training(run, output_dir):
    folder = output_dir / "export"
    folder.mkdir()
    (folder / "notes.txt").touch()
    refuses(r"export holds notes\.txt, which no export wrote", agree_on_resume, run.accelerator, run.args)


def test_a_refused_run_leaves_the_directory_as_it_was(run, output_dir, monkeypatch):
    """The checkpoint is looked for once, by the owner of the directory; who may not continue it owns and removes nothing."""
    saved = save(run, 10)
    lock.release()
    looked = []
    monkeypatch.setattr(resume, "settle_resume", lambda args: looked.append(lock.is_taken()) or settle_resume(args))
    (output_dir / "checkpoint-20.partial").mkdir()
    refuses("--seed was 42 and is now 43", agree_on_resume, run.accelerator, dataclasses.replace(run.args, seed=43))
    assert not lock.is_taken() and contents(output_dir) == {"checkpoint-10", "checkpoint-20.partial"}
    assert agree_on_resume(run.accelerator, run.args) == saved
    assert lock.is_taken() and contents(output_dir) == {"checkpoint-10"}
    assert looked == [True, True]


def begin_with(base: Path, monkeypatch) -> None:
    """Let runs begin with an earlier export."""
    monkeypatch.setattr(TrainArgs, "base_model", property(lambda args: getattr(args, "model_name_or_path", "")))
    monkeypatch.setattr(TrainArgs, "model_name_or_path", os.path.relpath(base), raising=False)


def test_the_model_that_a_run_began_with_stays(run, output_dir, tmp_path, monkeypatch):
    """The model that a run began with stays, even if it is an earlier export: adapters need it, and so do its owners."""
    export(save(run, 10), output_dir / "export")
    begin_with(output_dir / "export", monkeypatch)
    refuses("export is the model that the run begins with", settle_resume, run.args)
    saved = save(run, 20)
    arguments = yaml.safe_load((saved / "args.yaml").read_text()) | {"model_name_or_path": str(tmp_path / "run/export")}
    (saved / "args.yaml").write_text(yaml.safe_dump(arguments))
    refuses("export is the model that the run begins with", export, saved, tmp_path / "run/export")
    assert (tmp_path / "run/export/config.json").is_file()


def test_the_model_that_a_run_began_with_stays_wherever_it_lies(make_run, run, tmp_path, monkeypatch):
    """It is known by its content: its path may be relative to another folder, and it may have been moved."""
    export(save(run, 10), tmp_path / "base")
    begin_with(tmp_path / "base", monkeypatch)
    saved = save(make_run(), 20)
    monkeypatch.chdir(tmp_path)
    refuses("base is the model that the run begins with", export, saved, tmp_path / "base")
    weights = tmp_path / "base/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    export(saved, tmp_path / "base")


@pytest.mark.parametrize("max_shard_size", [10**9, 4000])
def test_export(run, tmp_path, max_shard_size):
    """In one shard or many, the weights are the model's, and the tied output layer is stored once; all may read them."""
    umask = os.umask(0o002)
    try:
        saved = save(run, 10)
        for path in saved.glob("*.json"):
            path.chmod(0o400)
        export(saved, tmp_path / "export", "A test.", max_shard_size=max_shard_size)
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "export").iterdir()} == {0o664}
    assert "A test. Trained with accelerate-recipes" in (tmp_path / "export/README.md").read_text()
    files = sorted((tmp_path / "export").glob("*.safetensors"))
    assert (len(files) > 1) == (max_shard_size == 4000)
    shards = [load_file(file) for file in files]
    sizes = [sum(tensor.numel() * tensor.element_size() for tensor in shard.values()) for shard in shards]
    assert max(sizes) <= max_shard_size and all(a + b > max_shard_size for a, b in itertools.pairwise(sizes))
    stored = {name for shard in shards for name in shard}
    assert "lm_head.weight" not in stored and "model.embed_tokens.weight" in stored
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for name, weight in run.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
