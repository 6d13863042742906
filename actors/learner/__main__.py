"""Start the learner of a job: `python -m tinkermq.actors.learner --job JOB`."""

import os
import sys
from collections.abc import Sequence

from ...schemas.local.tracking import hung_trackers
from ..runtime import JobContext, run_job_actor


async def _main(context: JobContext) -> int:
    from .start import run_learner

    return await run_learner(context)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a learner until it is done or told to stop; return the exit code."""
    code = run_job_actor("learner", _main, argv)
    if hung_trackers():  # their libraries would also hang at the interpreter's exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
