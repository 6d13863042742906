"""Which of several servers answers a request: the one that holds what its prompt begins with.

A server keeps the keys and values of recent prompts, so a conversation's next turn, and further
samples of one prompt, are cheapest where the last one was. This is remembered per gateway, for the
newest conversations of each user; what is forgotten, or was asked at another gateway, costs the
computation of its prompt and nothing else. A server refuses what would wait there, and the least
loaded one is asked next.
"""

import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple

from ...schemas.infer import ChatRequest, CompletionRequest
from ...schemas.wire.codec import pack

_MOST = 1 << 16
_BLOCK = 512
"""Characters or tokens of a text's beginnings that are compared."""


class Beginnings(NamedTuple):
    """Digests of what a prompt begins with, the longest last."""

    user: str
    job: str
    all: Sequence[bytes]
    own: Sequence[bytes]
    """Those that tell this prompt, and its continuations, from others with the same system prompt.
    """


def beginnings_of(user: str, job: str, query: ChatRequest | CompletionRequest) -> Beginnings:
    """Return the beginnings of a request's first prompt: those of whole messages, or of blocks."""
    if isinstance(query, ChatRequest):
        settings = f"{job} {query.adapter} {query.tools} {query.template_options}"
        parts = [message.to_bytes() for message in query.messages]
        num_own = 1
    else:
        settings, prompt = f"{job} {query.adapter}", query.prompts[0]
        ends = [*range(_BLOCK, len(prompt), _BLOCK), len(prompt)]
        parts = [pack(prompt[max(0, end - _BLOCK) : end]) for end in ends]
        num_own = 2  # the next turn's prompt has other tokens in the last, incomplete block
    digest, digests = blake2b(settings.encode(), digest_size=16), list[bytes]()
    for part in parts:
        digest.update(part)
        digests.append(digest.digest())
    return Beginnings(user, job, digests, digests[-num_own:])


class PrefixHolders:
    """Remembers which server holds which beginning, and how many requests each answers."""

    def __init__(self, most: int = _MOST) -> None:
        """Remember so many beginnings; each user may have an equal part of them, the newest."""
        self._most = most
        self._holders: dict[str, OrderedDict[bytes, str]] = {}
        self._in_flight: Counter[tuple[str, str]] = Counter()

    def order(self, beginnings: Beginnings, loads: Mapping[str, float]) -> list[str]:
        """Return two servers to ask in order: the holder, and the least loaded of the others.

        `loads` has the requests of each server that is available, besides those of this gateway.
        """
        job, mine = beginnings.job, self._holders.get(beginnings.user, {})
        known = (mine.get(beginning) for beginning in reversed(beginnings.all))
        holder = next((server for server in known if server in loads), None)
        servers = random.sample(list(loads), len(loads))  # so that any of equals is asked
        servers.sort(key=lambda server: loads[server] + self._in_flight[job, server])
        return list(dict.fromkeys([holder or servers[0], *servers]))[:2]

    @contextmanager
    def asking(self, job: str, server: str) -> Iterator[None]:
        """Count a request at a server of a job."""
        self._in_flight[job, server] += 1
        try:
            yield
        finally:
            self._in_flight -= Counter([(job, server)])

    def note(self, beginnings: Beginnings, server: str) -> None:
        """Note that a server has taken a request.

        Of too many beginnings the oldest of the user who has most is forgotten.
        """
        mine = self._holders.setdefault(beginnings.user, OrderedDict())
        for beginning in beginnings.own:
            mine[beginning] = server
            mine.move_to_end(beginning)
        while sum(map(len, self._holders.values())) > self._most:
            user, most = max(self._holders.items(), key=lambda entry: len(entry[1]))
            most.popitem(last=False)
            if not most:
                del self._holders[user]
