"""The asynchronous clients, for programs that are not."""
