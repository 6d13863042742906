"""Trajectories and groups: what generators and external agents append to the rollout log."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from .agent import CallMessage, CallPlaces
from .task import Blame, Task
from .wire.array import (
    ExpertArray,
    FloatMatrix,
    FloatVector,
    IntMatrix,
    IntVector,
    MaskVector,
)
from .wire.codec import pack
from .wire.errors import DataError, MessageError
from .wire.fitting import cut_info, packed_bytes
from .wire.images import images_of, number_images
from .wire.message import Message, with_last
from .wire.shared_rows import with_shared, without_shared
from .wire.subjects import NAME_PATTERN

# What a teacher said of an episode, where it was asked before the episode entered the log.


class Teaching(Message):
    """What belongs to a trajectory of N generated tokens, for its teacher."""

    prompt: IntVector | None = None
    """int32[P]: the first prompt as the teacher reads it; None: as the policy does."""
    logprobs: FloatVector | None = None
    """float32[N]: log-prob of each generated token to the teacher; None: the learner asks it."""
    top_ids: IntMatrix | None = None
    """int32[N, K]: the teacher's likeliest tokens in the place of each, where asked for."""
    top_logprobs: FloatMatrix | None = None
    """float32[N, K]: their log-probs."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.top_ids is None) != (self.top_logprobs is None):
            raise ValueError("top_ids and top_logprobs belong together")
        if self.top_ids is not None and self.top_logprobs is not None:
            sizes = self.top_ids.shape, self.top_logprobs.shape
            if sizes[0] != sizes[1] or self.logprobs is None or len(self.logprobs) != sizes[0][0]:
                raise ValueError("top_ids and top_logprobs have a row for each of logprobs")
        return self

    def fits(self, num_generated: int) -> bool:
        """Whether it is of a trajectory with so many generated tokens."""
        return self.logprobs is None or len(self.logprobs) == num_generated

    def wrong(self, vocab_size: int) -> str:
        """Say what is wrong with the elements of its arrays; empty: nothing is."""
        known = [one for one in (self.prompt, self.top_ids) if one is not None]
        if any(((one < 0) | (one >= vocab_size)).any() for one in known):
            return f"a teacher's token ids must be from 0 to {vocab_size - 1}"
        told = [one for one in (self.logprobs, self.top_logprobs) if one is not None]
        if not all((np.isfinite(one) & (one <= 1e-3)).all() for one in told):
            return "a teacher's logprobs must be finite and at most 0"
        return ""


_MOST_KEYS = 1000
Finish = Literal["done", "turns", "length", "timeout"]
"""What ends an episode."""


class Trajectory(Message):
    """The token-level record of one episode.

    The four vectors have one entry per token of the whole conversation, prompt included.
    """

    token_ids: IntVector
    """int32[T]: prompt, then generated tokens and observations in order."""
    mask: MaskVector
    """uint8[T]: 1 where the policy generated the token, 0 elsewhere."""
    logprobs: FloatVector
    """float32[T]: behaviour log-prob of each generated token before top-p/top-k; 0 elsewhere."""
    versions: IntVector
    """int32[T]: policy version that produced each generated token; -1 elsewhere."""
    experts: ExpertArray | None = None
    """uint8[T - 1, L, M]: the M experts that read each token but the last, in each of L layers with
    experts, as the engine computed the token first; None: not recorded (`algorithm.router_replay`).
    """
    teaching: Teaching | None = None
    """What is for its teacher, or came from it (`algorithm.teacher`)."""
    turn_ends: IntVector
    """int32[K]: position of the last generated token of each turn, ascending."""
    rewards: FloatVector
    """float32[K]: the game's reward for each turn."""
    finish: Finish = "done"
    """Why there was no further turn: the game said so, the turn limit, the token limit, or a step
    that took the game too long (`env.on_step_timeout`)."""
    finish_reasons: list[Literal["stop", "length"]] = Field(
        default_factory=list[Literal["stop", "length"]]
    )
    """Why each turn ended: by a stop token, or cut by its limit of tokens; empty: not told."""
    role: str = ""
    """Role that it was played in; empty in a game for one."""
    episode: int = Field(default=-1, ge=-1)
    """Number of its episode within the group, where an episode has several rows: together they
    count as one. -1: it is a whole episode."""
    kind: str = Field(default="", max_length=32)
    """What it is of its episode: main, sub-agent, compacted, edited or sample; empty: all."""
    calls: CallPlaces | None = None
    """Where its turns stand among the calls of an agent's episode; None: one after the other."""
    opponents: dict[str, int] = Field(default_factory=dict[str, int])
    """Roles that an earlier version played, and that version; they have no trajectories."""
    greedy: bool = False
    """This episode is the greedy baseline of remax: it is not trained."""
    seed: int = Field(default=0, ge=0)
    """Seed of the game's random generator in this episode."""
    messages: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """The conversation as chat messages, for people to read; its images are those that the policy
    saw in the first prompt."""
    info: dict[str, Any] = Field(default_factory=dict[str, Any])
    """What the game said in `info` at its last step."""
    host: str = ""
    """The environment host that ran the game."""
    data_source: str = ""
    """What the row of the data says of its origin; scores are told apart by it."""
    num_tries: int = Field(default=1, ge=1)
    """1 + the number of earlier tries of this episode that failed."""
    failures: list[Blame] = Field(default_factory=list[Blame])
    """Why the earlier tries failed."""
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
        if self.calls is not None and len(self.calls.numbers) != len(self.turn_ends):
            raise ValueError(
                f"calls has {len(self.calls.numbers)} entries for {len(self.turn_ends)} turns"
            )
        return self

    @property
    def ended_by(self) -> Finish:
        """What ended the episode: `length` where its last turn was cut, whatever came of it, but
        that it took the game too long."""
        was_cut = self.finish_reasons[-1:] == ["length"] and self.finish != "timeout"
        return "length" if was_cut else self.finish

    @property
    def reward(self) -> float:
        """The episode's return: the sum of its rewards."""
        return float(self.rewards.sum())

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
    """All trajectories of one task, on `rollout.<n>`; appended once, by whoever is first.

    A task that was given up has `error` set and no trajectories, so that the log holds the fate
    of every number.
    """

    max_bytes: ClassVar[int] = 64 << 20
    """As much as a server can be set to take (`max_payload`)."""

    task: Task
    """The task as it was issued."""
    trajectories: list[Trajectory] = Field(default_factory=list[Trajectory], max_length=1 << 16)
    """One per episode, and per role in a game with roles; the greedy baseline, where asked for,
    stands last. The rows of an agent's episode stand together, the main one first. A row that
    begins as the one before it travels without that: its `shared` tells how many tokens, which are
    not generated in this row, and how many messages are left out."""
    images: list[bytes] = Field(default_factory=list[bytes])
    """Encoded images that messages name by their place here, so that each travels once."""
    error: Blame | None = None
    """Why the task was given up."""
    source: str
    """The generator or external agent that appended it."""
    kv_on_swap: Literal["keep", "recompute"] = "keep"
    """What the engine did with the cache of running requests at a weight swap."""
    started: float = 0.0
    """Seconds since the epoch at which the first episode began."""
    finished: float = 0.0
    """Seconds since the epoch at which the last episode ended."""
    tokens_wasted: int = Field(default=0, ge=0)
    """Generated tokens of tries that failed and are not in `trajectories`."""
    tokens_continued: int = Field(default=0, ge=0)
    """Generated tokens of `trajectories` that a generator before this one had written down, and
    that were not generated again."""
    tokens_cut: list[int] = Field(default_factory=list[int])
    """Generated tokens of each episode beyond `group_size`, which was cut when enough had ended:
    lower bounds of their lengths."""
    weights_s: float = Field(default=0.0, ge=0)
    """Seconds for which its generator held the task and waited for weights as new as it asks."""
    time_use: dict[str, float] = Field(default_factory=dict[str, float])
    """Seconds of the generator since its last group, by what it did (see `StepTrace`)."""

    def named_at(self, at: str) -> str:
        """Return the subject of its task."""
        return with_last(at, self.task.task)

    def to_bytes(self, **instead: Any) -> bytes:
        """Pack to a msgpack map, with what rows of an episode have in common once."""
        if not any(one.episode == more.episode >= 0 for one, more in pairwise(self.trajectories)):
            return super().to_bytes(**instead)  # each row is an episode, and vectors are not copied
        rows = without_shared([vars(item) for item in self.trajectories])
        return super().to_bytes(**{"trajectories": rows, **instead})

    @model_validator(mode="before")
    @classmethod
    def _whole_rows(cls, values: Any) -> Any:
        fields = cast("dict[str, Any]", values) if isinstance(values, dict) else {}
        rows = fields.get("trajectories")
        if not isinstance(rows, list):
            return cast("Any", values)
        return {**fields, "trajectories": with_shared(cast("list[Any]", rows))}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.error is None) == (not self.trajectories):
            raise ValueError("a group has trajectories, or an error and none")
        expected = self.task.group_size
        told = [(rows[0].role, rows[0].episode) for rows in self.episodes if rows[0].episode >= 0]
        if len(told) != len(set(told)):
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
        """Return the group with each of its images once; DataError for one that is not there."""
        shared = dict[bytes, int]()
        trajectories = [
            item.model_copy(update={"messages": number_images(item.messages, shared, self.images)})
            for item in self.trajectories
        ]
        return self.model_copy(update={"trajectories": trajectories, "images": list(shared)})

    @property
    def sampled(self) -> list[Trajectory]:
        """The trajectories that are trained: all but the greedy baseline."""
        return [trajectory for trajectory in self.trajectories if not trajectory.greedy]

    @property
    def episodes(self) -> list[list[Trajectory]]:
        """The rows of each episode that is trained, its main row first; mostly it has one."""
        return episodes_of(self.sampled)

    @property
    def has_equal_rewards(self) -> bool:
        """Whether all episodes have the same return, compared within each role."""
        returns: dict[str, set[float]] = {}
        for rows in self.episodes:
            returns.setdefault(rows[0].role, set()).add(return_of(rows))
        return all(len(found) == 1 for found in returns.values())

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
        is_part = item.episode >= 0 and episodes  # of a game's none is
        if is_part and _episode(episodes[-1][-1]) == _episode(item):
            episodes[-1].append(item)
        else:
            episodes.append([item])
    return episodes


