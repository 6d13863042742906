"""Trajectories and groups of the rollout log."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from .agent import CallPlaces
from .model_apis.canonical import ModelMessage
from .task import Blame, Task
from .wire.array import (
    ExpertArray,
    FloatMatrix,
    FloatVector,
    IntMatrix,
    IntVector,
    MaskVector,
)
from .wire.bounds import Moment
from .wire.codec import cut_info, pack, packed_bytes
from .wire.errors import DataError, MessageError
from .wire.images import images_of, number_images
from .wire.message import Message, with_last
from .wire.subjects import NAME_PATTERN

# Teachers: log-probs that are computed before an episode is appended to the log.


class Teaching(Message):
    """Teacher data of a trajectory with N generated tokens."""

    prompt: IntVector | None = None
    """int32[P]: the first prompt for the teacher; null: the policy's."""
    logprobs: FloatVector | None = None
    """float32[N]: the teacher's log-prob of each generated token; null: the learner computes it."""
    top_ids: IntMatrix | None = None
    """int32[N, K]: the teacher's likeliest tokens at each position, if requested."""
    top_logprobs: FloatMatrix | None = None
    """float32[N, K]: their log-probs."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.top_ids is None) != (self.top_logprobs is None):
            raise ValueError("top_ids and top_logprobs must be given together")
        if self.top_ids is not None and self.top_logprobs is not None:
            sizes = self.top_ids.shape, self.top_logprobs.shape
            if sizes[0] != sizes[1] or self.logprobs is None or len(self.logprobs) != sizes[0][0]:
                raise ValueError("top_ids and top_logprobs must have a row for each of logprobs")
        return self

    def fits(self, num_generated: int) -> bool:
        """Whether its arrays fit a trajectory with this many generated tokens."""
        return self.logprobs is None or len(self.logprobs) == num_generated

    def wrong(self, vocab_size: int) -> str:
        """Return the error in its arrays' elements; empty: none."""
        token_ids = [ids for ids in (self.prompt, self.top_ids) if ids is not None]
        if any(((ids < 0) | (ids >= vocab_size)).any() for ids in token_ids):
            return f"a teacher's token ids must be from 0 to {vocab_size - 1}"
        arrays = [array for array in (self.logprobs, self.top_logprobs) if array is not None]
        if not all((np.isfinite(array) & (array <= 1e-3)).all() for array in arrays):
            return "a teacher's logprobs must be finite and at most 0"
        return ""


_MOST_KEYS = 1000
Finish = Literal["done", "turns", "length", "timeout"]
"""Why an episode ended."""


