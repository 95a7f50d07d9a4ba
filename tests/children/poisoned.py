"""Train the recipe that POISONED_RECIPE names. In step POISON, the loss of a micro-batch that has a row is not a number."""

import os
from collections.abc import Callable
from typing import Any

from accelerate_recipes.arguments import shipped

recipe = shipped.load(os.environ["POISONED_RECIPE"])
Args, requirements, main, train = recipe.Args, recipe.requirements, recipe.main, recipe.train


def poisoned(run: Any, *given: Any, loss_fn: Callable, **settings: Any) -> Any:
    def loss_of(model: Any, batch: dict[str, Any]) -> Any:
        is_poisoned = run.scheduler.last_epoch + 1 == int(os.environ["POISON"]) and (batch["row"] >= 0).any()
        return loss_fn(model, batch) * (float("nan") if is_poisoned else 1)

    return train(run, *given, loss_fn=loss_of, **settings)


recipe.train = poisoned
