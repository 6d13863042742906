"""The models of one trainer: which operations were applied, and which wait. Pure.

An operation is ready when all before it were applied, in whatever order they arrived; among the
users with ready models `fair_share` chooses.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...schemas.tinker.names import ModelName
from ...schemas.tinker.operation import ModelInfo, ModelOperation
from ...schemas.wire.errors import BusyError, QuotaError, StateError
from ..curves import Curves
from .fair_share import FairShare
from .operations import RunningOperation

# -- metrics of each step --------------------------------------------------------------------------

MAX_POINTS = 256
_JOINS = {"max": max, "min": min}


class ModelHistory:
    """The curves of one model.

    Metrics of several passes before a step are joined as the suffix of their name says, which
    clients use as well: `loss:sum`, `ratio:max`.
    """

    def __init__(self, stored: Mapping[str, Any] | None = None) -> None:
        """Begin, or continue with what `to_map` returned."""
        self.steps = int(stored["steps"]) if stored else 0
        """Updates so far."""
        self._curves = Curves(max_points=MAX_POINTS)
        if stored:
            self._curves.restore(stored["curves"])
        self._passes: dict[str, list[float]] = dict(stored.get("passed", {})) if stored else {}
        self._last: dict[str, float] = dict(stored["last"]) if stored else {}

    @property
    def last(self) -> dict[str, float]:
        """Metrics of the newest step."""
        return dict(self._last)

    def add_pass(self, metrics: Mapping[str, float], *, forward_only: bool) -> None:
        """Record the metrics of a pass over data."""
        for name, value in metrics.items():
            self._passes.setdefault(f"forward/{name}" if forward_only else name, []).append(value)

    def join_passes(self) -> dict[str, float]:
        """Return the joined metrics of the passes since the last update, and clear them."""
        joined = {name: _join(name, values) for name, values in self._passes.items()}
        self._passes.clear()
        return joined

    def add_step(self, metrics: Mapping[str, float]) -> None:
        """Record an update, with its metrics and those of the passes before it."""
        self._last = dict(metrics)
        self._curves.add([self.steps], [metrics])
        self.steps += 1

    def points(self) -> dict[str, Any]:
        """Return the points to draw; see `Curves.points`."""
        return self._curves.points()

    def to_map(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        fields = {"steps": self.steps, "curves": self._curves.to_map(), "last": self._last}
        return {**fields, "passed": self._passes}


def _join(name: str, values: list[float]) -> float:
    how = name.rpartition(":")[2]
    if how in _JOINS:
        return _JOINS[how](values)
    return sum(values) / (1 if how == "sum" else len(values))


MAX_AHEAD = 10_000
"""How far a number may be ahead of the next one."""
MAX_WAITING_BYTES = 256 << 20
"""Limit of a user's waiting operations."""
MAX_MODELS = 256
"""Limit per user."""
QUANTUM = 8192
"""Tokens of one user's turn, by default."""


@dataclass
class TrainedModel:
    """One model of a user."""

    user: str
    name: ModelName
    applied: int = -1
    """The newest applied operation."""
    saved: int = -1
    """The newest operation in its state on disk."""
    logged: int = -1
    """The newest operation in the log when the trainer started."""
    waiting: dict[int, ModelOperation] = field(default_factory=dict[int, ModelOperation])
    unreadable: dict[int, str] = field(default_factory=dict[int, str])
    """Operations in the log that cannot be read, and why."""
    tail_bytes: int = 0
    """Bytes of the operations applied since the saved state."""
    info: ModelInfo | None = None
    """Set once the model was made."""
    tokens: int = 0
    """Tokens computed for it, in `forward` and `forward_backward`."""
    used: float = 0.0
    """When an operation was last applied, by the monotonic clock; 0: never."""
    history: ModelHistory = field(default_factory=ModelHistory)
    is_pending: bool = False
    """Whether there are gradients or failures for the next `optim_step`."""
    running: RunningOperation | None = None
    """The operation of which some pieces were done."""

    @property
    def key(self) -> str:
        """Unique name among the models of all users."""
        return f"{self.user}/{self.name}"

    @property
    def next(self) -> ModelOperation | None:
        """The next operation, if it has arrived."""
        return self.waiting.get(self.applied + 1)

    def has_received(self, seq: int) -> bool:
        """Whether an operation has arrived, readable or not."""
        return seq <= self.applied or seq in self.waiting or seq in self.unreadable

    @property
    def has_gap(self) -> bool:
        """Whether operations wait for one that has not arrived."""
        return bool(self.waiting) and self.next is None and self.broken is None

    @property
    def broken(self) -> str | None:
        """Why its next operation cannot be read, after which none can be applied."""
        return self.unreadable.get(self.applied + 1)


