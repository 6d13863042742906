"""Start an inference server of a job: `python -m tinkermq.actors.server --job JOB`."""

import sys
from collections.abc import Sequence

from ..runtime import JobContext, run_job_actor


async def _main(context: JobContext) -> None:
    from .server import run_server

    await run_server(context)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a server until it is stopped; return the exit code."""
    return run_job_actor("server", _main, argv)


if __name__ == "__main__":
    sys.exit(main())
