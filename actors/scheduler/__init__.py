"""The scheduler: accepts jobs, places their actors on nodes, and keeps both in step.

`placement`, `roster`, `states` and `naming` are pure; `lease` decides which of several schedulers
acts; `pool` talks to the nodes; `requests` answers clients; `scheduler` is the loop over them.
"""
