"""Start a scheduler: `python -m tinkermq.actors.scheduler --nats URL`."""

import sys
from collections.abc import Sequence

from ..runtime import run_service_actor, service_parser
from .scheduler import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a scheduler until it is told to stop; return the exit code."""
    parser = service_parser("scheduler")
    parser.add_argument("--name", default="scheduler", help="name (default: scheduler)")
    arguments = parser.parse_args(argv)
    return run_service_actor("scheduler", arguments.name, arguments.nats, run)


if __name__ == "__main__":
    sys.exit(main())
