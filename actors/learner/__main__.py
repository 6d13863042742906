"""Start the learner of a job: `python -m tinkermq.actors.learner --job JOB`."""

import sys

from ..runtime import JobContext, run_job_actor


async def _main(context: JobContext) -> int:
    from .start import run_learner

    return await run_learner(context)


if __name__ == "__main__":
    sys.exit(run_job_actor("learner", _main))
