"""Texts of tokens, by a model's tokenizer.json, if this machine has the model's folder.

A tokenizer is a user's file, and may decode endlessly (a regular expression that backtracks) or use
all memory. So each one is loaded in its own process (`token_worker`), with limits of the kernel. If
the process exceeds them it is ended, and tokens are shown by their ids, like those of a model
without a tokenizer here. Messages are always readable.
"""

import atexit
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import structlog

from ....schemas.local.folder import Folder
from ....schemas.local.line_worker import LineWorker, WorkerEnded
from ....schemas.wire.errors import StorageError

LIMIT_S = 3.0
"""CPU time for loading a tokenizer, and for each page of tokens."""
MEMORY_BYTES = 2 << 30
_MAX_FILE_BYTES = 64 << 20
_NAME = "tokenizer.json"
_AT_ONCE = 4
"""Number of processes; the least recently used one ends when another is needed."""

_log: structlog.stdlib.BoundLogger = structlog.get_logger()
_Key = tuple[int, int, int]


class TokenTexts:
    """The texts of one model's tokens."""

    def __init__(self, worker: "_Worker | None" = None) -> None:
        """Decode with a worker; None: show ids."""
        self._worker = worker

    @property
    def known(self) -> bool:
        """Whether the texts are known."""
        return self._worker is not None and not self._worker.has_ended

    def of(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; the last token of a character has its text.

        Runs in a thread.
        """
        texts = None if self._worker is None else self._worker.texts(ids)
        return [f"⟨{token}⟩" for token in ids] if texts is None else texts


def token_texts(model: str, checkpoint: Path | None = None, limit_s: float = LIMIT_S) -> TokenTexts:
    """Return the texts of a model's tokens, or of a run's checkpoint, if its files are here.

    A model's folder may hold links, as the hub's cache does; a run's may not. Runs in a thread.
    """
    places = [Path(os.path.realpath(Path(model, _NAME)))] if model else []
    for place in [*places, *([] if checkpoint is None else [checkpoint / _NAME])]:
        try:
            with (
                Folder(place.parent) as folder,
                folder.open(place.name, max_bytes=_MAX_FILE_BYTES) as file,
            ):
                return TokenTexts(_workers.of(file.fileno(), str(place), limit_s))
        except (OSError, StorageError, ValueError):
            continue
    return TokenTexts()


class _Workers:
    """The processes of recently used tokenizers."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Key, _Worker] = OrderedDict()
        self._lock = threading.Lock()
        atexit.register(self.close)

    def of(self, file: int, place: str, limit_s: float) -> "_Worker":
        """Return the process for an open file; it starts with the first request."""
        status = os.fstat(file)
        key = (status.st_dev, status.st_ino, status.st_mtime_ns)
        with self._lock:
            worker = self._known.get(key)
            if worker is None:
                while len(self._known) >= _AT_ONCE:
                    self._known.popitem(last=False)[1].close()
                worker = self._known[key] = _Worker(file, place, limit_s)
            self._known.move_to_end(key)
        return worker

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            while self._known:
                self._known.popitem()[1].close()


class _Worker:
    """A process with one tokenizer; it is not restarted after its end until its file changes."""

    def __init__(self, file: int, place: str, limit_s: float) -> None:
        self._place = place
        self._lock = threading.Lock()
        self.has_ended = False
        words = (str(file), str(limit_s), str(MEMORY_BYTES))
        self._process = LineWorker(f"{__package__}.token_worker", *words, file=file)

    def texts(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; None if the process does not answer."""
        with self._lock:
            if self.has_ended:
                return None
            try:
                return self._process.ask(list(ids))
            except WorkerEnded as ended:
                self.has_ended = True
                _log.warning("tokenizer_unreadable", file=self._place, code=ended.code)
                return None

    def close(self) -> None:
        """End the process; pending requests get None."""
        self.has_ended = True
        self._process.kill()
        with self._lock:
            self._process.end()


_workers = _Workers()
