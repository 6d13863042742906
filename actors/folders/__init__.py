"""Folders of runs on the machines of the pool, as the scheduler and the nodes keep them."""
