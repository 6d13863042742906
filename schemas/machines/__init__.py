"""Machines that a pool requests from a cluster: configuration and status."""
