"""`python -m accelerate_recipes COMMAND ...`: what is done around a run."""

import sys

from accelerate_recipes.args import ConfigError

USAGE = """usage: python -m accelerate_recipes preflight CONFIG [LAUNCH FLAGS] RECIPE [ARGS...]

preflight   check a launch before it is queued: the accelerate YAML, the recipe's arguments, model and data
"""


def main() -> None:
    command, *argv = sys.argv[1:] or [""]
    if command != "preflight":
        sys.exit(USAGE)
    from accelerate_recipes.preflight import preflight  # imports torch and transformers: not for the usage

    try:
        print(preflight(argv))
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
