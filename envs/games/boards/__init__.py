"""Boards of two players, and who plays on them."""
