#!/usr/bin/env python3
"""UCI chess engine that knows scores for three opening moves; a search scores as its best move."""

CENTIPAWNS = {"e2e4": 50, "a2a3": -100, "f2f3": -1000}  # any other move: 0

while (line := input()) != "quit":
    words = line.split()
    if line == "uci":
        print("id name of the tests\nuciok", flush=True)
    elif line == "isready":
        print("readyok", flush=True)
    elif words[0] == "go":
        moves = words[words.index("searchmoves") + 1 :] if "searchmoves" in words else list(CENTIPAWNS)
        best = max(CENTIPAWNS.get(move, 0) for move in moves)
        print(f"info depth 1 score cp {best}\nbestmove (none)", flush=True)
