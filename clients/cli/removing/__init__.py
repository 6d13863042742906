"""The commands that put runs away: `archive` and `delete`."""
