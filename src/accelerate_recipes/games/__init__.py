"""Chess: rules, games, next moves, preferences and rewards. Not `chess`, which is python-chess and a recipe."""
