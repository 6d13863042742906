"""Machines of a cluster, which come when the queue needs them and go when nothing does.

`source` is the seam to a cluster; `slurm`, `ray`, `kubernetes` and `ssh` are behind it. `decision`
says what to do, `keeper` does it.
"""
