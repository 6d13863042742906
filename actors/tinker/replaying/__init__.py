"""Sessions of the Tinker API, done again from what was kept of their operations."""
