"""The scheduler with the clocks of a lab whose year takes minutes.

    python -m benchmarks.lab_scheduler --nats URL --year-s SECONDS --keep-ended N …

It is the real one. What a lab counts in hours is as much shorter as the year is; what is bound to
machines and messages (heartbeats, leases) is a few times faster than usual.
"""

import sys

from tinkermq.actors.runtime import ActorContext, run_service_actor, service_parser
from tinkermq.actors.scheduler.jobs.view import RetentionLimits
from tinkermq.actors.scheduler.lease import Timing
from tinkermq.actors.scheduler.scheduler import run

YEAR_HOURS = 365 * 24


def main() -> int:
    """Run a scheduler until it is told to stop; return the exit code."""
    parser = service_parser("scheduler")
    parser.add_argument("--year-s", type=float, required=True)
    parser.add_argument("--keep-ended", type=int, required=True)
    parser.add_argument("--keep-ended-of-all", type=int, required=True)
    arguments = parser.parse_args()
    timing = Timing(
        turn_s=0.25,
        renew_s=0.5,
        stale_s=2.0,
        silent_s=5.0,
        aging_s=arguments.year_s / YEAR_HOURS,
    )
    keeping = RetentionLimits(arguments.keep_ended, arguments.keep_ended_of_all)

    async def schedule(context: ActorContext) -> None:
        await run(context, timing, keeping)

    return run_service_actor("scheduler", "scheduler", arguments.nats, schedule)


if __name__ == "__main__":
    sys.exit(main())
