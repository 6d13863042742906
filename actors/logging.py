"""Structured logs of an actor: JSON lines in services, coloured lines on a terminal."""

import contextlib
import logging
import os
import sys
from typing import Any, TextIO, cast

import structlog


class _Patient:
    """A stream whose file may be on a full disk: what cannot be written waits in its buffer."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write, or keep for later."""
        with contextlib.suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        """Bring to the file what there is room for."""
        with contextlib.suppress(OSError):
            self._stream.flush()


def configure_logging(**bound: Any) -> structlog.stdlib.BoundLogger:
    """Configure structlog for this process and return a logger with `bound` on every line.

    TINKERMQ_LOG_FORMAT=json writes one JSON object a line, TINKERMQ_LOG_LEVEL sets the least
    level (default info). Logs go to standard error.
    """
    as_json = os.environ.get("TINKERMQ_LOG_FORMAT") == "json" or not sys.stderr.isatty()
    level = logging.getLevelNamesMapping().get(
        os.environ.get("TINKERMQ_LOG_LEVEL", "info").upper(), logging.INFO
    )
    renderer: Any = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    )
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Patient(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(message)s")
    structlog.contextvars.bind_contextvars(**bound)
    return structlog.get_logger()
