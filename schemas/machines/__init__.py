"""Machines that a pool asks of a cluster: how it is configured, and what is told of them."""
