"""Sandboxes for programs that a model wrote: no network, no files of the host, hard limits."""
