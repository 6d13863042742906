"""Functions of a job's owner, called in a process of their own."""
