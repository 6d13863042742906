"""The learner: issues tasks under the staleness bound, trains from the log, publishes weights.

`tasks/` decides which tasks there are and which are trained, `algorithms/` makes numbers of their
episodes, `packing/` rows of their tokens, `training/` an optimiser step of them. `start` puts a
learner together, `learner` is its loop.
"""
