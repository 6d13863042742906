"""Everything that uses NATS: the connection, JetStream, and the stores that actors share. No torch.

`client/` is the connection (login, requests, reconnecting), `jetstream/` wraps streams, buckets and
objects. `tasks`, `rollouts`, `partial_rollouts`, `jobs`, `feed` and `presence` are built on them;
`calls` are the requests to scheduler, learner and auth service, `permissions` and `credentials` the
right to send them.
"""

if __name__ != "tinkermq.broker":
    raise ImportError("this room is a part of the package tinkermq: write `tinkermq.broker`")
