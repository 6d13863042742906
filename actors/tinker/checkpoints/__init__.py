"""What a trainer keeps of its users: named checkpoints, training runs, sessions."""
