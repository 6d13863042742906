"""The data that a host serves episodes from."""

from collections import OrderedDict

from ...schemas.config.job import EnvConfig
from ...schemas.env import Split
from ...schemas.wire.errors import DataError
from ..dataset import Dataset
from ..record import Record, any_columns, parse_task

RECENT = 64
"""Decoded rows that are kept: the episodes of a group ask for the same one."""


class HostData:
    """Training and validation rows of a job; both absent for a game that generates its states."""

    def __init__(self, config: EnvConfig, seed: int, *, needs_answers: bool = True) -> None:
        """Open the files; `seed` decides which validation rows are used, alike on every host.

        Without `needs_answers` a row is whatever a program takes for a task.
        """
        rows = Dataset if needs_answers else _tasks
        self._train = rows(config.train_data) if config.train_data else None
        self._val = None
        if config.val_data:
            self._val = rows(config.val_data).shuffled(seed, config.num_val)
        self.num_train = len(self._train) if self._train else None
        self.num_val = self._count_val(config)
        self._recent: OrderedDict[tuple[Split, int], Record] = OrderedDict()

    def _count_val(self, config: EnvConfig) -> int:
        if self._val is not None:
            return len(self._val)
        return config.num_val if self._train is None else 0

    def record(self, split: Split, sample: int | None) -> Record | None:
        """Return a row, or None for an episode whose state the game generates."""
        if sample is None:
            return None
        known = self._recent.get((split, sample))
        return known if known is not None else self._decode(split, sample)

    def source(self, split: Split, sample: int | None) -> str:
        """Return the data source of a row; empty where there is none."""
        try:
            record = self.record(split, sample)
        except DataError:
            return ""  # the start of the episode tells of it
        return record.data_source if record is not None else ""

    def _decode(self, split: Split, sample: int) -> Record | None:
        dataset = self._train if split == "train" else self._val
        if dataset is None:
            if self._train is None and split == "val":
                return None  # validation of a generated game: the sample only numbers its seed
            raise DataError(
                f"row {sample} was asked for, but there is no {split} data",
                hint=f"set env.{split}_data, or ask with a seed and without a row",
            )
        record = dataset.record(sample)
        self._recent[split, sample] = record
        if len(self._recent) > RECENT:
            self._recent.popitem(last=False)
        return record

    def close(self) -> None:
        """Give the files back."""
        for dataset in (self._train, self._val):
            if dataset is not None:
                dataset.close()


def _tasks(paths: list[str]) -> Dataset:
    return Dataset(paths, any_columns, parse_task)
