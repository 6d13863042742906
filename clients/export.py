"""Write a run's episodes to a Parquet file: `tinkermq rollouts RUN --to FILE.parquet`."""

import json
import os
from collections.abc import Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from ..broker.kept_rollouts import RunRollouts
from ..schemas.rollout import Trajectory
from ..schemas.task import Blame
from ..schemas.wire.errors import DataError, StorageError
from ..schemas.wire.images import plain_text
from .cli.output import jsonable
from .run_records import EpisodeFilter, LoggedEpisode, episodes_in_order

_ROW_GROUP_BYTES = 32 << 20
"""Bytes of tokens and messages after which a row group ends earlier."""

_BLAME = pa.struct([(name, pa.string()) for name in ("boundary", "code", "message")])
_MESSAGE = pa.struct([(name, pa.string()) for name in ("role", "content", "tool_calls")])
_MICROSECONDS = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    {
        "seq": pa.int64(),
        "task": pa.int64(),
        "position": pa.int64(),
        "sample": pa.int64(),
        "seed": pa.uint64(),
        "reissue_of": pa.int64(),
        "step": pa.int64(),
        "episode": pa.int32(),
        "row_of": pa.int32(),
        "kind": pa.string(),
        "role": pa.string(),
        "data_source": pa.string(),
        "generator": pa.string(),
        "host": pa.string(),
        "started": _MICROSECONDS,
        "finished": _MICROSECONDS,
        "generate_s": pa.float64(),
        "environment_s": pa.float64(),
        "reward": pa.float32(),
        "rewards": pa.list_(pa.float32()),
        "finish": pa.string(),
        "finish_reasons": pa.list_(pa.string()),
        "tries": pa.int32(),
        "failures": pa.list_(_BLAME),
        "error": _BLAME,
        "min_version": pa.int32(),
        "max_version": pa.int32(),
        "num_tokens": pa.int32(),
        "num_generated": pa.int32(),
        "token_ids": pa.list_(pa.int32()),
        "mask": pa.list_(pa.uint8()),
        "logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "turn_ends": pa.list_(pa.int32()),
        "messages": pa.list_(_MESSAGE),
        "info": pa.string(),
    }
)
"""The columns; docs/training.md says what they hold."""


async def write_parquet(
    rollouts: RunRollouts,
    step_of: dict[int, int],
    chosen: EpisodeFilter,
    path: Path,
    *,
    rows_per_group: int = 512,
) -> int:
    """Write the episodes that a filter selects, in the order of the log; return their number.

    A row group at a time is in memory. The file appears when it is complete, and replaces another.
    Raises DataError for another suffix, NotFoundError for a step that was not trained, StorageError
    for a folder that cannot be written.
    """
    if path.suffix != ".parquet":
        raise DataError(f"{path} does not end in .parquet", hint="name it FILE.parquet")
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    num_rows = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
            rows: list[dict[str, Any]] = []
            num_bytes = 0
            async with aclosing(episodes_in_order(rollouts, step_of, chosen)) as episodes:
                async for episode in episodes:
                    rows.append(_row(episode))
                    num_rows, num_bytes = num_rows + 1, num_bytes + _size(episode.trajectory)
                    if len(rows) >= rows_per_group or num_bytes >= _ROW_GROUP_BYTES:
                        _write(writer, rows)
                        rows, num_bytes = [], 0
            _write(writer, rows)
        partial.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}", hint="name another folder"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return num_rows


def _write(writer: pq.ParquetWriter, rows: Sequence[dict[str, Any]]) -> None:
    if rows:
        writer.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA))


def _size(trajectory: Trajectory | None) -> int:
    """Estimate the bytes of an episode as Python objects."""
    if trajectory is None:
        return 0
    texts = sum(len(plain_text(message.get("content") or "")) for message in trajectory.messages)
    return 64 * len(trajectory.token_ids) + texts


def _row(episode: LoggedEpisode) -> dict[str, Any]:
    """Return the columns of an episode; those that it lacks are null."""
    group, trajectory = episode.group, episode.trajectory
    task = group.task
    row: dict[str, Any] = {
        "seq": episode.seq,
        "task": task.task,
        "position": task.index,
        "sample": task.sample,
        "seed": task.seed,
        "reissue_of": task.reissue_of,
        "step": episode.step,
        "episode": episode.number,
        "generator": group.source,
        "started": _time(group.started),
        "finished": _time(group.finished),
        "error": group.error and _blame(group.error),
    }
    if trajectory is None:
        return row
    names = ("kind", "role", "data_source", "host", "generate_s", "environment_s", "reward")
    lists = ("rewards", "token_ids", "mask", "logprobs", "versions", "turn_ends")
    return {
        **row,
        **{name: getattr(trajectory, name) for name in (*names, *lists)},
        "row_of": trajectory.episode if trajectory.episode >= 0 else None,
        "finish": trajectory.ended_by,
        "finish_reasons": trajectory.finish_reasons,
        "tries": trajectory.num_tries,
        "failures": list(map(_blame, trajectory.failures)),
        "min_version": trajectory.min_version,
        "max_version": trajectory.max_version,
        "num_tokens": len(trajectory.token_ids),
        "num_generated": trajectory.num_generated,
        "messages": list(map(_message, trajectory.messages)),
        "info": json.dumps(jsonable(trajectory.info), default=str),
    }


def _time(seconds: float) -> datetime | None:
    return datetime.fromtimestamp(seconds, UTC) if seconds else None


def _blame(blame: Blame) -> dict[str, str]:
    return {"boundary": blame.boundary, "code": blame.code, "message": blame.message}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    calls = cast("list[Any]", message.get("tool_calls") or [])
    return {
        "role": str(message.get("role", "")),
        "content": plain_text(message.get("content") or ""),
        "tool_calls": json.dumps(calls, default=str) if calls else None,
    }
