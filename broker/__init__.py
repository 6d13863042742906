"""How it travels: everything that touches NATS, and nothing that touches torch.

`client/` is the way to a server, `jetstream/` the plain parts of its store, `outages/`, `load/` and
`disk/` what is done when it is away, flooded or full. On them stand what the actors share: `tasks`,
`rollouts`, `batches`, `segments`, `weights/`, `jobs`, `users/`, `feed` and `presence`; `calls/` is
what may be asked of scheduler, auth service and learner.
"""

if __name__ != "tinkermq.broker":
    raise ImportError("this room is a part of the package tinkermq: write `tinkermq.broker`")
