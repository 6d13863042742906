"""What a program says of its own episode: rewards, its end, notes about calls.

Other trainers' ways to say it are understood, so that programs written for them need no change.
"""

import math
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, Literal, TypeAlias, cast

from ....schemas.wire.codec import read_json
from ....schemas.wire.errors import MessageError
from ....schemas.wire.foreign import plain_value
from ...model_apis.request import Fields, RequestError
from ..episode import EpisodeLimit, EpisodeOver, ProgramEpisode
from .exchange import dumped
from .open_episodes import OpenEpisode

Post: TypeAlias = Callable[[OpenEpisode, bytes, str], dict[str, Any]]
"""`post(episode, body, idempotency_key)` takes what was said and returns the reply."""

MAX_POST_BYTES = 1 << 20
_MOST_POSTS = 1 << 16
_MOST_INFO_BYTES = 256 << 10
_ROLE_CHARS = 100


def post_reward(opened: OpenEpisode, raw: bytes, name: str = "") -> dict[str, Any]:
    """Take `{reward, call? | branch?, info?, mode?}`: of the episode, a call or a branch."""
    fields = _fields(raw)
    reward = _reward(fields, "reward")
    mode = fields.text("mode", "set")
    call = _call(opened, fields.any("call"))
    branch = _call(opened, fields.any("branch"), "branch")
    _take_info(opened.episode, fields.any("info"))
    _nothing_else(fields)
    if mode not in ("set", "add"):
        raise RequestError(f"mode is {mode!r:.40}", param="mode", hint="give set or add")
    if branch is not None and call is not None:
        raise RequestError(
            "a reward is that of a call or of a branch", param="branch", hint="post two"
        )
    what = name.encode() or raw
    return _give(opened, reward, call, cast("Any", mode), what, branch=branch)


def post_end(opened: OpenEpisode, raw: bytes, name: str = "") -> dict[str, Any]:
    """Take `{status, reward?, success?, info?, message?}`; what was said first stands."""
    del name
    fields, episode = _fields(raw), opened.episode
    status = fields.text("status", "done")
    if status not in ("done", "failed"):
        raise RequestError(f"status is {status!r:.40}", param="status", hint="give done or failed")
    reward = None if fields.any("reward") is None else _reward(fields, "reward")
    said: dict[str, Any] = {
        key: value for key in ("success", "message") if (value := fields.any(key)) is not None
    }
    if not isinstance(said.get("success", False), bool):
        raise RequestError("success must be true or false", param="success")
    if not isinstance(said.get("message", ""), str):
        raise RequestError("message must be a text", param="message")
    info = fields.any("info")
    _nothing_else(fields)
    if not episode.status:
        _take_info(episode, info)
        _take_info(episode, said)
        episode.reward = episode.reward if reward is None else reward
        episode.status = status
        episode.said_end.set()
        episode.changed.set()
        for call in opened.calls:
            call.end(EpisodeOver("the program has said that its episode has ended"))
    return {"status": episode.status, "reward": episode.reward}


def post_note(opened: OpenEpisode, raw: bytes, name: str = "") -> dict[str, Any]:
    """Take `{call | branch, role?, train?}`: the name of a branch, whether a call is trained."""
    del name
    fields, episode = _fields(raw), opened.episode
    call, branch = _call(opened, fields.any("call")), _call(opened, fields.any("branch"), "branch")
    call = branch if call is None else call
    if call is None:
        raise RequestError("call is missing", param="call", hint="name the call: its number or id")
    role, train = fields.text("role"), fields.any("train")
    if not isinstance(train, bool | None):
        raise RequestError("train must be true or false", param="train")
    _nothing_else(fields)
    if role:
        episode.notes[call] = role[:_ROLE_CHARS]
    if train is not None:
        (episode.untrained.discard if train else episode.untrained.add)(call)
    episode.changed.set()
    return {"call": call, "role": episode.notes.get(call), "train": call not in episode.untrained}


def post_interaction_reward(opened: OpenEpisode, raw: bytes, name: str = "") -> dict[str, Any]:
    """Take `{reward, interaction_id?}`."""
    fields = _fields(raw)
    call = _call(opened, fields.any("interaction_id"))
    return _give(opened, _reward(fields, "reward"), call, "set", name.encode() or raw)