class Models:
    """All models, by user and name, and their turns."""

    def __init__(self, *, quantum: int = QUANTUM) -> None:
        """Give each user turns of at least `quantum` tokens, if so many wait."""
        self.max_models = MAX_MODELS
        """Models that one user may have."""
        self._models: dict[tuple[str, ModelName], TrainedModel] = {}
        self._bytes: dict[str, int] = {}
        self.turns = FairShare(quantum)
        """The users' turns."""
        self._turn = 0
        self._turns: dict[str, int] = {}

    def __iter__(self) -> Iterator[TrainedModel]:
        return iter(list(self._models.values()))

    def find(self, user: str, name: ModelName) -> TrainedModel | None:
        """Return a user's model, or None."""
        return self._models.get((user, name))

    def add(self, user: str, name: ModelName) -> TrainedModel:
        """Return a user's model, which is added if it is new."""
        return self._models.setdefault((user, name), TrainedModel(user, name))

    def remove(self, model: TrainedModel) -> None:
        """Forget a model."""
        for operation in model.waiting.values():
            self._bytes[model.user] -= len(operation.body)
        self._models.pop((model.user, model.name), None)
        self._turns.pop(model.key, None)

    def num_of(self, user: str) -> int:
        """Return the number of a user's models."""
        return sum(item.user == user for item in self)

    def tokens(self) -> dict[str, int]:
        """Return the tokens computed for each user's models."""
        collected: dict[str, int] = {}
        for model in self:
            collected[model.user] = collected.get(model.user, 0) + model.tokens
        return collected

    def check_room(self, user: str, operation: ModelOperation) -> None:
        """Raise BusyError or QuotaError for an operation beyond a user's limits.

        Raises StateError for a number too far ahead to be the client's next.
        """
        model = self.find(user, operation.name.model)
        if model is None and self.num_of(user) >= self.max_models:
            raise QuotaError(
                f"user {user!r} has {self.max_models} models here",
                hint="finish sessions that have ended: `ServiceClient.close`",
            )
        if self._bytes.get(user, 0) + len(operation.body) > MAX_WAITING_BYTES:
            raise BusyError(
                f"operations of {self._bytes[user]:,} bytes wait for user {user!r}",
                hint="wait for results before sending more",
            )
        applied = -1 if model is None else model.applied
        if operation.seq > applied + MAX_AHEAD:
            raise StateError(
                f"operation {operation.seq} of {operation.model} is too far ahead: number "
                f"{applied + 1} is next",
                hint=f"numbers may be up to {MAX_AHEAD:,} ahead",
            )

    def enqueue(self, user: str, operation: ModelOperation) -> TrainedModel:
        """Add an operation to those that wait, unless its number is there already."""
        model = self.add(user, operation.name.model)
        if operation.seq > model.applied and operation.seq not in model.waiting:
            model.waiting[operation.seq] = operation
            self._bytes[user] = self._bytes.get(user, 0) + len(operation.body)
        return model

    def choose(
        self, is_admissible: Callable[[TrainedModel], bool] = lambda _: True
    ) -> tuple[TrainedModel, ModelOperation] | None:
        """Return the operation of which a piece is done next, of an admissible model, or None."""
        ready = [
            model
            for model in self._models.values()
            if model.next is not None and is_admissible(model)
        ]
        user = self.turns.choose({model.user for model in ready})
        if user is None:
            return None
        mine = (model for model in ready if model.user == user)
        chosen = min(mine, key=lambda model: self._turns.get(model.key, 0))
        operation = chosen.next
        assert operation is not None
        return chosen, operation

    def find_pass_mates(
        self,
        model: TrainedModel,
        is_admissible: Callable[[TrainedModel], bool] = lambda _: True,
    ) -> list[tuple[TrainedModel, ModelOperation]]:
        """Return operations that may share a model's next pass, the longest waiting first."""
        matches = [
            (item, item.next)
            for item in self._models.values()
            if item is not model and item.next is not None and is_admissible(item)
        ]
        matches = [pair for pair in matches if pair[1].kind == "forward_backward"]
        return sorted(matches, key=lambda pair: self._turns.get(pair[0].key, 0))

    def charge(self, model: TrainedModel, tokens: float) -> None:
        """Charge a model's user for a piece, and end the model's turn."""
        self.turns.charge(model.user, tokens)
        self._turn += 1
        self._turns[model.key] = self._turn

    def applied(self, model: TrainedModel, operation: ModelOperation) -> None:
        """Record that an operation was applied."""
        del model.waiting[operation.seq]
        self._bytes[model.user] -= len(operation.body)
        model.applied = operation.seq
        model.tail_bytes += len(operation.body)

    @property
    def has_ready(self) -> bool:
        """Whether there is an operation that can be applied."""
        return any(model.next is not None for model in self._models.values())

    def num_before(self, model: TrainedModel) -> int:
        """Return the number of other models with a ready operation."""
        return sum(item is not model and item.next is not None for item in self._models.values())

    def num_users_before(self, user: str) -> int:
        """Return the number of other users with a ready operation."""
        ready = {model.user for model in self._models.values() if model.next is not None}
        return len(ready - {user})
