"""Write datasets: one writer for the data makers of all games."""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schemas.wire.errors import DataError


def verl_row(
    prompt: str, ground_truth: Any, *, data_source: str, split: str, index: int
) -> dict[str, Any]:
    """Return a row in verl's columns for a prompt of one user message."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index},
    }


@dataclass(frozen=True)
class DataMaker:
    """The `make_data` of a game with random rows."""

    row: Callable[[random.Random, str, int], Mapping[str, Any]]
    """Draws the row with an index of a split."""

    def __call__(
        self, folder: str | Path, num_train: int = 2048, num_val: int = 256, seed: int = 0
    ) -> tuple[Path, Path]:
        """Write `train.parquet` and `val.parquet` in verl's columns; return their paths."""
        rng = random.Random(seed)  # noqa: S311 - tasks, not secrets

        def write(split: str, count: int) -> Path:
            rows = (self.row(rng, split, index) for index in range(count))
            return write_rows(Path(folder) / f"{split}.parquet", rows)

        return write("train", num_train), write("val", num_val)


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows to a `.parquet` or `.jsonl` file, making its folder; return its path."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        _write_parquet(file, list(rows))
    elif file.suffix == ".jsonl":
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    else:
        raise DataError(f"{file} is neither .parquet nor .jsonl", hint="choose one of the two")
    return file


def _write_parquet(file: Path, rows: list[Mapping[str, Any]]) -> None:
    import pyarrow.parquet

    names = dict.fromkeys(name for row in rows for name in row)  # from_pylist: the first row's
    columns = {name: [row.get(name) for row in rows] for name in names}
    table = pyarrow.Table.from_pydict(columns)
    pyarrow.parquet.write_table(table, file)  # pyright: ignore[reportUnknownMemberType] - stubs
