"""Serving a reward model over HTTP, as the reward of another job."""
