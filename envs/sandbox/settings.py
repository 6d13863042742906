"""How programs are run, and what became of one: what all backends of the sandbox share."""

from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import Field, ValidationError

from ...schemas.config.sections import Section, when
from ...schemas.wire.errors import ConfigError

MAX_CODE_BYTES = 60_000
"""A longer program is refused: it is no answer of a model."""

Status = Literal["ok", "error", "exited", "time", "memory", "output", "disk"]


class SandboxSettings(Section):
    """Limits of one program, and what it finds; `sandbox` among the arguments of a game."""

    backend: Literal["bubblewrap"] = "bubblewrap"
    """What encloses the program."""
    time_s: float = Field(default=10.0, gt=0, le=3600)
    """Seconds that the programs of one turn may run, by the clock."""
    memory_mb: int = Field(default=512, ge=64, le=1 << 20)
    """Memory of a program with all its processes."""
    processes: int = Field(default=16, ge=1, le=1024)
    """Processes and threads at the same time."""
    output_kb: int = Field(default=64, ge=1, le=1024)
    """A program that prints more is stopped."""
    disk_mb: int = Field(default=64, ge=1, le=1 << 20)
    """Room in its own /tmp, which is memory and gone with it."""
    packages: list[str] = Field(default_factory=lambda: ["numpy", "sympy"])
    """Installed packages that programs may import, with all that these need."""
    keep_state: bool = False
    """Let the turns of an episode share variables and files, as the cells of a notebook do."""
    at_once: int = Field(default=0, ge=0, le=1024)
    """Programs of one environment host that run at the same time; 0: one per core."""
    max_sessions: int = Field(default=64, ge=1, le=1024, json_schema_extra=when("keep_state", True))
    """Episodes of one environment host that keep their state at the same time."""

    @classmethod
    def parse(cls, values: dict[str, object]) -> "SandboxSettings":
        """Read the settings of a game; ConfigError names the key that cannot be used."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise ConfigError(
                f"env.kwargs.sandbox.{key}: {first['msg']} (it is {first['input']!r})",
                hint=f"the keys are {', '.join(cls.model_fields)}",
            ) from error


@dataclass(frozen=True)
class Outcome:
    """What became of one program."""

    text: str
    """What it printed, errors included, up to the limit."""
    status: Status
    """ok, error: it raised; exited: its interpreter ended; else the limit that stopped it."""
    seconds: float
    """How long it ran."""

    @property
    def lost_state(self) -> bool:
        """Whether the sandbox has ended with the program."""
        return self.status not in ("ok", "error")


def too_long(code: str) -> Outcome | None:
    """Return what becomes of a program that is too long to be run."""
    if len(code.encode("utf-8", "replace")) <= MAX_CODE_BYTES:
        return None
    return Outcome(f"the program is longer than {MAX_CODE_BYTES} bytes", "error", 0.0)


class Session(Protocol):
    """One episode's sandbox; closed at the latest when it is forgotten."""

    def run(self, code: str, time_s: float | None = None) -> Outcome:
        """Run a program, for `time_s` at most; SandboxError when the sandbox itself fails."""
        ...

    def close(self) -> None:
        """End whatever runs in it."""
        ...


class Sandbox(Protocol):
    """A place for programs of a model; safe to use from many threads at once."""

    def session(self) -> Session:
        """Return an enclosed interpreter, which starts with its first program."""
        ...

    def self_test(self) -> str:
        """Prove that it encloses; describe it. SandboxError says what fails, and the remedy."""
        ...
