"""A program run once on this machine against a model by a script, and what it did."""
