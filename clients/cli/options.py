"""Options that most commands have."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter


@Parameter(name="*")
@dataclass(frozen=True)
class Common:
    """Which pool is meant, and how the answer is printed."""

    nats_url: Annotated[
        str | None,
        Parameter(help="The broker; default: $TINKERMQ_NATS_URL, or the local stack."),
    ] = None
    json: Annotated[bool, Parameter(help="Print JSON; a stream is one document a line.")] = False


COMMON = Common()
"""Neither is given."""
