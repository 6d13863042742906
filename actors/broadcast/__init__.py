"""Versions of the policy from the learner's memory to receivers' memory: the `nccl` transport.

The manifest travels over NATS as with every transport; the bytes go through torch.distributed in
rounds. A receiver that wants a version asks the learner for a place (`sender`); the learner closes
the list of those who asked within a moment, they form a process group (`group`), and the learner
broadcasts to all at once. Nobody's number is fixed: who comes later has a later round, who leaves
does nothing, who dies costs the others one round, which they repeat without it. A group whose
members all ask again is used again, since communicators take long to make.

Between GPUs the group speaks NCCL, to and from memory of the machine gloo; the rest is the same.
"""
