"""Commands, `python -m accelerate_recipes COMMAND ...`; see `recipe_tools.commands`."""

from recipe_tools.commands import main

if __name__ == "__main__":
    main()