def return_of(rows: Sequence[Trajectory]) -> float:
    """Return what an episode earned in all its rows."""
    return sum(item.reward for item in rows)


def num_too_old(trajectories: Iterable[Trajectory], oldest: int) -> int:
    """Count the generated tokens of versions before `oldest`."""
    return sum(
        int(((item.mask == 1) & (item.versions < oldest)).sum()) if oldest else 0
        for item in trajectories
    )


def with_cut_infos(group: Group, num_bytes: int, most: int) -> Group:
    """Return a group that has `num_bytes` with so much less `info` that it has about `most`.

    What is cut of an `info` says so in it; see `cut_info`. Where that is not enough, the rest is
    left as it was.
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
    """Return the level to which the larger ones are cut so that the sum is `most`."""
    left = most
    for place, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - place)
        if size > share:
            return share
        left -= size
    return max(sizes, default=0)


def largest_parts(group: Group, count: int = 3) -> list[str]:
    """Name the largest parts of a group: field, episode and bytes."""
    found: list[tuple[int, str]] = [(sum(map(len, group.images)), "images")]
    if group.task.reset_kwargs:
        found.append((packed_bytes(group.task.reset_kwargs), "task.reset_kwargs"))
    for place, item in enumerate(group.trajectories):
        number = item.episode if item.episode >= 0 else place
        for name, value in vars(item).items():
            size = len(pack(value, plain=_fields_of))
            found.append((size, f"{_named(name, value, size)} of episode {number}"))
    largest = sorted(found, key=lambda one: -one[0])[:count]
    return [f"{name} ({size:,} bytes)" for size, name in largest if size]


def _named(name: str, value: Any, size: int) -> str:
    """Return a field's name, with the key where one holds most of it."""
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
    """Check the elements of a group's arrays, which validation at the boundary leaves alone.

    Raises MessageError naming the first rule that is broken.
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
    broken += [wrong for wrong in (one.wrong(vocab_size) for one in taught) if wrong]
    if broken:
        raise MessageError(f"a group of task {group.task.task} is refused: {broken[0]}")


def _further_rewards(episodes: Iterable[Trajectory]) -> NDArray[np.float64]:
    """Return what was posted for calls, episodes and branches apart from the turns' rewards."""
    places = [item.calls for item in episodes if item.calls is not None]
    found = [one.outcome for one in places]
    found += [branch.reward for one in places for branch in one.rewarded]
    found += [float(worth) for one in places for worth in one.rewards]
    return np.array(found, np.float64)


