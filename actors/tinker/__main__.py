"""Start the trainer of a Tinker service: `python -m tinkermq.actors.tinker --job JOB`."""

import sys
from collections.abc import Sequence

from ..runtime import JobContext, run_job_actor


async def _main(context: JobContext) -> None:
    from .service import run_trainer

    await run_trainer(context)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a trainer until it is stopped; return the exit code."""
    return run_job_actor("trainer", _main, argv)


if __name__ == "__main__":
    sys.exit(main())
