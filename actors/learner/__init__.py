"""The learner of a job: its loop, the tasks it issues, what it records, and its ranks."""
