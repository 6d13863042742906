"""The checks themselves; each takes a `Setting` and returns `Found`, or raises why it cannot."""