class Trajectory(Message):
    """Token-level record of one episode.

    The four vectors have one entry per token of the whole conversation, prompt included.
    """

    token_ids: IntVector
    """int32[T]: prompt, generated tokens and observations, in order."""
    mask: MaskVector
    """uint8[T]: 1 where the policy generated the token, 0 elsewhere."""
    logprobs: FloatVector
    """float32[T]: behaviour log-prob of generated tokens before top-p/top-k; 0 elsewhere."""
    versions: IntVector
    """int32[T]: policy version of generated tokens; -1 elsewhere."""
    experts: ExpertArray | None = None
    """uint8[T - 1, L, M]: the M experts that read each token but the last in each of L expert
    layers; null: not recorded (`algorithm.router_replay`)."""
    teaching: Teaching | None = None
    """Data of a teacher (`algorithm.teacher`)."""
    turn_ends: IntVector
    """int32[K]: position of each turn's last generated token, ascending."""
    rewards: FloatVector
    """float32[K]: reward of each turn."""
    finish: Finish = "done"
    """Why it ended: the game, the turn limit, the token limit, or a step timeout
    (`env.on_step_timeout`)."""
    finish_reasons: list[Literal["stop", "length"]] = Field(
        default_factory=list[Literal["stop", "length"]]
    )
    """Why each turn ended; empty: unknown."""
    turn_times: list[Moment] = Field(default_factory=list[Moment])
    """When each turn ended, by its generator's clock; 0: unknown, as of turns recorded by another
    generator; empty: unknown."""
    role: str = ""
    """Role; empty in a single-agent game."""
    episode: int = Field(default=-1, ge=-1)
    """Episode within the group, if it has several rows, which count as one; -1: a whole episode."""
    kind: str = Field(default="", max_length=32)
    """main, sub-agent, compacted, edited or sample."""
    calls: CallPlaces | None = None
    """Places of its turns among an agent episode's calls; null: consecutive."""
    opponents: dict[str, int] = Field(default_factory=dict[str, int])
    """Roles that an earlier version played, with that version; they have no trajectories."""
    greedy: bool = False
    """The baseline episode of remax, not trained."""
    seed: int = Field(default=0, ge=0)
    """Seed of the game's random generator."""
    messages: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """The conversation, for display; images are those of the first prompt."""
    info: dict[str, Any] = Field(default_factory=dict[str, Any])
    """`info` of the game's last step."""
    host: str = ""
    data_source: str = ""
    """Data source of the row; scores are reported by it."""
    num_tries: int = Field(default=1, ge=1)
    """1 + number of failed tries."""
    failures: list[Blame] = Field(default_factory=list[Blame])
    """Why earlier tries failed."""
    first_token: float = 0.0
    """Time of the first generated token; 0: unknown, as of programs' episodes and of those that
    another generator has begun."""
    generate_s: float = 0.0
    """Seconds spent waiting for the engine."""
    environment_s: float = 0.0
    """Seconds spent waiting for the environment."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        length = len(self.token_ids)
        for name in ("mask", "logprobs", "versions"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries, token_ids has {length}"
                )
        if self.experts is not None and len(self.experts) != length - 1:
            raise ValueError(
                f"experts has {len(self.experts)} entries for {length} tokens: give one for each "
                "but the last"
            )
        if self.teaching is not None and not self.teaching.fits(self.num_generated):
            raise ValueError(
                f"a teacher's logprobs are not those of the {self.num_generated} generated tokens"
            )
        if len(self.turn_ends) != len(self.rewards) or not len(self.turn_ends):
            raise ValueError(
                f"turn_ends has {len(self.turn_ends)} entries and rewards {len(self.rewards)}: "
                "they must be equal and at least 1"
            )
        if len(self.finish_reasons) not in (0, len(self.turn_ends)):
            raise ValueError(
                f"finish_reasons has {len(self.finish_reasons)} entries for "
                f"{len(self.turn_ends)} turns: give one for each, or none"
            )
        if len(self.turn_times) not in (0, len(self.turn_ends)):
            raise ValueError(
                f"turn_times has {len(self.turn_times)} entries for {len(self.turn_ends)} turns: "
                "give one for each, or none"
            )
        if self.calls is not None and len(self.calls.numbers) != len(self.turn_ends):
            raise ValueError(
                f"calls has {len(self.calls.numbers)} entries for {len(self.turn_ends)} turns"
            )
        return self

    @property
    def ended_by(self) -> Finish:
        """Why the episode ended: `length` if its last turn was cut, unless a step timed out."""
        was_cut = self.finish_reasons[-1:] == ["length"] and self.finish != "timeout"
        return "length" if was_cut else self.finish

    @property
    def reward(self) -> float:
        """The episode's return: the sum of its rewards."""
        return return_of([self])

    @property
    def num_generated(self) -> int:
        """Number of tokens the policy generated."""
        return int(self.mask.sum())

    @property
    def min_version(self) -> int:
        """Oldest version that produced one of the generated tokens."""
        return int(self.versions[self.mask == 1].min())

    @property
    def max_version(self) -> int:
        """Newest version that produced one of the generated tokens."""
        return int(self.versions.max())


