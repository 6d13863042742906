"""The learner: issues tasks under the staleness bound, trains from the log, publishes weights.

Pure functions on tensors and numbers: `advantages`, `losses`, `corrections`, `kl`, `aggregation`,
`packing`, `schedules`, `admission`, `batching`. `step` makes one optimiser step of them, and
`learner` is the loop around it.
"""
