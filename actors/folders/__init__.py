"""Folders of runs on the machines of the pool, and what jobs may read and write there."""
