"""Opponents for TextArena's games of two."""

import random


def any_free(seen: str, rng: random.Random) -> str:
    """Play tic-tac-toe: any of the moves that the last board names."""
    moves = seen.rpartition("Available Moves:")[2]
    return rng.choice(moves.replace("'", "").split(", ")).strip()
