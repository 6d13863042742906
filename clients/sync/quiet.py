"""Logs of a client: warnings and errors on standard error, and nothing on standard output."""

import logging
import os
import sys
from typing import Any

import structlog

LEVEL_VARIABLE = "TINKERMQ_LOG_LEVEL"


def quiet_logs() -> None:
    """Show only warnings and errors of the parts that run in this process, on standard error.

    `TINKERMQ_LOG_LEVEL=info` shows more. A program that has configured structlog itself keeps its
    own configuration.
    """
    if structlog.is_configured():
        return
    name = os.environ.get(LEVEL_VARIABLE, "warning").upper()
    level = logging.getLevelNamesMapping().get(name, logging.WARNING)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level), logger_factory=_to_stderr
    )


def _to_stderr(*_: Any) -> structlog.PrintLogger:
    """Return a logger to the present standard error: notebooks and tests exchange it."""
    return structlog.PrintLogger(sys.stderr)
