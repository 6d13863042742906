"""The weights of a job, as its learner, generators and evaluators open them."""

from collections.abc import Mapping

from ..broker.weights import TensorBytes, WeightStore
from .generator.engine import TensorSource
from .policies import MAIN, prefix_of
from .runtime import JobContext


def open_weights(context: JobContext) -> WeightStore:
    """Open the weight store of a job with the transport that its configuration names."""
    config = context.config.weights
    return WeightStore(
        context.broker,
        context.scope,
        config.transport,
        folder=config.folder or context.run_dir / "weights",
        chunk_bytes=config.chunk_bytes,
        differences=config.differences,
        whole_every=config.whole_every,
    )


def as_sources(tensors: Mapping[str, TensorBytes], policy: str = MAIN) -> dict[str, TensorSource]:
    """Give the fetched tensors of a policy in the form that an engine takes."""
    prefix = prefix_of(policy)
    return {
        name.removeprefix(prefix): (item.dtype, item.shape, item.data)
        for name, item in tensors.items()
        if (name.startswith(prefix) if prefix else "/" not in name)
    }
