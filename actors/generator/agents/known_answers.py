"""Which calls answered which request, in one try of an episode.

A request is known by its digest, which equal requests share, by the id that its proxy gave it, and
by the names of its choices, once the proxy has been told them.
"""

from collections.abc import Iterable, Sequence

from ....schemas.agent import CallRequest
from .call_log import LoggedAnswer
from .call_tree import CallTree


class KnownAnswers:
    """The answers of one try so far, by what they answered."""

    def __init__(self, tree: CallTree) -> None:
        """`tree` has the calls."""
        self._tree = tree
        self._by_request: dict[bytes, list[int]] = {}
        self._by_asking: dict[str, list[int]] = {}
        self._by_name: dict[str, list[int]] = {}
        self._presumed = set[int]()

    def restore(self, answered: Sequence[LoggedAnswer]) -> None:
        """Take the calls of the tree, which were written down; they count as delivered."""
        for call, one in zip(self._tree.calls, answered, strict=True):
            if call.delivered is None:  # or its program's proxy asks for it once more
                self._presumed.add(call.number)
                call.delivered = True
            last = self._by_request.get(one.request, [])
            is_choice = bool(last) and self._tree.calls[last[0]].num_seen == call.num_seen
            numbers = [*last, call.number] if is_choice else [call.number]
            self.add(one.request, [one.asked], [one.prepared.name], numbers)

    def add(
        self,
        request: bytes,
        askings: Iterable[str],
        names: Iterable[str],
        numbers: Sequence[int],
    ) -> None:
        """Take notice of an answer; `askings` are the ids that proxies gave its requests."""
        self._by_request[request] = known = list(numbers)
        for asking in askings:
            self._by_asking[asking] = known
        for name in names:
            self._by_name[name] = known

    def find(self, request: CallRequest, digest: bytes) -> list[int]:
        """Return the calls that answer a request, for which no new sample is drawn; else none.

        They are fewer than its choices where a generator died between two of them.
        """
        begun = request.begun.names if request.begun is not None else []
        if known := next((self._by_name[name] for name in begun if name in self._by_name), None):
            return known
        if is_asked_again(request):
            return self._by_asking.get(asking_of(request), [])
        last = self._by_request.get(digest, [])
        lost = all(self._tree.calls[number].delivered is False for number in last)
        return last if request.is_retry or lost else []

    def tell_again(self, numbers: Sequence[int]) -> None:
        """Take notice that an answer is told once more: whether it arrives will be seen."""
        for call in (self._tree.calls[number] for number in numbers):
            if call.delivered is False or call.number in self._presumed:
                call.delivered = None
        self._presumed.difference_update(numbers)


def asking_of(request: CallRequest) -> str:
    """Return the id by which a proxy asked for an answer first."""
    return request.request.partition("-")[0]


def is_asked_again(request: CallRequest) -> bool:
    """Whether a proxy asks for what it lacks of an answer, as who gave it has died."""
    return "-" in request.request
