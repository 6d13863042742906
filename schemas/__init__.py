"""Messages, subjects and the configuration of jobs. This room imports none of the others.

The modules hold messages by noun; `wire/` holds their base, encoding, bounds and subjects,
`config/` the configuration of a job, `plan/` estimates of its memory and time, `tinker/` the
messages of the Tinker API. `local/` is the access to disks, folders and processes of the machine.
"""

if __name__ != "tinkermq.schemas":
    raise ImportError("this room is a part of the package tinkermq: write `tinkermq.schemas`")
