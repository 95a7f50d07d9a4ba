"""Traces of a computation, besides gradients: in random generators, in buffers, and in what its loss gathers for the log."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

# Returns a function that forgets what a loss function has gathered since, for the log.
MarkFn = Callable[[], Callable[[], None]]


def rng_state() -> dict[str, Any]:
    """Return the state of every random generator of this process."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class Traces:
    """State before a computation, to which it can go back. Buffers, such as those of a batch norm, are copied."""

    def __init__(self, model: nn.Module, mark_fn: MarkFn | None = None):
        self.random = rng_state()
        # A forward pass may change a buffer, or put another in its place. Those that are not saved follow from the settings.
        self.buffers = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        self.forget = mark_fn() if mark_fn else lambda: None

    def remove(self) -> None:
        """Remove what the computation has left in the model and in the log; random generators go on."""
        for module, name, buffer, before in self.buffers:
            setattr(module, name, buffer.copy_(before))
        self.forget()

    def restore(self) -> None:
        """Go back to the state before the computation, so that it can be done again."""
        self.remove()
        set_rng_state(self.random)
