"""One error of ours out of the groups that concurrent work wraps around it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from ...schemas.wire.errors import TinkermqError


@contextmanager
def single_errors() -> Iterator[None]:
    """Raise the one TinkermqError inside an exception group by itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise single(group) from group


def single(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first TinkermqError inside a group, or its first error."""
    matching = group.subgroup(TinkermqError)
    error: BaseException = matching or group
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error
