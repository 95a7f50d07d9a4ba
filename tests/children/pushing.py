"""Recipe: recipes/template.py on a machine that may ask a Hub, which the server that forks this process may not."""

import os
from pathlib import Path

from forked import use_hub

from accelerate_recipes.arguments import shipped

use_hub(os.environ["TESTED_ENDPOINT"])
template = shipped.load(Path(__file__).resolve().parents[2] / "recipes/template.py")
main, Args, requirements = template.main, template.Args, template.requirements
