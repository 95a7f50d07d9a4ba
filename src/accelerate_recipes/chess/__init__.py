"""Chess: rules, games, next moves, preferences and rewards. A package and a recipe have the name `chess` already."""
