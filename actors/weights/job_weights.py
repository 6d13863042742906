"""The weights of a job, as its learner, generators, evaluators and servers open them."""

import os
from typing import Literal

import torch

from ...schemas.config.job import JobConfig
from ...schemas.config.sections import model_paths
from ...schemas.wire.subjects import JobScope
from ..addresses import is_cut_off
from ..policy.devices import own_device
from ..runtime import JobContext
from .broadcast import BroadcastReceiver, Sender
from .store import SeenFiles, WeightStore


def open_weights(context: JobContext, sender: Sender | None = None) -> WeightStore:
    """Open the weight store of a job with its configured transport.

    A learner passes the `sender` of that transport, if there is one.
    """
    return _open(context, context.scope, sender, SeenFiles([*model_paths(context.config).values()]))


def _open(
    context: JobContext, scope: JobScope, sender: Sender | None, files: SeenFiles | None
) -> WeightStore:
    config = context.config.weights
    # with `auto` only the learner knows whether it sends from memory; others accept both
    transport = "object" if sender is None and config.transport == "auto" else transport_of(context)
    receives = config.transport in ("auto", "nccl")
    device = device_of_new_weights(context.config)
    return WeightStore(
        context.broker,
        scope,
        transport,
        folder=config.folder or context.run_dir / "weights",
        chunk_bytes=config.chunk_bytes,
        differences=config.differences,
        full_snapshot_every=config.full_snapshot_every,
        holder=sender,
        receiver=BroadcastReceiver(context.broker, scope, device) if receives else None,
        files=files,
        shared_bytes=config.shared_bytes,
        sha256=config.sha256,
    )


def transport_of(context: JobContext) -> Literal["object", "file", "nccl"]:
    """Return the transport of a job: the configured one, or chosen by the actors' places.

    A learner has the UUIDs of its GPUs in its environment. It uses `nccl` if a generator shares its
    GPU, or if all generators have GPUs and can reach it; instances of a GPU cannot reach others. In
    a pool with users other jobs could reach it, too.
    """
    transport, record = context.config.weights.transport, context.record
    if transport != "auto":
        return transport
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if record.is_colocated:
        return "nccl" if own.startswith(("GPU-", "MIG-")) else "object"
    generators = [actor for actor in record.actors if actor.role == "generator"]
    on_gpus = own.startswith("GPU-") and all(actor.gpus for actor in generators)
    if not generators or not on_gpus or context.broker.login.is_authenticated:
        return "object"
    nodes = {actor.node for actor in record.actors if actor.gpus}
    return "nccl" if len(nodes) == 1 or not is_cut_off(context.broker) else "object"


def make_sender(context: JobContext) -> Sender | None:
    """Return the sender of a learner, for the transport `nccl`; None for others."""
    if transport_of(context) != "nccl":
        return None
    return Sender(
        context.broker,
        context.scope,
        context.run_dir / "weights",
        own_device(),
        num_receivers=sum(actor.role == "generator" for actor in context.record.actors),
    )


def follow_weights(context: JobContext, job: str) -> WeightStore:
    """Open the weights of the run that a server follows.

    The scheduler has set the server's `weights` to those of the run.
    """
    return _open(context, JobScope(context.scope.user, job), None, None)


def device_of_new_weights(config: JobConfig) -> torch.device:
    """Return the device for new weights in this process.

    vLLM's GPUs belong to its worker processes, which read new weights from host memory.
    """
    if config.generator.engine == "vllm":
        return torch.device("cpu")
    return own_device()
