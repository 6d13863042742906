"""What samples of an older policy, or of another engine, need."""