class Group(Message):
    """All trajectories of one task, on `rollout.<n>`; the first append wins.

    A failed task has `error` and no trajectories, so that the log holds the outcome of every
    number.
    """

    max_bytes: ClassVar[int] = 64 << 20
    """Largest size that a server can be configured for (`max_payload`)."""

    task: Task
    trajectories: list[Trajectory] = Field(default_factory=list[Trajectory], max_length=1 << 16)
    """One per episode, and per role in a game with roles; a greedy baseline comes last. Rows of an
    agent's episode are adjacent, the main one first. A row omits what it shares with the previous
    one: `shared` holds the number of these tokens (none generated in this row) and messages."""
    images: list[bytes] = Field(default_factory=list[bytes])
    """Encoded images; messages refer to them by index."""
    error: Blame | None = None
    source: str
    """The generator or external agent."""
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    """What happened to KV caches at a weight swap."""
    started: float = 0.0
    finished: float = 0.0
    tokens_wasted: int = Field(default=0, ge=0)
    """Generated tokens of failed tries."""
    tokens_continued: int = Field(default=0, ge=0)
    """Generated tokens of `trajectories` from another generator's segments."""
    tokens_cut: list[int] = Field(default_factory=list[int])
    """Generated tokens of each cut episode (`rollout.oversample`)."""
    weights_s: float = Field(default=0.0, ge=0)
    """Seconds that the group waited for new enough weights."""
    time_use: dict[str, float] = Field(default_factory=dict[str, float])
    """Seconds since the generator's last group, by activity (see `StepTrace`)."""

    def named_at(self, at: str) -> str:
        """Return the subject of its task."""
        return with_last(at, self.task.task)

    def to_bytes(self, **instead: Any) -> bytes:
        """Pack to a msgpack map, with common parts of an episode's rows once."""
        if not any(row.episode == more.episode >= 0 for row, more in pairwise(self.trajectories)):
            return super().to_bytes(**instead)  # each row is an episode, and vectors are not copied
        rows = _without_shared([vars(item) for item in self.trajectories])
        return super().to_bytes(**{"trajectories": rows, **instead})

    @model_validator(mode="before")
    @classmethod
    def _whole_rows(cls, values: Any) -> Any:
        fields = cast("dict[str, Any]", values) if isinstance(values, dict) else {}
        rows = fields.get("trajectories")
        if not isinstance(rows, list):
            return cast("Any", values)
        return {**fields, "trajectories": _with_shared(cast("list[Any]", rows))}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.error is None) == (not self.trajectories):
            raise ValueError("a group must have either trajectories or an error")
        expected = self.task.group_size
        numbered = [
            (rows[0].role, rows[0].episode) for rows in self.episodes if rows[0].episode >= 0
        ]
        if len(numbered) != len(set(numbered)):
            raise ValueError(f"the rows of an episode of task {self.task.task} stand apart")
        for role, count in Counter(rows[0].role for rows in self.episodes).items():
            # A game may end before a role's first turn: that role has fewer conversations.
            if count > expected or (count < expected and not role):
                raise ValueError(
                    f"a group of task {self.task.task} has {expected} episodes, this has {count}"
                    + (f" of role {role}" if role else "")
                )
        if self.trajectories and not self.sampled:
            raise ValueError(f"a group of task {self.task.task} has no episode to train")
        greedy = any(item.greedy for item in self.trajectories)
        if self.trajectories and greedy != self.task.greedy_baseline:
            raise ValueError("the greedy baseline is missing or was not asked for")
        return self

    def with_shared_images(self) -> "Group":
        """Return the group with each image once; DataError for a missing one."""
        shared = dict[bytes, int]()
        trajectories = [
            item.model_copy(update={"messages": number_images(item.messages, shared, self.images)})
            for item in self.trajectories
        ]
        return self.model_copy(update={"trajectories": trajectories, "images": list(shared)})

    @property
    def sampled(self) -> list[Trajectory]:
        """The trained trajectories: all but the greedy baseline."""
        return [trajectory for trajectory in self.trajectories if not trajectory.greedy]

    @property
    def episodes(self) -> list[list[Trajectory]]:
        """The rows of each trained episode, its main row first; usually one."""
        return episodes_of(self.sampled)

    @property
    def has_equal_rewards(self) -> bool:
        """Whether all episodes have the same return, compared within each role."""
        returns: dict[str, set[float]] = {}
        for rows in self.episodes:
            returns.setdefault(rows[0].role, set()).add(return_of(rows))
        return all(len(rewards) == 1 for rewards in returns.values())

    @property
    def min_version(self) -> int:
        """Oldest version that produced one of the group's generated tokens."""
        return min(trajectory.min_version for trajectory in self.sampled)

    @property
    def max_version(self) -> int:
        """Newest version that produced one of the group's generated tokens."""
        return max(trajectory.max_version for trajectory in self.sampled)


