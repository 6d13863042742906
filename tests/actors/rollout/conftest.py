"""Episodes are played by the engines of the engine's own tests."""

from tests.actors.engine.conftest import (
    engine,
    engine_kind,
    eyes,
    folder,
    in_vllm,
    model,
    recorded,
    seeing,
    start,
)

__all__ = [
    "engine",
    "engine_kind",
    "eyes",
    "folder",
    "in_vllm",
    "model",
    "recorded",
    "seeing",
    "start",
]
