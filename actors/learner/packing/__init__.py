"""Sequences of different lengths as rows without waste."""
