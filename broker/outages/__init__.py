"""What a connection does while the broker is away, or stores nothing."""
