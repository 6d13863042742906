"""Start a sampler of a Tinker service: `python -m tinkermq.actors.tinker.sampling --job JOB`."""

import sys
from collections.abc import Sequence

from ...runtime import JobContext, run_job_actor


async def _main(context: JobContext) -> None:
    from .sampler import run_sampler

    await run_sampler(context)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sampler until it is stopped; return the exit code."""
    return run_job_actor("sampler", _main, argv)


if __name__ == "__main__":
    sys.exit(main())
