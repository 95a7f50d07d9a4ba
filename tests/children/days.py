"""Run a recipe under a clock of which each reading is a day later than the one before: every hour of the run is midnight.

DAY is the day of the first reading, RECIPE the recipe.
"""

import os
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path

from transformers.utils import chat_template_utils

from accelerate_recipes import recipe
from accelerate_recipes.arguments import shipped
from accelerate_recipes.conversations import dates

days = count()


class Clock(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.fromisoformat(os.environ["DAY"]) + timedelta(days=next(days))


chat_template_utils.datetime = dates.datetime = Clock
module = shipped.load(Path(__file__).resolve().parents[2] / f"recipes/{os.environ['RECIPE']}.py")
Args, requirements, main = module.Args, module.requirements, module.main

if __name__ == "__main__":
    recipe.run_recipe(main, Args, requirements)
