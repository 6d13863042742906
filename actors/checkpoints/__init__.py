"""Checkpoints as files: what is needed without torch."""
