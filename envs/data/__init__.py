"""Data of games: conversations, and files that travel."""
