"""Checkpoints and models by URL, for pools whose machines share no disk."""
