"""What a machine sees in the folder of the model, so that machines that see other files are told.

The learner's manifests carry it, and whoever fetches a version compares: tokenizer and template,
and the base of an adapter, come from the folder of each machine. A file of more than 2 MiB is told
by its size, its beginning and its end: that takes milliseconds and finds another model, not a
flipped bit.
"""

import hashlib
import socket
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from ...schemas.weights import Manifest
from ...schemas.wire.errors import ModelError

_PART_BYTES = 1 << 20
_READ = frozenset({".json", ".jinja", ".txt", ".model", ".safetensors", ".bin"})


class SeenFiles:
    """The files of model folders as this machine sees them; of a name of the hub there are none."""

    def __init__(self, folders: Sequence[str]) -> None:
        """Read nothing yet."""
        self._folders = [Path(folder) for folder in folders]

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests by path; reads files. What cannot be read is left to who needs it."""
        found: dict[str, str] = {}
        for folder in self._folders:
            for file in sorted(folder.iterdir()) if folder.is_dir() else []:
                if file.suffix in _READ and file.is_file():
                    found[str(file)] = _digest(file)
        return found

    def check(self, manifest: Manifest) -> None:
        """Raise ModelError for a file that the learner's machine sees otherwise; reads files."""
        mine = self.digests
        other = [path for path, one in manifest.files.items() if mine.get(path, one) != one]
        if other:
            raise ModelError(
                f"node {socket.gethostname()} sees another {other[0]} than {manifest.host}, where "
                f"the learner runs ({len(other)} of {len(manifest.files)} files differ)",
                hint="copy the model anew to one of them, or name it by URL (model.path)",
            )


def _digest(file: Path) -> str:
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        digest.update(opened.read(_PART_BYTES))
        opened.seek(max(size - _PART_BYTES, 0))
        digest.update(opened.read(_PART_BYTES))
    return digest.hexdigest()[:16]
