"""Agent programs on a host: each in a sandbox of its own, from its folder to its reward."""