def post_session_end(opened: OpenEpisode, raw: bytes, name: str = "") -> dict[str, Any]:
    """Take whatever says that a session has ended."""
    del raw
    return post_end(opened, b"", name)


def post_reward_info(opened: OpenEpisode, raw: bytes, name: str = "") -> dict[str, Any]:
    """Take `{reward_info: {reward | reward_score, …}}`, or the same without a field around it."""
    fields = _fields(raw)
    inner = fields.any("reward_info")
    if isinstance(inner, dict):
        fields = Fields(cast("Any", inner), "reward_info")
    key = next((key for key in ("reward", "reward_score") if fields.any(key) is not None), "reward")
    return _give(opened, _reward(fields, key), None, "set", name.encode() or raw)


def post_event(opened: OpenEpisode, raw: bytes, name: str = "") -> dict[str, Any]:
    """Take `{event_type: "reward", data: {value}}`; other events say nothing to us."""
    fields = _fields(raw)
    if fields.text("event_type") != "reward":
        return {"taken": False}
    data = Fields(fields.any("data") or fields.any("payload") or {}, "data")
    key = "value" if data.any("value") is not None else "reward"
    return _give(opened, _reward(data, key), None, "set", name.encode() or raw)


def episode_status(opened: OpenEpisode, now: float) -> dict[str, Any]:
    """Return what a program may know of its own episode."""
    episode = opened.episode
    left_s = episode.deadline - now
    return {
        "job": episode.job,
        "episode": episode.episode,
        "split": episode.split,
        "seed": episode.seed,
        "input": episode.task_input,
        "calls": episode.num_calls,
        "open": episode.num_open,
        "reward": episode.reward,
        "status": episode.status,
        "over": episode.over,
        "left": {"seconds": round(left_s, 3) if math.isfinite(left_s) else None},
    }


def _give(
    opened: OpenEpisode,
    reward: float,
    call: int | None,
    mode: Literal["set", "add"],
    what: bytes,
    branch: int | None = None,
) -> dict[str, Any]:
    """Give the episode, a call or a branch a reward; an addition that was posted counts once."""
    episode = opened.episode
    if episode.said_end.is_set():
        raise EpisodeOver(
            "the program has said that its episode has ended",
            hint="post rewards before the end, or with it",
        )
    number = call if branch is None else branch
    rewards = episode.call_rewards if branch is None else episode.branch_rewards
    before = episode.reward if number is None else rewards.get(number)
    if mode == "add":
        reward = (before or 0.0) if _is_known(opened, what) else (before or 0.0) + reward
    if number is None:
        episode.reward = reward
    else:
        rewards[number] = reward
    episode.changed.set()
    return {"reward": reward, "call": call, **({} if branch is None else {"branch": branch})}


def _is_known(opened: OpenEpisode, what: bytes) -> bool:
    digest = blake2b(what, digest_size=16).digest()
    known = digest in opened.posted
    opened.posted.add(digest)
    if len(opened.posted) > _MOST_POSTS:
        raise EpisodeLimit(f"more than {_MOST_POSTS:,} rewards were posted")
    return known


def _fields(raw: bytes) -> Fields:
    try:
        return Fields(read_json(raw) if raw.strip() else {})
    except MessageError as error:
        raise RequestError(f"the body is not valid JSON: {error.message}") from error


def _reward(fields: Fields, key: str) -> float:
    value = fields.any(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        place = fields.name(key)
        raise RequestError(f"{place} must be a finite number, and is {value!r:.60}", param=place)
    return float(value)


def _call(opened: OpenEpisode, value: Any, name: str = "call") -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise RequestError(f"{name} must be a number or an id, and is {value!r:.60}", param=name)
    return opened.call_number(value)


def _take_info(episode: ProgramEpisode, info: Any) -> None:
    if info is None:
        return
    if not isinstance(info, Mapping):
        raise RequestError("info must be an object", param="info")
    try:
        added = plain_value(dict(cast("Mapping[str, Any]", info)), "info")
    except MessageError as error:
        raise RequestError(error.message, param="info", hint=error.hint) from error
    together = {**episode.info, **added}
    if len(dumped(together)) > _MOST_INFO_BYTES:
        raise EpisodeLimit(f"info is over {_MOST_INFO_BYTES:,} bytes for one episode")
    episode.info = together


def _nothing_else(fields: Fields) -> None:
    for name in fields.unread():
        raise RequestError(f"there is no field {name!r:.60} here", param=name)
