"""Games over the broker: the host that serves them, and the other side."""
