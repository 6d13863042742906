"""Start the auth service: `python -m tinkermq.actors.auth --nats URL`.

Its secrets are in the folder that $TINKERMQ_SECRETS names.
"""

import sys
from collections.abc import Sequence

from ..runtime import run_service_actor, service_parser
from .service import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run the auth service until it is stopped; return the exit code."""
    parser = service_parser("auth")
    parser.add_argument("--name", default="auth", help="name (default: auth)")
    arguments = parser.parse_args(argv)
    return run_service_actor("auth", arguments.name, arguments.nats, run)


if __name__ == "__main__":
    sys.exit(main())
