"""Start an evaluator of a job: `python -m tinkermq.actors.evaluator --job JOB`."""

import sys
from collections.abc import Sequence

from ..runtime import JobContext, run_job_actor


async def _main(context: JobContext) -> None:
    from .evaluator import run_evaluator

    await run_evaluator(context)


def main(argv: Sequence[str] | None = None) -> int:
    """Run an evaluator until it is done or told to stop; return the exit code."""
    return run_job_actor("evaluator", _main, argv)


if __name__ == "__main__":
    sys.exit(main())
