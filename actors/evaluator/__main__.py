"""Start an evaluator of a job: `python -m tinkermq.actors.evaluator --job JOB`."""

import sys

from ..runtime import JobContext, run_job_actor


async def _main(context: JobContext) -> None:
    from .evaluator import run_evaluator

    await run_evaluator(context)


if __name__ == "__main__":
    sys.exit(run_job_actor("evaluator", _main))
