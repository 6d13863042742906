"""What has been added to a model's gradients since its last optim_step, and what failed of it."""

from collections.abc import Mapping
from typing import Any

from ....schemas.wire.errors import DataError


class PendingWindow:
    """The forward_backward calls that one optim_step will apply.

    One that failed fails that optim_step: a program that does not look at its results would train
    on half a batch otherwise. Whoever refuses a call before it comes here tells `fail`.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        """Calls since the last optim_step."""
        self._open: list[str] = []
        self._failed: tuple[str, str] | None = None

    def to_map(self) -> dict[str, Any]:
        """Return all of it as JSON may hold it."""
        return {"num_calls": self.num_calls, "open": self._open, "failed": self._failed}

    @classmethod
    def from_map(cls, told: Mapping[str, Any]) -> "PendingWindow":
        """Return what `to_map` has written down."""
        window = cls()
        window.num_calls, window._open = int(told["num_calls"]), list(told["open"])
        window._failed = tuple(told["failed"]) if told["failed"] else None
        return window

    def begin(self, operation: str) -> str:
        """Note that a call begins; return its name, one that tells its place if it has none."""
        self.num_calls += 1
        name = operation or f"forward_backward {self.num_calls} of this window"
        self._open.append(name)
        return name

    def end(self, name: str) -> None:
        """Note that a call has added all of its gradients."""
        self._open.remove(name)

    def fail(self, name: str, reason: str) -> None:
        """Note that a call failed; the first one that did so is told."""
        if name in self._open:
            self._open.remove(name)
        self._failed = self._failed or (name, reason)

    def close(self) -> None:
        """Begin a new window; raises DataError if a call of this one failed."""
        failed = self._failed
        if failed is None and self._open:
            failed = (self._open[0], "it did not come to its end")
        self.num_calls, self._open, self._failed = 0, [], None
        if failed is not None:
            raise DataError(
                f"this optim_step has no effect, since {failed[0]} failed: {failed[1]}",
                hint="the gradients since the last optim_step are cleared: send the whole batch "
                "again",
            )
