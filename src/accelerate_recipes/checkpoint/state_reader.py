"""Safe reader of a checkpoint's `state/`, which runs no code from it. torch 2.13 alone would unpickle parts of it."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from accelerate_recipes.errors import ConfigError
from accelerate_recipes.upstream import load_plain

# Names that `.metadata` may contain, besides dtypes.
IN_METADATA = {
    ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("collections", "OrderedDict"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
}  # fmt: skip


def load_state(state: dict[str, Any], checkpoint: Path, *, no_dist: bool = False) -> None:
    """Load into `state` what the `state/` of a checkpoint holds of it.

    Raises:
        ConfigError: for a state that names what would run.
    """
    try:
        dcp.load(state, storage_reader=StateReader(checkpoint / "state"), planner=StatePlanner(), no_dist=no_dist)
    except dcp.CheckpointException as error:
        refusals = [raised for raised, _ in error.failures.values() if isinstance(raised, ConfigError)]
        raise (refusals or [error])[0] from None


class StateReader(dcp.FileSystemReader):
    """Reader that refuses a `.metadata` with any other name, because torch calls the objects that it names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            MetadataUnpickler(file).load()
        return super().read_metadata(*args, **kwargs)


class MetadataUnpickler(pickle.Unpickler):
    """Unpickler that raises ConfigError for a name that does not belong in a `.metadata`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return memory_format  # Debian's Python 3.11.2 pickles a member of an enumeration as a call of getattr
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in IN_METADATA:
            raise foreign(f"{module}.{name}")
        return super().find_class(module, name)


def foreign(name: str) -> ConfigError:
    problem = f"the checkpoint's state/.metadata names {name}, which would run"
    return ConfigError(f"{problem}: that is no checkpoint of this project; do not load it")


def memory_format(owner: Any, name: str) -> Any:
    """Return a member of torch's enumeration of memory formats, the only attributes that belong in a `.metadata`."""
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise foreign(f"an attribute {name} of {owner}")
    return _MEM_FORMAT_ENCODING[name]


class StatePlanner(dcp.DefaultLoadPlanner):
    """Planner that accepts only tensors and plain values, such as the betas: torch would unpickle anything."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            element = load_plain(value)
        except ValueError as error:
            raise ConfigError(f"{read_item.dest_index.fqn} in the checkpoint's state/: {error}") from None
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], element)
