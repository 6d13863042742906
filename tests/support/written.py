"""What a release leaves behind: the store, run folder and logs of a run, packed for later ones.

`python -m tests.support.written` runs a tiny job with this release, pauses it in its middle, and
packs all into tests/fixtures. Nothing there is changed afterwards: a release adds its own.
"""

import argparse
import asyncio
import json
import platform
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tinkermq.actors.policy.tiny_models import save_tiny_model
from tinkermq.broker.client.connection import connect
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.snapshots import restore_all, save_all
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.version import VERSION
from tinkermq.schemas.wire.subjects import BUCKET_JOBS

from tests.support.configs import REPOSITORY, small_job
from tests.support.stack import Stack

FIXTURES = REPOSITORY / "tests" / "fixtures"
SLOW = {"game": "tests.support.games:SlowBandit", "kwargs": {"delay_s": 0.1}, "num_val": 0}
STEPS, PAUSED_FROM = 8, 3
_PARTS = ("backup", "runs", "about.json")


async def write(target: Path) -> None:
    """Run a job with this release to its middle; pack its store and its folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_tiny_model(folder / "runs" / "model", width=16, layers=1, heads=2, seed=1)
        async with Stack(folder) as stack:
            training = {"num_steps": STEPS, "save_freq": 2, "keep_last": 1}
            job = await stack.submit(small_job(model, env=SLOW, training=training))
            await job.until_step(PAUSED_FROM)
            await job.pause()
            await job.until("PAUSED")
            await save_all(stack.broker, folder / "backup")
        about = {"version": VERSION, "folder": name, "machine": _machine()}
        (folder / "about.json").write_text(json.dumps(about))
        with tarfile.open(target, "x:xz") as archive:
            for part in _PARTS:
                archive.add(folder / part, part)


async def bring_back(archive: Path, stack: Stack) -> tuple[JobRecord, bool]:
    """Put what was packed into a stack that has not begun.

    Returns the run's record, and whether this machine computes as the one that wrote it.
    """
    with tarfile.open(archive) as packed:
        packed.extractall(stack.folder, filter="data")
    about = json.loads((stack.folder / "about.json").read_text())
    stack.server.start()
    async with await connect(stack.server.url, name="test") as broker:
        await restore_all(broker, stack.folder / "backup")
        bucket = Bucket(broker, BUCKET_JOBS, JobRecord)
        (entry,) = await bucket.items()
        moved = _moved(entry.value.model_dump(), about["folder"], str(stack.folder))
        record = JobRecord.model_validate(moved)
        await bucket.update(entry.key, record, entry.revision)
    stack.server.stop()
    return record, about["machine"] == _machine()


def _moved(value: Any, old: str, new: str) -> Any:
    """Return a record as of another folder: paths in it are absolute."""
    if isinstance(value, dict):
        return {key: _moved(inner, old, new) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_moved(inner, old, new) for inner in value]
    return value.replace(old, new) if isinstance(value, str) else value


def _machine() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{platform.machine()} {names[0] if names else ''}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(write(FIXTURES / f"written_by_{VERSION}.tar.xz"))
