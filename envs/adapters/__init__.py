"""Environments of other packages as games."""
