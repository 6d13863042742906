"""One error of ours out of the groups that concurrent work wraps around it."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...schemas.wire.errors import root_cause


@contextmanager
def single_errors() -> Iterator[None]:
    """Raise the one TinkermqError inside an exception group by itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise root_cause(group) from group
