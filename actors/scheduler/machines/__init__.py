"""Machines of a cluster, which come when the queue needs them and go when nothing does.

`source` is the interface to a cluster; `ray`, `kubernetes` and, for SSH and Slurm, `sources`
implement it. `keeper` decides what to do, and does it.
"""
