"""Everything that uses NATS: the connection, JetStream, and the stores that actors share. No torch.

`client/` is the connection (log-in, requests, reconnecting), `jetstream/` the plain parts of its
store. On them stand `tasks`, `rollouts`, `partial_rollouts`, `jobs`, `feed` and `presence`;
`calls` are the requests to scheduler, learner and auth service, `permissions` and `credentials` the
right to send them.
"""

if __name__ != "tinkermq.broker":
    raise ImportError("this room is a part of the package tinkermq: write `tinkermq.broker`")