def episodes_of(trajectories: Iterable[Trajectory]) -> list[list[Trajectory]]:
    """Return the rows of each episode among trajectories in the order of a group."""
    episodes: list[list[Trajectory]] = []
    for item in trajectories:
        is_part = item.episode >= 0 and episodes  # a game's episodes have one row
        if is_part and _episode(episodes[-1][-1]) == _episode(item):
            episodes[-1].append(item)
        else:
            episodes.append([item])
    return episodes


def return_of(rows: Sequence[Trajectory]) -> float:
    """Sum the rewards of an episode's rows, as a float32.

    Summing in float64 makes the result independent of the order.
    """
    total = sum(float(item.rewards.sum(dtype=np.float64)) for item in rows)
    return float(np.array(total, np.float32))


def num_too_old(trajectories: Iterable[Trajectory], oldest: int) -> int:
    """Count the generated tokens of versions before `oldest`."""
    return sum(
        int(((item.mask == 1) & (item.versions < oldest)).sum()) if oldest else 0
        for item in trajectories
    )


def with_cut_infos(group: Group, num_bytes: int, most: int) -> Group:
    """Return a group of `num_bytes` with its `info` cut to about `most` bytes in total.

    A cut `info` says so; see `cut_info`. If that does not suffice, the rest is unchanged.
    """
    sizes = [packed_bytes(item.info) for item in group.trajectories]
    left = sum(sizes) - (num_bytes - most)
    if left <= 0:
        return group
    level = _level(sizes, left)
    return group.model_copy(
        update={
            "trajectories": [
                item.model_copy(update={"info": cut_info(item.info, level)})
                if size > level
                else item
                for item, size in zip(group.trajectories, sizes, strict=True)
            ]
        }
    )


def _level(sizes: Sequence[int], most: int) -> int:
    """Return the size to which larger values are cut so that the sum is `most`."""
    left = most
    for place, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - place)
        if size > share:
            return share
        left -= size
    return max(sizes, default=0)


def largest_parts(group: Group, count: int = 3) -> list[str]:
    """Name the largest parts of a group by field, episode and bytes."""
    parts: list[tuple[int, str]] = [(sum(map(len, group.images)), "images")]
    if group.task.reset_kwargs:
        parts.append((packed_bytes(group.task.reset_kwargs), "task.reset_kwargs"))
    for place, item in enumerate(group.trajectories):
        number = item.episode if item.episode >= 0 else place
        for name, value in vars(item).items():
            size = len(pack(value, plain=_fields_of))
            parts.append((size, f"{_named(name, value, size)} of episode {number}"))
    largest = sorted(parts, key=lambda part: -part[0])[:count]
    return [f"{name} ({size:,} bytes)" for size, name in largest if size]


def _named(name: str, value: Any, size: int) -> str:
    """Return a field's name, with the key that holds most of it."""
    if name == "info" and len(value) <= _MOST_KEYS:
        for key, part in value.items():
            if packed_bytes(part) > size // 2:
                return f"info[{key!r:.60}]"
    return name


def _fields_of(value: Any) -> Any:
    return vars(value) if isinstance(value, Message) else value


def _episode(item: Trajectory) -> tuple[str, int, bool]:
    return item.role, item.episode, item.greedy


