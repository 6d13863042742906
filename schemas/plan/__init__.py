"""Estimates of a job's use of GPUs: memory of each card, and the time of a step. No torch."""