def _turns_fit(
    lengths: NDArray[np.int64],
    num_turns: NDArray[np.int64],
    ends: NDArray[np.int32],
    mask: NDArray[np.uint8],
) -> bool:
    """Whether the turns of each trajectory ascend and end where the policy's tokens do."""
    starts = np.cumsum(lengths) - lengths
    if mask[starts].any() or ends.min() < 0 or (ends >= np.repeat(lengths, num_turns)).any():
        return False
    places = ends + np.repeat(starts, num_turns)
    last_generated = np.flatnonzero(mask & ~np.append(mask[1:], 0))
    final = places[np.cumsum(num_turns) - 1]
    follows = np.append(np.diff(places) > 0, True)
    last_of_each = last_generated[np.searchsorted(last_generated, starts + lengths) - 1]
    return bool(mask[places].all() and follows.all() and (final == last_of_each).all())


# Segments of an episode that is being played: what another generator needs to go on with it.


class LoggedCall(Message):
    """One call of the model by a program, as it is written down; its tokens are the segment's."""

    parent: int | None = Field(default=None, ge=0)
    """Number of the call that it continues; None: it is a root."""
    follows: int | None = Field(default=None, ge=0)
    """Number of the call whose history it continues, rendered anew."""
    context: bytes
    """Digest of the tools and of what else shapes the prompt."""
    given: list[CallMessage]
    """The messages since its parent's answer."""
    num_given: int = Field(ge=0)
    """Tokens of the segment that stand for them; the rest was generated."""
    name: str
    """With what the ids of its tool calls begin."""
    has_tools: bool
    """Whether what looks like a tool call is one."""
    is_thinking: bool
    """Whether the prompt has opened the reasoning."""
    prefill: str = ""
    """What the program wrote of the answer itself."""
    text: str | None = None
    """What the program was told, where that is more than its tokens say: up to a stop text."""
    finish: Literal["stop", "length"]
    """Why it ended."""
    num_seen: int = Field(ge=0)
    """Calls that had ended when it was asked for."""
    branch: str = Field(default="", max_length=32)
    """Why it is not the only continuation of its parent."""
    masked: float = Field(default=0.0, ge=0)
    """Sum over its tokens: which share of the probability the format of the answer took out of the
    choice of each."""
    request: bytes
    """Digest of what was asked for, prompt and limits: the same again may be answered by it."""
    asked: str = Field(default="", max_length=64)
    """Id of the request, as the program's proxy made it: by it the proxy may ask again."""


