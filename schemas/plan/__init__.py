"""Estimates of what a job takes on GPUs: memory of each card, and the time of a step. No torch."""
