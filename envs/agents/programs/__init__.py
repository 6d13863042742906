"""Agent programs on a host: each behind walls of its own, from its folder to its reward."""
