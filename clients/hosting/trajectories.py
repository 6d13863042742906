"""Trajectories from plain lists, for agents that are not ours."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from ...schemas.rollout import Trajectory
from ...schemas.wire.errors import MessageError
from ...schemas.wire.message import summarize


def make_trajectory(
    token_ids: Sequence[int] | NDArray[Any],
    mask: Sequence[int] | NDArray[Any],
    logprobs: Sequence[float] | NDArray[Any],
    rewards: float | Sequence[float] | NDArray[Any],
    version: int | Sequence[int] | NDArray[Any],
    *,
    messages: Sequence[Mapping[str, Any]] = (),
    finish_reasons: Sequence[Literal["stop", "length"]] = (),
    role: str = "",
    episode: int = -1,
    greedy: bool = False,
    seed: int = 0,
    info: Mapping[str, Any] | None = None,
    data_source: str = "",
    generate_s: float = 0.0,
    environment_s: float = 0.0,
) -> Trajectory:
    """Return a trajectory from plain lists; one entry per token of the whole conversation.

    `mask` is 1 where the policy generated the token. `logprobs` are the behaviour log-probs, and
    `version` the policy version, of the generated tokens (a single number, or one per token);
    both are ignored elsewhere. A turn is a run of generated tokens; `rewards` has one number per
    turn, or is a single one for the end of the episode. `finish_reasons` has one per turn: `length`
    for one that its limit of tokens cut, else `stop`; empty: not told.

    `messages` are the conversation, for people to read. `role` is that which was played in a game
    for several; rows with the same `episode` are those of one episode, within their group; `greedy`
    is the baseline of remax, which is not trained. `info` is what the game said at its end, such as
    `success`, `data_source` the origin by which scores are told apart, `seed` that of the episode.
    `generate_s` and `environment_s` are the seconds spent waiting for the model and for the
    environment.

    Raises MessageError that names what is wrong.
    """
    masks = _vector("mask", mask, np.uint8)
    generated = masks == 1
    turn_ends = np.flatnonzero(generated & ~np.append(generated[1:], False)).astype(np.int32)
    if not len(turn_ends):
        raise MessageError(
            "a trajectory has no generated token: mask is 0 everywhere",
            hint="set mask to 1 where the policy generated the token",
        )
    if np.ndim(rewards) == 0:
        rewards = [0.0] * (len(turn_ends) - 1) + [float(np.asarray(rewards))]
    versions = np.full(len(masks), version) if np.ndim(version) == 0 else np.asarray(version)
    logps = _vector("logprobs", logprobs, np.float32)
    if len(versions) != len(masks) or len(logps) != len(masks):
        raise MessageError(
            f"mask has {len(masks)} entries, logprobs {len(logps)}, version {len(versions)}",
            hint="give one entry per token of the whole conversation, prompt included",
        )
    fields: dict[str, Any] = {
        "token_ids": _vector("token_ids", token_ids, np.int32),
        "mask": masks,
        "logprobs": np.where(generated, logps, 0).astype(np.float32),
        "versions": np.where(generated, versions, -1).astype(np.int32),
        "turn_ends": turn_ends,
        "rewards": _vector("rewards", rewards, np.float32),
        "messages": [dict(message) for message in messages],
        "finish_reasons": list(finish_reasons),
        "role": role,
        "episode": episode,
        "greedy": greedy,
        "seed": seed,
        "info": dict(info or {}),
        "data_source": data_source,
        "generate_s": generate_s,
        "environment_s": environment_s,
    }
    try:
        return Trajectory(**fields)
    except ValidationError as error:
        raise MessageError(f"a trajectory is refused: {summarize(error)}") from error


def _vector(name: str, values: Any, dtype: Any) -> NDArray[Any]:
    try:
        array = np.asarray(values)
        exact = array.astype(dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"{name} cannot be an array of {np.dtype(dtype)}: {error}") from error
    if exact.ndim != 1:
        raise MessageError(f"{name} must have 1 dimension, has {exact.ndim}")
    if np.dtype(dtype).kind in "iu" and not np.array_equal(exact, array):
        raise MessageError(f"{name} holds values that are no {np.dtype(dtype)}")
    return exact
