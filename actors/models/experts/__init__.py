"""Mixtures of experts: which experts read a token, recorded in one process, replayed in another."""
