"""Actors, one process each (`python -m tinkermq.actors.<name>`), and the libraries they share.

`runtime` is the code that all of them share: start, logs, heartbeat, signals, end. torch is
imported by the learner, the generator and the evaluator only.
"""

if __name__ != "tinkermq.actors":
    raise ImportError("this room is a part of the package tinkermq: write `tinkermq.actors`")
