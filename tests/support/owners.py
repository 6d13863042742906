"""Records of users' runs, for tests of who may read what."""

from pathlib import Path
from typing import Any

from tinkermq.schemas.job import JobRecord


def record_of_ada(root: Path, **changes: Any) -> JobRecord:
    """Return the record of a run of user ada in a folder of runs."""
    return JobRecord(
        job="j",
        name="r",
        user="ada",
        state="STARTING",
        config={},
        created=0.0,
        run_dir=str(root / "ada" / "r"),
        output_roots=[str(root)],
        **changes,
    )
