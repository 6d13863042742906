"""The episodes whose programs may call, found by their keys, and what is kept of each."""

import re
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from cachetools import FIFOCache

from ....schemas.wire.errors import NotFoundError, StateError
from ....schemas.wire.subjects import JobScope
from ..episode import ProgramEpisode
from .calls import ProgramCalls
from .exchange import KeyRefused

KEPT_BYTES = 8 << 20
_PAST = 4096
_MOST_NAMES = 1 << 16
_PREFIXES = ("sk-ant-", "sk-")
_CALL_DIGITS = 3
_PREFIX = re.compile(r"^[^_-]*[_-]")
"""Of an answer's id."""
_INPUTS_SHARE = 4
"""What was asked with may take this part of the room for answers besides."""


@dataclass(frozen=True)
class KeptAnswer:
    """An answer that can be asked for again."""

    make: Callable[[], dict[str, Any]]
    """Words it."""
    num_bytes: int
    """What it holds, about."""


class KeptAnswers:
    """Answers by their ids, the newest that fit."""

    def __init__(self, room: int) -> None:
        """Keep up to `room` bytes."""
        self._kept: FIFOCache[str, KeptAnswer] = FIFOCache(room, lambda one: one.num_bytes)

    def add(self, name: str, answer: KeptAnswer) -> None:
        """Keep an answer by its id; the oldest go when there is no more room."""
        with suppress(ValueError):  # it is larger than the room
            self._kept[name] = answer

    def find(self, name: str) -> KeptAnswer:
        """Return an answer; NotFoundError for one that is not there, or no more."""
        if name not in self._kept:
            raise NotFoundError(
                f"no response {name!r:.80} is kept", hint="the oldest are dropped to make room"
            )
        return self._kept[name]

    def forget(self, name: str) -> None:
        """Drop an answer."""
        self._kept.pop(name, None)


class EpisodeSubjects(NamedTuple):
    """The subjects on which the generator that plays an episode takes its calls."""

    call: str
    cancel: str
    delivered: str

    @classmethod
    def of(cls, scope: JobScope, episode: str) -> "EpisodeSubjects":
        """Return those of an episode; MessageError for an id that no subject may hold."""
        return cls(*(scope.episode(episode, verb) for verb in cls._fields))


@dataclass(eq=False)
class OpenEpisode:
    """One episode whose program may call."""

    episode: ProgramEpisode
    subjects: EpisodeSubjects
    calls: ProgramCalls
    """Its calls that are being answered, or have not arrived."""
    kept_bytes: int = KEPT_BYTES
    """Room for answers that can be asked for again."""
    posted: set[bytes] = field(default_factory=set[bytes])
    """Digests of rewards that were added."""
    num_requests: int = 0
    """HTTP requests of its program that are open."""
    _names: FIFOCache[bytes, None] = field(default_factory=lambda: FIFOCache(_MOST_NAMES))
    _numbers: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])
    _known: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        self.answers = KeptAnswers(self.kept_bytes)
        """Those that can be asked for again, by their ids."""
        self.inputs = KeptAnswers(self.kept_bytes // _INPUTS_SHARE)
        """What they were asked with."""

    def learn(self, names: Iterable[str], numbers: Iterable[int]) -> None:
        """Take the numbers of calls under the names by which a program may speak of them."""
        for name, number in zip(names, numbers, strict=False):
            self._numbers[name] = self._numbers[name.strip("_-")] = number
            self._known.add(number)
        while len(self._numbers) > _MOST_NAMES:
            self._known.discard(self._numbers.popitem(last=False)[1])

    def call_number(self, named: int | str) -> int:
        """Return the number of a call: named so, `c7`, or by the id of an answer or tool call.

        Raises NotFoundError for a call that was not answered in this episode.
        """
        if isinstance(named, str):
            for name in (named, named[:-_CALL_DIGITS], _PREFIX.sub("", named)):
                if name in self._numbers:
                    return self._numbers[name]
            digits = named.removeprefix("c")
            number = int(digits) if digits.isdecimal() and len(digits) < 10 else -1
        else:
            number = named
        if number not in self._known:
            raise NotFoundError(
                f"no call {named!r:.80} was answered in this episode",
                hint="give a call's number, or the id of its answer or of a tool call in it",
            )
        return number

    def is_answered(self, number: int) -> bool:
        """Whether a call with this number was answered."""
        return number in self._known

    def is_known(self, name: bytes) -> bool:
        """Whether a request that names itself so has come before; from now on, one has."""
        is_repeated = name in self._names
        self._names[name] = None
        return is_repeated


class OpenEpisodes:
    """All episodes of one proxy."""

    def __init__(self) -> None:
        """Begin with none."""
        self._salt = secrets.token_bytes(32)
        self._by_key: dict[bytes, OpenEpisode] = {}
        self._by_id: dict[str, OpenEpisode] = {}
        self._past: FIFOCache[bytes, str] = FIFOCache(_PAST)

    def __len__(self) -> int:
        """Episodes that are open."""
        return len(self._by_key)

    def __iter__(self) -> Iterator[OpenEpisode]:
        """Yield them."""
        return iter(self._by_id.values())

    def add(self, opened: OpenEpisode) -> None:
        """Let an episode's key in; StateError for one that is there already."""
        digest = self._digest(opened.episode.key)
        if digest in self._by_key or opened.episode.episode in self._by_id:
            raise StateError(f"episode {opened.episode.episode} is open already")
        self._by_key[digest] = self._by_id[opened.episode.episode] = opened

    def of(self, episode: str) -> OpenEpisode | None:
        """Return an episode by its id."""
        return self._by_id.get(episode)

    def remove(self, opened: OpenEpisode) -> None:
        """Let its key in no more."""
        digest = self._digest(opened.episode.key)
        self._by_key.pop(digest, None)
        self._by_id.pop(opened.episode.episode, None)
        self._past[digest] = opened.episode.over or "it has ended"

    def find(self, presented: Iterable[str]) -> OpenEpisode:
        """Return the episode of one of the keys that came with a request.

        Only digests under a salt of ours are looked up, so that the time that it takes reveals
        nothing of other keys. Raises KeyRefused, which says what is wrong.
        """
        past = ""
        keys = [bare_key(key) for key in presented if key]
        for key in keys:
            digest = self._digest(key)
            opened = self._by_key.get(digest)
            if opened is not None and secrets.compare_digest(
                opened.episode.key.encode(), key.encode(errors="replace")
            ):
                return opened
            past = past or self._past.get(digest, "")
        if past:
            raise KeyRefused(
                f"the episode of this key is over: {past}",
                hint="each try of an episode has its own key; stop calling",
            )
        raise KeyRefused(
            "this key is that of no episode" if keys else "no key came with the request",
            hint="send the episode's key (TINKERMQ_EPISODE_KEY) as `Authorization: Bearer KEY`, "
            "as `x-api-key: KEY`, or in the path: /e/KEY/v1/…",
        )

    def _digest(self, key: str) -> bytes:
        return blake2b(key.encode(errors="replace"), key=self._salt, digest_size=16).digest()


def bare_key(key: str) -> str:
    """Return a key without the prefix that some programs require."""
    for prefix in _PREFIXES:
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return key