def check_group(group: Group, *, vocab_size: int, max_tokens: int, version: int) -> None:
    """Check the elements of a group's arrays, which validation skips.

    Raises MessageError naming the first broken rule.
    """
    episodes = group.trajectories
    lengths = np.array([len(item.token_ids) for item in episodes])
    if lengths.min() < 2 or lengths.max() > max_tokens:
        raise MessageError(
            f"the trajectories of task {group.task.task} have {lengths.min()} to {lengths.max()} "
            f"tokens, allowed are 2 to {max_tokens}"
        )
    ids, mask, logprobs, versions, rewards, ends = (
        np.concatenate([getattr(item, name) for item in episodes])
        for name in ("token_ids", "mask", "logprobs", "versions", "rewards", "turn_ends")
    )
    generated = np.flatnonzero(mask)
    logprobs, versions = logprobs[generated], versions[generated]
    try:
        for item in episodes:
            images_of(item.messages, group.images)
    except DataError as error:
        raise MessageError(f"a group of task {group.task.task} is refused: {error}") from error
    rules = {
        f"token_ids must be from 0 to {vocab_size - 1}": (ids >= 0) & (ids < vocab_size),
        "mask may hold 0 and 1 only": mask <= 1,
        "logprobs of generated tokens must be finite and at most 0": logprobs <= 1e-3,
        "logprobs of generated tokens must be finite": np.isfinite(logprobs),
        f"versions of generated tokens must be from 0 to {version}": (
            (versions >= 0) & (versions <= version)
        ),
        "rewards must be finite": np.isfinite(rewards),
        "rewards of calls and branches must be finite": np.isfinite(_further_rewards(episodes)),
        "turns must end, in order, on generated tokens, the last one included": _turns_fit(
            lengths, np.array([len(item.turn_ends) for item in episodes]), ends, mask
        ),
    }
    broken = [rule for rule, holds in rules.items() if not np.all(holds)]
    taught = [item.teaching for item in episodes if item.teaching is not None]
    broken += [wrong for teaching in taught if (wrong := teaching.wrong(vocab_size))]
    if broken:
        raise MessageError(f"a group of task {group.task.task} is refused: {broken[0]}")


def _further_rewards(episodes: Iterable[Trajectory]) -> NDArray[np.float64]:
    """Return the rewards posted for calls, episodes and branches."""
    places = [item.calls for item in episodes if item.calls is not None]
    rewards = [place.outcome for place in places]
    rewards += [branch.reward for place in places for branch in place.rewarded]
    rewards += [float(reward) for place in places for reward in place.rewards]
    return np.array(rewards, np.float64)


def _turns_fit(
    lengths: NDArray[np.int64],
    num_turns: NDArray[np.int64],
    ends: NDArray[np.int32],
    mask: NDArray[np.uint8],
) -> bool:
    """Whether each trajectory's turns ascend and end at generated tokens."""
    starts = np.cumsum(lengths) - lengths
    if mask[starts].any() or ends.min() < 0 or (ends >= np.repeat(lengths, num_turns)).any():
        return False
    places = ends + np.repeat(starts, num_turns)
    last_generated = np.flatnonzero(mask & ~np.append(mask[1:], 0))
    final = places[np.cumsum(num_turns) - 1]
    follows = np.append(np.diff(places) > 0, True)
    last_of_each = last_generated[np.searchsorted(last_generated, starts + lengths) - 1]
    return bool(mask[places].all() and follows.all() and (final == last_of_each).all())


# Segments: the state of running episodes, which another generator can continue.


