"""NCCL's settings in the environment of this process.

NCCL does not compare settings between processes: members of a group that use other protocols wait
for each other forever. So settings that a process pins for groups of its own kind are left out
while it makes a group with processes of another kind.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch

from ...schemas.wire.errors import ConfigError

_NO_CACHE = "NCCL_NO_CACHE"
"""Names the variables that NCCL reads anew for each group; it reads others once."""
_FIRST_VERSION = (2, 29, 7)
"""The first that reads NCCL_NO_CACHE."""
_OF_SHARED_GROUPS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
"""A lost member ends the communicator; by torch's default it ends the process."""
_initial: dict[str, str | None] = {}
"""Values of the pinned variables when the process began."""


def pin_settings(settings: Mapping[str, str]) -> None:
    """Set variables for the groups of this kind of process; call it before NCCL is used.

    Raises ConfigError for a version of NCCL that would use them in other groups, too.
    """
    version: tuple[int, ...] = cast(Any, torch.cuda).nccl.version()
    if version < _FIRST_VERSION:
        raise ConfigError(
            f"this torch has NCCL {'.'.join(map(str, version))}, whose settings cannot differ "
            f"between groups, and {', '.join(settings)} are to be set for this learner's ranks",
            hint="install a torch with NCCL 2.29.7 or newer, or remove learner.deterministic",
        )
    _initial.update({name: os.environ.get(name) for name in settings if name not in _initial})
    listed = [name for name in os.environ.get(_NO_CACHE, "").split(",") if name]
    os.environ[_NO_CACHE] = ",".join(dict.fromkeys([*listed, *settings]))
    os.environ.update(settings)


@contextmanager
def settings_of_shared_group() -> Iterator[None]:
    """Set the environment for making a group with processes of another kind."""
    before = _exchange({**_initial, **_OF_SHARED_GROUPS})
    try:
        yield
    finally:
        _exchange(before)


def _exchange(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set variables, or remove those of value None; return their earlier values."""
    before = {name: os.environ.pop(name, None) for name in values}
    os.environ.update({name: value for name, value in values.items() if value is not None})
    return before
