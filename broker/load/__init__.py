"""What one user may put on a service of the pool: work in turn, and rates."""
