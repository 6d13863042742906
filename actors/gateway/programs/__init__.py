"""Agent programs that run elsewhere, let in by the key of their episode and for nothing else."""
