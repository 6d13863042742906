"""Messages, subjects and names of the system.

This room imports none of the others. The modules here hold messages by noun; `wire/` their base,
encoding and addresses, `config/` the configuration of a job, `bounds/` the default bounds of
fields.
"""

if __name__ != "tinkermq.schemas":
    raise ImportError("this room is a part of the package tinkermq: write `tinkermq.schemas`")
