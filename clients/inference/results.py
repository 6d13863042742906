"""The results of an inference on disk: one JSON object a line, written as they come.

A file goes on where it ended: what is in it is not played again, a last line that was cut off is
dropped, and episodes that failed are tried anew. Each line says which settings made it, so that
two inferences never mix in one file.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import structlog

from ...broker.disk import append_lines, is_full
from ...envs.evaluation import Scored
from ...schemas.wire.codec import pack
from ...schemas.wire.errors import ConfigError, StorageError

_log: structlog.stdlib.BoundLogger = structlog.get_logger()

Key = tuple[int, int]
"""Task and number of the sample."""


@dataclass(frozen=True)
class EpisodeResult:
    """One episode of an inference."""

    task: int
    """Row of the data, or seed of a generated game."""
    sample: int
    """Number of the episode within its task."""
    reward: float
    """Return of the episode."""
    success: bool
    """Whether it counts as solved."""
    rewards: list[float] = field(default_factory=list[float])
    """Reward of each turn."""
    type: str = ""
    """Type of the task, or source of its data."""
    finish: str = ""
    """Why it ended: `done`, `turns`, or `length` where the last answer was cut."""
    num_turns: int = 0
    """Answers of the policy."""
    num_tokens: int = 0
    """Tokens that the policy generated."""
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The conversation."""
    info: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the game said at the last step."""
    model: str = ""
    """What played: `run@step`, or the name of the job."""
    token_ids: list[int] | None = None
    """Tokens of the whole conversation, where they were asked for."""
    mask: list[int] | None = None
    """1 where the policy generated the token."""
    error: str | None = None
    """Why there is no episode; reward and success then mean nothing."""

    @property
    def key(self) -> Key:
        """Task and sample."""
        return self.task, self.sample

    @property
    def scored(self) -> Scored:
        """What counts in a summary."""
        return Scored(self.task, self.sample, self.reward, self.success, self.type)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are set."""
        fields = {key: value for key, value in asdict(self).items() if value is not None}
        if self.error is not None:
            return {key: fields[key] for key in ("task", "sample", "model", "error")}
        return fields


class ResultFile:
    """A JSONL file of results; None keeps nothing on disk."""

    def __init__(self, path: str | Path | None, settings: Mapping[str, Any]) -> None:
        """Read what an earlier inference with the same settings has left in `path`.

        Raises ConfigError for a file of other settings, StorageError.
        """
        self._path = None if path is None else Path(path).expanduser()
        self._digest = hashlib.sha256(pack(dict(settings))).hexdigest()[:12]
        self.done: dict[Key, EpisodeResult] = {}
        """Episodes that need not be played again."""
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def __enter__(self) -> Self:
        if self._path is not None:
            try:
                append_lines(self._path, [])
            except OSError as error:
                raise _unwritable(self._path, error) from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is held back."""

    def add(self, result: EpisodeResult) -> None:
        """Append one result; it is on disk when this returns."""
        if result.error is None:
            self.done[result.key] = result
        if self._path is None:
            return
        line = json.dumps({**_plain(result.to_dict()), "settings": self._digest})
        try:
            append_lines(self._path, [line])
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def _read(self, path: Path) -> None:
        raw = path.read_bytes()
        whole = raw.rfind(b"\n") + 1
        if whole < len(raw):  # a line that was cut off
            with path.open("r+b") as file:
                file.truncate(whole)
        for number, line in enumerate(raw[:whole].splitlines(), 1):
            if line.startswith(b"{") and not line.endswith(b"}"):  # as a death left it
                _log.warning("line_cut", file=str(path), line=number)
                continue
            self._take(line, f"line {number} of {path}")

    def _take(self, line: bytes, where: str) -> None:
        try:
            fields = cast("dict[str, Any]", json.loads(line))
            digest = fields.pop("settings")
            if fields.get("error") is not None:
                return
            result = EpisodeResult(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{where} is no result of an inference",
                hint="choose another output_path; nothing was changed",
            ) from error
        if digest != self._digest:
            raise ConfigError(
                f"{where} was made with other settings (model, game, data or sampling)",
                hint="choose another output_path, or repeat the settings to go on with the file",
            )
        self.done[result.key] = result


def _unwritable(path: Path, error: OSError) -> StorageError:
    said = f"{path} cannot be written: {error.strerror}"
    refusal = StorageError(said, hint="choose another path, or make room there")
    refusal.is_full = is_full(error)
    return refusal


def _plain(value: Any) -> Any:
    """Return a value with arrays as lists, for JSON."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("list[Any]", value)]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.hex() if isinstance(value, bytes) else value
