"""What travels: every message, subject and name of the system.

This room imports none of the others. The modules here are messages by noun; `wire/` is what they
are made of and how they are packed and addressed, `config/` the configuration of a job, `bounds/`
how large anything may be.
"""
