"""How it travels: everything that touches NATS, and nothing that touches torch.

`server` is a nats-server of our own, `connection` the way to any; `rpc` asks and answers; `kv`,
`streams` and `stored` are the plain parts of JetStream. On them stand what the actors share:
`tasks`, `rollouts`, `batches`, `weights`, `jobs`, `feed` and `presence`.
"""
