"""How an actor's process is described: module, arguments, environment.

Secrets never stand on a command line: the broker's URL travels in the environment.
"""

from collections.abc import Sequence

from ...schemas.node import WantedActor

ENVIRONMENT = {
    "TINKERMQ_LOG_FORMAT": "json",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
"""What every process of the pool gets."""


_MODULES = {"rank": "learner.ranks", "trainer": "tinker", "sampler": "tinker.sampling"}
"""Roles whose module has another name."""


def actor_module(wanted: WantedActor) -> str:
    """Return the module that is run."""
    return f"tinkermq.actors.{_MODULES.get(wanted.role, wanted.role)}"


def actor_argv(wanted: WantedActor) -> list[str]:
    """Return its arguments."""
    return ["--user", wanted.user, "--job", wanted.job, "--name", wanted.name]


def actor_environment(
    wanted: WantedActor, nats_url: str, gpus: Sequence[int] | None = None
) -> dict[str, str]:
    """Return what is laid over the node's environment; threads are set before torch.

    `gpus` are the GPUs that the actor sees, by number at the driver; None for a node without any.
    """
    threads = str(wanted.threads)
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus is not None else {}
    return {
        **seen,
        **ENVIRONMENT,
        "TINKERMQ_NATS_URL": nats_url,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
