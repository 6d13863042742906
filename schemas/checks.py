"""Checks of jobs and machines: one kind of check, and one kind of result.

A check has a name and a function. The function returns a description of its result, or raises the
TinkermqError that would fail the job. `run_check` turns both into a `CheckResult`, the only form in
which results are sent, printed and compared. Each check runs where its subject is:

| module | runs in | checks |
|---|---|---|
| `clients/validation.py` | client | files and folders that a configuration names |
| `envs/check.py` | client, node | a game, its data and rewards, played without a model |
| `envs/agents/agent_check.py` | client | an agent program, run once against a scripted model |
| `actors/model_kind.py` | client, node | a model's family and layers, and what computes them |
| `actors/model_checks.py` | client, node | tokenizer, template, lengths, weights, adapter, saving |
| `actors/scheduler/submission/checks.py` | scheduler | slots, memory, and what its nodes find |
| `actors/node/checks.py` | node | whether model, data and game are there; starts the two above |
| `actors/learner/custom_check.py` | client | a function of the user's for the learner |
| `actors/gpu_check.py`, `clients/cli/doctor.py` | client | a machine, its GPUs, the pool |

`env check` runs the checks of the game and the model, `model check` those of the model's kind,
`agent check` that of the program, and `train`, before it submits or with `--dry-run`, all of these
and the scheduler's (`clients/cli/dry_run.py`). Each submission, also by Python and REST, runs the
scheduler's checks. A submission is refused with the error of the first check that fails; a check
that does not end in time is skipped, as slowness says nothing about the job.

Checks that need torch, a sandbox or a deadline run in a process of their own, `python -m MODULE`,
which prints one line for each result (`write_results`, `read_result`). So neither the client nor
the node imports torch.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, Self, TypeAlias

from pydantic import Field, ValidationError

from .wire.errors import TinkermqError, error_from_reply
from .wire.message import Message

Outcome: TypeAlias = Literal["ok", "note", "failed", "skipped"]
"""ok: passed; note: passed, with a remark; failed: would stop the job; skipped: does not apply."""
MAX_TEXT_CHARS = 1_000
"""Maximum length of a text from a game's process."""
_PREFIX = "check-result "
LAST_LINE = "check-results end"
"""Line printed by a process that has run all its checks."""


class CheckResult(Message):
    """Result of one check."""

    name: str
    outcome: Outcome
    """note: passed, with a remark; skipped: it does not apply here."""
    detail: str = ""
    """What was seen, or what is wrong."""
    hint: str = ""
    """What to do about it."""
    by: str = ""
    """Where it ran: `scheduler`, or `node` and names; empty: the client."""
    code: str = ""
    """Code of the error with which a job would fail; empty unless failed."""
    seconds: float = Field(default=0.0, ge=0)
    """How long it took, where that is measured."""
    log: str = ""
    """End of the output of a failed check's process."""

    @property
    def ok(self) -> bool:
        """Whether it did not fail."""
        return self.outcome != "failed"

    def error(self) -> TinkermqError:
        """Return the error of a failed check."""
        where = f"{self.by}: " if self.by.startswith("node ") else ""
        return error_from_reply(self.code, f"{where}{self.detail}", self.hint)

    def bounded(self) -> Self:
        """Return the result with its texts cut to MAX_TEXT_CHARS."""
        texts = {name: getattr(self, name) for name in ("name", "detail", "hint")}
        cut = {
            name: f"{text[: MAX_TEXT_CHARS - 1]}…"
            for name, text in texts.items()
            if len(text) > MAX_TEXT_CHARS
        }
        return self.model_copy(update=cut)


class CheckReply(Message):
    """Results of checks that another process ran."""

    done: bool = True
    """False: unfinished, since the process is busy or the time is over."""
    results: list[CheckResult] = Field(default_factory=list[CheckResult])
    """In the order of the checks."""


class CheckSkipped(TinkermqError):
    """A check does not apply here. The message is the reason, the hint is how to make it apply."""


class Check(NamedTuple):
    """One check."""

    name: str
    run: Callable[[], str]
    """Returns what was seen."""
    is_required: bool = False
    """Whether the checks after it make no sense if it fails."""


def run_checks(checks: Iterable[Check]) -> Iterator[CheckResult]:
    """Run checks one after the other, and stop when a required one fails."""
    for check in checks:
        result = run_check(check.name, check.run)
        yield result
        if check.is_required and not result.ok:
            return


def run_check(name: str, run: Callable[[], str], by: str = "") -> CheckResult:
    """Run one check."""
    try:
        return CheckResult(name=name, outcome="ok", detail=run(), by=by)
    except TinkermqError as error:
        return failed_check(name, error, by)


def failed_check(name: str, error: TinkermqError, by: str = "") -> CheckResult:
    """Return the result of a check that raised an error."""
    skipped = isinstance(error, CheckSkipped)
    return CheckResult(
        name=name,
        outcome="skipped" if skipped else "failed",
        detail=error.message,
        hint=error.hint,
        by=by,
        code="" if skipped else error.code,
    )


def raise_failed(results: Iterable[CheckResult]) -> None:
    """Raise the error of the first failed check, if there is one."""
    for result in results:
        if not result.ok:
            raise result.error()


# -- results of checks that run in a process of their own ------------------------------------------


def write_results(results: Iterable[CheckResult]) -> None:
    """Print each result on its own line, among any output of the checked code."""
    for result in results:
        sys.stdout.write(f"\n{_PREFIX}{result.model_dump_json(exclude_defaults=True)}\n")
        sys.stdout.flush()
    sys.stdout.write(f"\n{LAST_LINE}\n")


def read_result(line: str) -> CheckResult | None:
    """Return the result that a line holds; None for any other line."""
    if not line.startswith(_PREFIX):
        return None
    try:
        return CheckResult.model_validate_json(line.removeprefix(_PREFIX))
    except ValidationError:  # the line is output of the checked code
        return None
