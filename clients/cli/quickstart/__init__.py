"""The command that shows what this is, from nothing, on one machine."""
