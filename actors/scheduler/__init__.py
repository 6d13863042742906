"""The scheduler: accepts jobs, places their actors on nodes, and reconciles both.

`scheduler` schedules while it has the lease, and answers clients; `lease` elects one of several
schedulers. `submission/` creates jobs, `placement` decides where actors run, `jobs/` has the jobs'
records and state transitions, `machines/` starts nodes on clusters. `reconciler` is the loop over
all live jobs; `notifier` notifies users.
"""
