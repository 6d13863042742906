"""Start a rank of a job's learner: `python -m tinkermq.actors.learner.ranks --job JOB`."""

import sys
from collections.abc import Sequence

from ...runtime import JobContext, run_job_actor


async def _main(context: JobContext) -> int | None:
    from .processes import run_rank

    return await run_rank(context)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a rank until it is stopped; return the exit code."""
    return run_job_actor("rank", _main, argv)


if __name__ == "__main__":
    sys.exit(main())
