"""Chess: rules, games, next moves, preferences and rewards. The folder is not named `chess`: a package and a recipe are."""
