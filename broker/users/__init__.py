"""The users of a pool: their records, keys, permissions and secrets, and what was done to them."""
