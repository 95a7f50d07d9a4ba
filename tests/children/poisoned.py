"""Train the recipe that POISONED_RECIPE names. In step POISON no loss is a number; the update of step STILL is not made."""

import os
from collections.abc import Callable
from typing import Any

from faults import keep_still

from accelerate_recipes.arguments import shipped

recipe = shipped.load(os.environ["POISONED_RECIPE"])
Args, requirements, main, train = recipe.Args, recipe.requirements, recipe.main, recipe.train


def poisoned(run: Any, *given: Any, loss_fn: Callable, **settings: Any) -> Any:
    def loss_of(model: Any, batch: dict[str, Any]) -> Any:
        is_poisoned = run.scheduler.last_epoch + 1 == int(os.environ.get("POISON", 0))
        return loss_fn(model, batch) * (float("nan") if is_poisoned else 1)

    keep_still(run, int(os.environ.get("STILL", 0)))
    return train(run, *given, loss_fn=loss_of, **settings)


recipe.train = poisoned
