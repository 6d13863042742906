"""Machines of a cluster, requested when the queue needs them and returned when idle.

`source` is the interface to a cluster; `ray`, `kubernetes` and, for SSH and Slurm, `sources`
implement it. `keeper` decides when to request and return machines.
"""
