"""The newest weights that a model has for samples that move on while they run.

A file `.inflight` beside the checkpoints of a model names the one of them that counts. It is
written when a save is done, and never goes back: an operation that is done again leaves it.
"""

import json
from dataclasses import replace
from pathlib import Path

from ....schemas.tinker.names import CheckpointName, ModelName
from ....schemas.wire.errors import NotFoundError, StorageError
from .folders import CheckpointFolders, StoredCheckpoint
from .records import read_record

_KIND = "sampler_weights"
_FILE = ".inflight"


class InflightWeights:
    """What the samples of each model move on to."""

    def __init__(self, folders: CheckpointFolders) -> None:
        """Keep it beside the checkpoints."""
        self._folders = folders

    def move(self, stored: StoredCheckpoint) -> None:
        """Let samples move on to a checkpoint, unless they are past it; raises StorageError."""
        file = self._file(stored.user, stored.name.model)
        known = read_record(file)
        if known is not None and int(known["seq"]) >= stored.seq:
            return
        hidden = file.with_name(f"{_FILE}.new")
        try:
            text = json.dumps({"name": stored.name.name, "seq": stored.seq})
            hidden.write_text(text, encoding="utf-8")
            hidden.rename(file)
        except OSError as error:
            raise StorageError(
                f"{file} cannot be written: {error.strerror}", hint="see the disk of the pool"
            ) from error

    def newest(self, user: str, least: CheckpointName) -> StoredCheckpoint:
        """Return what samples of a user's model move on to: `least`, or what was saved later.

        Raises NotFoundError.
        """
        known = read_record(self._file(user, least.model))
        if known is None:
            raise NotFoundError(
                f"{least} moves on to nothing", hint="save_weights_for_sampler with kind=inflight"
            )
        name = replace(least, name=str(known["name"]))
        return self._folders.find(user, name)

    def _file(self, user: str, model: ModelName) -> Path:
        place = self._folders.place_of(user, CheckpointName(model, _KIND, "-"))
        return place.parent / _FILE
