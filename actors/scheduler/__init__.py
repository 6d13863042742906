"""The scheduler: accepts jobs, places their actors on nodes, and keeps both in step.

`scheduler` schedules while it has the lease, and answers clients; `lease` decides which of several
schedulers acts. `submission/` makes jobs, `placement` decides where actors run, `jobs/` is what is
known of jobs and how they move, `machines/` has clusters start nodes. `reconciler` is the loop over
all live jobs; `notifier` tells users what happened.
"""
