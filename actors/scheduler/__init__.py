"""The scheduler: accepts jobs, places their actors on nodes, and keeps both in step.

`requests` answers clients, `submission/` makes jobs, `placement/` decides where actors run, `jobs/`
is what is known of jobs and how they move; `lease` decides which of several schedulers acts;
`messenger` talks to learners, `notifier` to users; `reconciler` is the loop over all live jobs,
`scheduler` the life around it.
"""
