"""What travels: every message, subject and name of the system.

This room imports none of the others. A message is a pydantic model (`messages` modules by
noun), packed by `codec`, sent on a subject that `subjects` builds.
"""
