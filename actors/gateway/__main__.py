"""Start a gateway: `python -m tinkermq.actors.gateway --nats URL --host 127.0.0.1 --port 8780`."""

import asyncio
import sys
from collections.abc import Sequence

import uvloop

from ...schemas.errors import TinkermqError
from ..logging import configure_logging
from ..runtime import EXIT_CRASHED, EXIT_DONE, EXIT_FAILED, root_cause, service_parser

_TRANSIENT = frozenset({"broker", "deadline", "internal"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway until it is told to stop; return the exit code."""
    parser = service_parser("gateway")
    parser.add_argument("--name", default="gateway", help="name (default: gateway)")
    parser.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=8780, help="port (default: 8780; 0: a free one)"
    )
    parser.add_argument("--certificate", help="PEM file of a certificate: serve HTTPS")
    parser.add_argument("--certificate-key", help="PEM file of its key")
    parser.add_argument(
        "--behind-tls", action="store_true", help="a proxy in front speaks TLS: secure cookies"
    )
    arguments = parser.parse_args(argv)
    log = configure_logging(role="gateway", actor=arguments.name)
    try:
        from .server import Options, run
    except ImportError as error:
        log.error("actor_failed", message=str(error), hint="pip install 'tinkermq[gateway]'")
        return EXIT_FAILED
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(Options(**vars(arguments))))
    except Exception as raised:
        error = root_cause(raised)
        if not isinstance(error, TinkermqError):
            log.error("actor_crashed", exc_info=raised)
            return EXIT_CRASHED
        log.error("actor_failed", code=error.code, message=error.message, hint=error.hint)
        return EXIT_CRASHED if error.code in _TRANSIENT else EXIT_FAILED
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
