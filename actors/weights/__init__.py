"""Weights from the learner to the engines: one library with a sender's and a receiver's side.

A learner publishes through `publisher.Publisher`. Generators, evaluators and servers open the store
of a job (`job_weights.open_weights`, `follow_weights`), and `follower.WeightFollower` keeps their
engines at a version. `store` has versions and manifests, `history` the differences between
versions, and `tensors` the layout of payloads; the bytes are transferred by `payloads` (objects in
NATS, files), `shared_memory` (one read for a machine), and `broadcast` with `broadcast_group`
(torch.distributed: NCCL, gloo, CUDA IPC).
"""