class Segment(Message):
    """What one episode gained since its last segment, on `segment.<n>.<e>`.

    It is appended with the sequence of the segment before it as the expected last one of its
    subject. One without tokens takes the episode over: its writer has the task now. The four
    vectors go on where those of the segment before end; see `Trajectory`.
    """

    delivery: int = Field(ge=1)
    """How often the task had been handed out when its writer got it; it never falls."""
    writer: str
    """The generator, its process and its lease of the task."""
    episode: str = ""
    """Id of the episode at its environment host."""
    host: str = Field(default="", pattern=f"^$|{NAME_PATTERN}")
    """The environment host that holds the episode."""
    seed: int = Field(default=0, ge=0)
    """Seed of the episode's sampling; its turns count up from it."""
    start: int = Field(ge=0)
    """Position of the first token in the whole conversation. 0: the episode begins anew, and what
    was appended before is void."""
    token_ids: IntVector
    """int32[T]: prompt, generated tokens and observations, in order."""
    mask: MaskVector
    """uint8[T]: 1 where the policy generated the token."""
    logprobs: FloatVector
    """float32[T]: behaviour log-prob of each generated token; 0 elsewhere."""
    versions: IntVector
    """int32[T]: policy version that produced each generated token; -1 elsewhere."""
    turn_ends: list[int] = Field(default_factory=list[int])
    """Positions of the last tokens of the turns that ended since the segment before."""
    rewards: list[float] = Field(default_factory=list[float])
    """The game's rewards for the turns that it answered since then."""
    observations: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """Its answers, as chat messages."""
    call: LoggedCall | None = None
    """In the episode of a program: the call whose tokens these are."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        lengths = {len(getattr(self, one)) for one in ("token_ids", "mask", "logprobs", "versions")}
        if len(lengths) != 1 or len(self.rewards) != len(self.observations):
            raise ValueError("the columns of a segment are of different lengths")
        return self

    @classmethod
    def empty(cls, **fields: Any) -> Self:
        """Return one without tokens."""
        ints, floats = np.empty(0, np.int32), np.empty(0, np.float32)
        mask = np.empty(0, np.uint8)
        return cls(token_ids=ints, mask=mask, logprobs=floats, versions=ints, **fields)

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + len(self.token_ids)
