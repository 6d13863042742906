"""The errors of the system.

Every error has a stable `code`, a `message` (what happened, with which value) and a `hint` (what to
do). They travel in an error reply and are raised as the same class at the caller; a subclass
without its own code is raised as its parent. Decisions are made on attributes of the class, never
on a message's text.
"""

import difflib
from collections.abc import Iterable
from typing import ClassVar, Literal, cast

Boundary = Literal["engine", "environment", "sandbox", "reward", "task", "broker"]
"""Parts of an episode that can be blamed for its failure."""


class TinkermqError(Exception):
    """Base of every error that tinkermq raises on purpose.

    `code` is stable and machine-readable, `message` says what happened with which value, `hint`
    says what to do next.
    """

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    """Of an HTTP reply."""
    may_pass: ClassVar[bool] = False
    """Whether an actor that was ended by it is started again."""
    is_mistake: ClassVar[bool] = False
    """Whether what was asked for is wrong: an episode that met it is not tried again."""
    boundary: ClassVar[Boundary | None] = None
    """Where in an episode it arises."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class InternalError(TinkermqError):
    """An unexpected failure in a service; its log has the details."""

    may_pass = True


class ConfigError(TinkermqError, ValueError):
    """A configuration key or value that cannot be used."""

    code = "config"
    status = 400
    is_mistake = True


class DataError(TinkermqError, ValueError):
    """A dataset that is missing, empty, or lacks a column."""

    code = "data"
    status = 400
    is_mistake = True
    boundary = "task"


class ModelError(TinkermqError, ValueError):
    """A model folder, tokenizer or chat template that cannot be used."""

    code = "model"
    status = 400
    is_mistake = True


class GameError(TinkermqError, ValueError):
    """A game that cannot be imported, raised, hung, or returned a wrong type."""

    code = "game"
    status = 400
    boundary = "environment"


class SandboxError(TinkermqError):
    """The sandbox for generated programs is unavailable or failed."""

    code = "sandbox"
    boundary = "sandbox"


class RewardError(TinkermqError):
    """A reward function, endpoint or judge failed, or returned no valid reward."""

    code = "reward"
    boundary = "reward"


class EngineError(TinkermqError):
    """The generation engine failed."""

    code = "engine"
    may_pass = True
    boundary = "engine"


class OutOfMemoryError(TinkermqError):
    """A learner's GPU has too little memory for its step, even in smaller micro-batches."""

    code = "memory"
    step: int = 0
    """The step; 0: it is not known."""
    microbatch_tokens: int = 0
    """Tokens of the pass that did not fit."""


class MessageError(TinkermqError, ValueError):
    """A payload that is malformed, over a limit, or of an unknown version."""

    code = "message"
    status = 400


class ReleaseError(MessageError):
    """A message of a release of tinkermq whose messages have another form."""

    code = "release"


class BrokerError(TinkermqError):
    """The broker is unreachable, lacks JetStream, or refused a request."""

    code = "broker"
    status = 503
    may_pass = True
    boundary = "broker"


class DeniedError(BrokerError):
    """The broker does not let this user publish or subscribe there."""

    status = 403

    def __init__(self, message: str, *, hint: str = "", subject: str = "") -> None:
        super().__init__(message, hint=hint)
        self.subject = subject
        """The subject, in lower case, as the server reports it."""


class LogInRefusedError(BrokerError):
    """The broker does not let this user in."""

    status = 401


class AuthError(TinkermqError, PermissionError):
    """An invalid API key, or a user without the required right."""

    code = "auth"
    status = 403


class ConflictError(TinkermqError):
    """A compare-and-set failed: another writer was first."""

    code = "conflict"
    status = 409
    may_pass = True


class FencedError(ConflictError):
    """A newer process owns the log."""

    code = "fenced"


class RewoundError(TinkermqError):
    """The broker's store holds less than it had confirmed.

    A process of a job that meets it starts again from what is there, which counts as no failure.
    """

    code = "rewound"
    status = 503
    may_pass = True


class NotFoundError(TinkermqError, ValueError):
    """A job, run, actor, version or episode that does not exist."""

    code = "not_found"
    status = 404


class CheckpointGoneError(NotFoundError):
    """A checkpoint that was deleted or has expired."""

    code = "checkpoint_gone"


class NobodyAnswersError(NotFoundError):
    """No service listens on the subject: it has ended or is restarting."""

    code = "nobody_answers"
    status = 503


class DeadlineError(TinkermqError, TimeoutError):
    """A wait exceeded its deadline; the message names the wait and the other side."""

    code = "deadline"
    status = 504
    may_pass = True


class PlacementError(TinkermqError, ValueError):
    """A request that no node of this pool can ever fulfil."""

    code = "placement"
    status = 400


class QuotaError(TinkermqError, ValueError):
    """A request beyond what the user may hold."""

    code = "quota"
    status = 429


class StateError(TinkermqError, ValueError):
    """An operation that the job's state does not allow."""

    code = "state"
    status = 409


class SessionOverError(StateError):
    """An operation for a finished session of the Tinker API."""

    code = "session_over"
    status = 410


class JobFailedError(TinkermqError, RuntimeError):
    """A job that a client waited for failed or was stopped, with the pool's message."""

    code = "job_failed"


class BusyError(TinkermqError):
    """A service at its capacity: retry later."""

    code = "busy"
    status = 429
    retry_after_s: ClassVar[float] = 1.0
    """How much later."""


class ExhaustedError(TinkermqError):
    """A used-up quota: retry after an admin has raised it."""

    code = "exhausted"
    status = 402


class StorageError(TinkermqError):
    """A file could not be read or written, such as on a full disk or without permission."""

    code = "storage"
    is_full: bool = False
    """Whether it is room that is missing: the same may succeed later."""


class StoreAwayError(StorageError):
    """A store does not answer, breaks off, is full or cannot be read; a retry may succeed."""

    status = 503
    may_pass = True


def _subclasses(base: type[TinkermqError]) -> list[type[TinkermqError]]:
    classes = [base]
    for child in base.__subclasses__():
        classes += _subclasses(child)
    return classes


def of_boundary(boundary: Boundary) -> type[TinkermqError]:
    """Return the error class of a boundary."""
    return next(cls for cls in _subclasses(TinkermqError) if cls.boundary == boundary)


def root_cause(raised: BaseException) -> BaseException:
    """Return the single error inside an exception group, or the group's first."""
    while isinstance(raised, BaseExceptionGroup):
        inner = cast("tuple[BaseException, ...]", raised.exceptions)
        named = [error for error in inner if isinstance(error, TinkermqError)]
        raised = (named or list(inner))[0]
    return raised


def error_from_reply(code: str, message: str, hint: str) -> TinkermqError:
    """Return the error of an error reply, as its class."""
    # a subclass without a code of its own is private to its module: the parent stands for it
    by_code = {cls.code: cls for cls in reversed(_subclasses(TinkermqError)[1:])}
    return by_code.get(code, InternalError)(message, hint=hint)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 slot`, `2 slots`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def did_you_mean(
    typed: str, known: Iterable[str], *, otherwise: str = "", similarity: float = 0.6
) -> str:
    """Return `did you mean X?` for the closest name, or `otherwise`, or the list of `known`.

    `similarity`: from 0 to 1, the least of a name that is suggested.
    """
    names = sorted(set(known))
    near = difflib.get_close_matches(typed, names, n=1, cutoff=similarity)
    if near:
        return f"did you mean {near[0]}?"
    if otherwise:
        return otherwise
    if 0 < len(names) <= 12:
        return f"known are {', '.join(names)}"
    return ""
