"""The scheduler: accepts jobs, places their actors on nodes, and keeps both in step.

`placement`, `roster`, `states` and `naming` are pure; `lease` decides which of several schedulers
acts; `pool` talks to the nodes, `messenger` to learners; `submission` makes jobs, `desk` answers
clients; `reconciler` is the loop over all live jobs, `scheduler` the life around it.
"""