class LoggedCall(Message):
    """One call of the model by a program; its tokens are the segment's."""

    parent: int | None = Field(default=None, ge=0)
    """Call that it continues; null: none."""
    follows: int | None = Field(default=None, ge=0)
    """Call whose history it continues, rendered anew."""
    context: bytes
    """Digest of all that shapes the prompt, such as tools."""
    given: list[ModelMessage]
    """Messages since the parent's answer."""
    num_given: int = Field(ge=0)
    """The segment's tokens for these messages; the others are generated."""
    name: str
    """Prefix of its tool call ids."""
    has_tools: bool
    """Texts that look like tool calls are calls."""
    is_thinking: bool
    """The prompt has opened the reasoning."""
    prefill: str = ""
    """Beginning of the answer, written by the program."""
    text: str | None = None
    """Text sent to the program, if not that of the tokens (cut at a stop text)."""
    finish: Literal["stop", "length"]
    num_seen: int = Field(ge=0)
    """Calls that had ended when it was requested."""
    branch: str = Field(default="", max_length=32)
    """Why it is not its parent's only continuation."""
    masked: float = Field(default=0.0, ge=0)
    """Probability removed by the answer's format, summed over its tokens."""
    request: bytes
    """Digest of the request, prompt and limits; it may answer an equal request."""
    asked: str = Field(default="", max_length=64)
    """Id from the program's proxy, for retries; the same for all choices of an answer."""


class Segment(Message):
    """What one episode gained since its last segment, on `segment.<n>.<e>`.

    It is appended with the previous segment's sequence as the expected last one. A segment without
    tokens takes the episode over for its writer. The four vectors continue those of the previous
    segment; see `Trajectory`.
    """

    delivery: int = Field(ge=1)
    """Deliveries of the task when its writer got it; never decreases."""
    writer: str
    """The generator, its process and its lease of the task."""
    episode: str = ""
    """Episode id at its environment host."""
    host: str = Field(default="", pattern=f"^$|{NAME_PATTERN}")
    seed: int = Field(default=0, ge=0)
    """Seed of sampling; turns count up from it."""
    start: int = Field(ge=0)
    """Position of the first token. 0: the episode starts anew, earlier segments are void."""
    token_ids: IntVector
    mask: MaskVector
    logprobs: FloatVector
    versions: IntVector
    turn_ends: list[int] = Field(default_factory=list[int])
    """Last tokens of turns that ended."""
    rewards: list[float] = Field(default_factory=list[float])
    """Rewards of answered turns."""
    observations: list[dict[str, Any] | list[dict[str, Any]]] = Field(
        default_factory=list[dict[str, Any] | list[dict[str, Any]]]
    )
    """Observations, as chat messages; a list of them where a turn made several calls of tools."""
    call: LoggedCall | None = None
    """Call of these tokens, in an episode of a program."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        columns = (self.token_ids, self.mask, self.logprobs, self.versions)
        lengths = {len(column) for column in columns}
        if len(lengths) != 1 or len(self.rewards) != len(self.observations):
            raise ValueError("the columns of a segment have different lengths")
        return self

    def messages_by_turn(self) -> list[list[dict[str, Any]]]:
        """Return the observations as one list of chat messages for each answered turn."""
        return [entry if isinstance(entry, list) else [entry] for entry in self.observations]

    @classmethod
    def empty(cls, **fields: Any) -> Self:
        """Return a segment without tokens."""
        ints, floats = np.empty(0, np.int32), np.empty(0, np.float32)
        mask = np.empty(0, np.uint8)
        return cls(token_ids=ints, mask=mask, logprobs=floats, versions=ints, **fields)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


# -- rows in messages ------------------------------------------------------------------------------
#
# A beginning that a row shares with the previous one is sent once. Rows of an agent's episode are
# paths of one tree of calls; if each call renders its history anew, rows repeat most of it.

_VECTORS = {"token_ids": None, "mask": 0, "logprobs": 0.0, "versions": -1}
"""Per-token arrays, and their value for tokens not generated in this row."""
_MOST_TOKENS = 1 << 23
"""Maximum number of shared tokens of a group's rows, which bounds unpacking."""
_MOST_MESSAGES = 1 << 19
"""Shared messages, likewise."""

_Row = dict[str, Any]


def _without_shared(rows: Sequence[_Row]) -> list[_Row]:
    """Remove from each row the beginning that it shares with the previous one."""
    shortened: list[_Row] = []
    before: _Row | None = None
    for row in rows:
        is_next = before is not None and row["episode"] >= 0 and _same_episode(before, row)
        shortened.append(_behind(before, row) if is_next and before is not None else row)
        before = row
    return shortened


