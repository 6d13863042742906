"""The errors of the system.

Every error says what happened, with which value, and what to do next. The three parts travel in
an error reply (`code`, `message`, `hint`) and come back as the same class at the caller.
"""

from typing import ClassVar, cast


class TinkermqError(Exception):
    """Base of every error that tinkermq raises on purpose.

    `code` is stable and machine-readable, `message` says what happened with which value, `hint`
    says what to do next.
    """

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class ConfigError(TinkermqError, ValueError):
    """A configuration key or value that cannot be used."""

    code = "config"


class DataError(TinkermqError, ValueError):
    """A dataset that is missing, empty or lacks a column."""

    code = "data"


class ModelError(TinkermqError, ValueError):
    """A model folder, tokenizer or chat template that cannot be used."""

    code = "model"


class GameError(TinkermqError, ValueError):
    """A game that cannot be imported, raised, hung, or returned the wrong type."""

    code = "game"


class SandboxError(TinkermqError):
    """The sandbox for programs of the model cannot be used, or failed."""

    code = "sandbox"


class RewardError(TinkermqError):
    """A reward function, endpoint or judge failed, or said something that is no reward."""

    code = "reward"


class EngineError(TinkermqError):
    """The generation engine failed."""

    code = "engine"


class MessageError(TinkermqError, ValueError):
    """A payload that is malformed, over a limit, or of an unknown version."""

    code = "message"


class BrokerError(TinkermqError):
    """The broker is unreachable, lacks JetStream, or refused a request."""

    code = "broker"


class AuthError(TinkermqError, PermissionError):
    """An API key that is no key, or a user without the right to do this."""

    code = "auth"


class ConflictError(TinkermqError):
    """A compare-and-set lost: somebody else wrote first."""

    code = "conflict"


class FencedError(ConflictError):
    """This process is no longer the one that owns the log: a newer one has written to it."""

    code = "fenced"


class NotFoundError(TinkermqError, ValueError):
    """A job, run, actor, version or episode that does not exist."""

    code = "not_found"


class DeadlineError(TinkermqError, TimeoutError):
    """A wait that went past its deadline; the message names the wait and whom it waited for."""

    code = "deadline"


class PlacementError(TinkermqError, ValueError):
    """A request that no node of this pool can ever fulfil."""

    code = "placement"


class QuotaError(TinkermqError, ValueError):
    """A request beyond what the user may hold."""

    code = "quota"


class StateError(TinkermqError, ValueError):
    """An operation that the job's present state does not allow."""

    code = "state"


class JobFailedError(TinkermqError, RuntimeError):
    """A job that a client waited for has failed or was stopped; the message is the pool's."""

    code = "job_failed"


class BusyError(TinkermqError):
    """A service that has taken on as much as it may: the same request is welcome later."""

    code = "busy"
    retry_after_s: ClassVar[float] = 1.0
    """How much later."""


class StorageError(TinkermqError):
    """A file could not be written or read: a full disk, a missing right."""

    code = "storage"
    is_full: bool = False
    """Whether it is room that is missing: the same may succeed later."""


def _subclasses(base: type[TinkermqError]) -> list[type[TinkermqError]]:
    found = [base]
    for child in base.__subclasses__():
        found += _subclasses(child)
    return found


def root_cause(raised: BaseException) -> BaseException:
    """Return the one error inside an exception group, or the group's first."""
    while isinstance(raised, BaseExceptionGroup):
        inner = cast("tuple[BaseException, ...]", raised.exceptions)
        named = [error for error in inner if isinstance(error, TinkermqError)]
        raised = (named or list(inner))[0]
    return raised


def error_from_reply(code: str, message: str, hint: str) -> TinkermqError:
    """Rebuild the error class that a peer raised, from its error reply."""
    # a subclass without a code of its own is private to its module: the parent stands for it
    by_code = {cls.code: cls for cls in reversed(_subclasses(TinkermqError))}
    return by_code.get(code, TinkermqError)(message, hint=hint)
