"""What a generator does for teachers: what they read, and asking those that are elsewhere."""
