"""The ranks beside rank 0 of a learner: child processes, or actors that the scheduler places."""