def _with_shared(rows: Sequence[Any]) -> list[Any]:
    """Restore removed beginnings; ValueError for rows that cannot be complete."""
    whole_rows: list[Any] = []
    num_tokens, num_messages = 0, 0
    for row in rows:
        whole, before = row, whole_rows[-1] if whole_rows else None
        if isinstance(row, dict) and (cast("_Row", row).get("shared") or None) is not None:
            fields = cast("_Row", row)
            tokens, messages = _numbers(fields["shared"])
            num_tokens, num_messages = num_tokens + tokens, num_messages + messages
            if num_tokens > _MOST_TOKENS or num_messages > _MOST_MESSAGES:
                raise ValueError(
                    f"rows share more than {_MOST_TOKENS:,} tokens or {_MOST_MESSAGES:,} messages"
                )
            whole = _behind_again(before, fields, tokens, messages)
        whole_rows.append(whole)
    return whole_rows


def _same_episode(row: _Row, other: _Row) -> bool:
    return all(row[name] == other[name] for name in ("role", "episode", "greedy"))


def _behind(before: _Row, row: _Row) -> _Row:
    tokens = _num_tokens(before, row)
    messages = 0
    for message, other in zip(before["messages"], row["messages"], strict=False):
        if message != other:
            break
        messages += 1
    if not tokens and not messages:
        return row
    vectors = {name: row[name][tokens:] for name in _VECTORS}
    return {
        **row,
        **vectors,
        "messages": row["messages"][messages:],
        "shared": [tokens, messages],
    }


def _num_tokens(before: _Row, row: _Row) -> int:
    """Count the equal leading tokens that were not generated in this row."""
    num_tokens = len(row["mask"])
    for name, value in _VECTORS.items():
        if value is not None and (others := np.flatnonzero(row[name] != value)).size:
            num_tokens = min(num_tokens, int(others[0]))
    length = min(num_tokens, len(before["token_ids"]))
    differs = np.flatnonzero(before["token_ids"][:length] != row["token_ids"][:length])
    return int(differs[0]) if differs.size else length


def _numbers(shared: Any) -> tuple[int, int]:
    match shared:
        case [int(tokens), int(messages)] if tokens >= 0 and messages >= 0:
            return tokens, messages
        case _:
            raise ValueError("`shared` must be a number of tokens and a number of messages")


def _behind_again(before: Any, row: _Row, tokens: int, messages: int) -> _Row:
    if not isinstance(before, dict):
        raise ValueError("the first row shares tokens, and no row stands before it")
    ids, earlier = cast("_Row", before).get("token_ids"), cast("_Row", before).get("messages")
    if not isinstance(ids, np.ndarray) or not isinstance(earlier, list):
        raise ValueError("the row before has no tokens or messages to share")
    if len(cast("NDArray[Any]", ids)) < tokens or len(cast("list[Any]", earlier)) < messages:
        raise ValueError(f"the row before has less than {tokens} tokens or {messages} messages")
    own = row.get("messages", [])
    if not isinstance(own, list):
        raise ValueError("messages must be a list")
    first = cast("NDArray[Any]", ids)[:tokens]
    whole = {name: _joined(first, row.get(name), value) for name, value in _VECTORS.items()}
    fields = {name: value for name, value in row.items() if name != "shared"}
    return {**fields, **whole, "messages": [*earlier[:messages], *own]}


def _joined(ids: NDArray[Any], own: Any, value: float | None) -> NDArray[Any]:
    if not isinstance(own, np.ndarray) or cast("NDArray[Any]", own).ndim != 1:
        raise ValueError("the arrays of a row must have one dimension")
    vector = cast("NDArray[Any]", own)
    first = ids if value is None else np.full(len(ids), value, vector.dtype)
    return np.concatenate([first, vector]).astype(vector.dtype, copy=False)
