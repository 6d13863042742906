"""Looking after the pool's records: those that are damaged, and those of jobs to be removed."""
