"""What travels: every message, subject and name of the system.

This room imports none of the others. The modules here are messages by noun; `wire/` is what they
are made of and how they are packed and addressed, `config/` the configuration of a job, `bounds/`
how large anything may be.
"""

if __name__ != "tinkermq.schemas":
    raise ImportError("this room is a part of the package tinkermq: write `tinkermq.schemas`")
