"""Chess: rules, games and next moves. A package and a recipe have the name `chess` already."""
