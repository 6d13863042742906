"""The Python clients and the command line. Nothing here needs torch.

The names below are imported at their first use, so that the command line starts fast.
"""

if __name__ != "tinkermq.clients":
    raise ImportError("this room is a part of the package tinkermq: write `tinkermq.clients`")

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config_types import JobConfigDict
    from .hosting.agent_environment import (
        AgentEnvironment,
        AgentEpisode,
        AgentEpisodes,
        agent,
    )
    from .hosting.environments import (
        GameEnvironment,
        MathGameEnvironment,
        create_game_environment,
    )
    from .hosting.publish import (
        AsyncTrajectoryPublisher,
        TrajectoryPublisher,
        make_trajectory,
    )
    from .inference.inference_client import (
        AsyncInferenceSchedulerClient,
        InferenceSchedulerClient,
    )
    from .inference.play import InferenceReport
    from .inference.run_inference import run_inference, run_inference_async
    from .run import AsyncRun, Run
    from .scheduler_client import AsyncPoolUsers, AsyncSchedulerClient, PoolUsers, SchedulerClient
    from .service_client import AsyncServiceClient, ServiceClient

__all__ = [
    "AgentEnvironment",
    "AgentEpisode",
    "AgentEpisodes",
    "AsyncInferenceSchedulerClient",
    "AsyncPoolUsers",
    "AsyncRun",
    "AsyncSchedulerClient",
    "AsyncServiceClient",
    "AsyncTrajectoryPublisher",
    "GameEnvironment",
    "InferenceReport",
    "InferenceSchedulerClient",
    "JobConfigDict",
    "MathGameEnvironment",
    "PoolUsers",
    "Run",
    "SchedulerClient",
    "ServiceClient",
    "TrajectoryPublisher",
    "agent",
    "create_game_environment",
    "make_trajectory",
    "run_inference",
    "run_inference_async",
]

_HOMES = {
    "config_types": ("JobConfigDict",),
    "inference.run_inference": ("run_inference", "run_inference_async"),
    "inference.inference_client": ("AsyncInferenceSchedulerClient", "InferenceSchedulerClient"),
    "inference.play": ("InferenceReport",),
    "run": ("AsyncRun", "Run"),
    "scheduler_client": (
        "AsyncPoolUsers",
        "AsyncSchedulerClient",
        "PoolUsers",
        "SchedulerClient",
    ),
    "service_client": ("AsyncServiceClient", "ServiceClient"),
    "hosting.agent_environment": (
        "AgentEnvironment",
        "AgentEpisode",
        "AgentEpisodes",
        "agent",
    ),
    "hosting.environments": (
        "GameEnvironment",
        "MathGameEnvironment",
        "create_game_environment",
    ),
    "hosting.publish": ("AsyncTrajectoryPublisher", "TrajectoryPublisher", "make_trajectory"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    # With both, Python adds the closest name of `dir`.
    text = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(text, name=name, obj=import_module(__name__))


def __dir__() -> list[str]:
    return __all__
