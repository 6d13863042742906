"""Start a gateway: `python -m tinkermq.actors.gateway --nats URL --host 127.0.0.1 --port 8780`."""

import sys
from collections.abc import Sequence

from ..runtime import EXIT_FAILED, configure_logging, run_process, service_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway until it is stopped; return the exit code."""
    parser = service_parser("gateway")
    parser.add_argument("--name", default="gateway", help="name (default: gateway)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port", type=int, default=8780, help="port to listen on; 0: a free one (default: 8780)"
    )
    parser.add_argument("--certificate", help="PEM file of a certificate, to serve HTTPS")
    parser.add_argument("--certificate-key", help="PEM file of the key of the certificate")
    parser.add_argument(
        "--behind-tls", action="store_true", help="set secure cookies, for a TLS proxy in front"
    )
    arguments = parser.parse_args(argv)
    log = configure_logging(role="gateway", actor=arguments.name)
    try:
        from .server import Options, run
    except ImportError as error:
        log.error("actor_failed", message=str(error), hint="pip install 'tinkermq[gateway]'")
        return EXIT_FAILED
    return run_process(log, lambda: run(Options(**vars(arguments))))


if __name__ == "__main__":
    sys.exit(main())
