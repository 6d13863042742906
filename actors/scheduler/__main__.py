"""Start a scheduler: `python -m tinkermq.actors.scheduler --nats URL`."""

import argparse
import sys
from collections.abc import Sequence

from ...schemas.machines import machines_config
from ..runtime import ActorContext, run_service_actor, service_parser
from .jobs.view import RetentionLimits
from .scheduler import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a scheduler until it is stopped; return the exit code."""
    parser = service_parser("scheduler")
    parser.add_argument("--name", default="scheduler", help="name (default: scheduler)")
    keeping = RetentionLimits()
    for flag, most, whose in (
        ("--keep-ended", keeping.of_user, "each user"),
        ("--keep-ended-of-all", keeping.of_all, "all users"),
    ):
        text = f"newest ended jobs of {whose} to keep unarchived (default: {most})"
        parser.add_argument(flag, type=_count, default=most, metavar="N", help=text)
    parser.add_argument(
        "--machines",
        default="none",
        metavar="WHERE",
        help="request machines as the queue needs them: slurm:PARTITION, ray:ADDRESS, a YAML file",
    )
    parser.add_argument(
        "--node-credentials", default="", metavar="FILE", help="node credentials of these machines"
    )
    arguments = parser.parse_args(argv)
    retention = RetentionLimits(arguments.keep_ended, arguments.keep_ended_of_all)
    machines = machines_config(arguments.machines, credentials=arguments.node_credentials)

    async def schedule(context: ActorContext) -> None:
        await run(context, keeping=retention, machines=machines)

    return run_service_actor("scheduler", arguments.name, arguments.nats, schedule)


def _count(text: str) -> int:
    """Return a number of jobs; argparse.ArgumentTypeError for other text."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of jobs ≥ 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
