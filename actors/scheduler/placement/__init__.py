"""Which node gets which actor, in which order."""
