"""The gateway: the pool over HTTP."""
