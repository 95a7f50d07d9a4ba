"""Build of the wheel: recipes, their presets, accelerate configs and data become files of the package.

In the repository they stay at the top, where users read and change them; an editable install finds them there.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("recipes", "accelerate_configs", "data")


class BuildWithRecipes(build_py):
    """Build of the package with what is shipped beside it."""

    def run(self) -> None:
        super().run()
        for name in () if self.editable_mode else SHIPPED:
            out = Path(self.build_lib) / "accelerate_recipes/shipped_files" / name
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(name, out, ignore=shutil.ignore_patterns("__pycache__", ".*"))


setup(cmdclass={"build_py": BuildWithRecipes})
