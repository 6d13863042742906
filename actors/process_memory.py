"""What the memory of a process holds, for `tinkermq profile --memory`.

The kernel counts the pages; the actor adds which of its own bytes they are. What is left is torch
and the other libraries, activations, and memory that the allocator keeps for what comes next.
"""

import ctypes
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_PAGES = Path("/proc/self/smaps_rollup")
_FIELDS = {
    "Rss": "resident",
    "Private_Dirty": "private",
    "Pss_Shmem": "shared_memory",
    "Pss": "proportional",
    "VmHWM": "peak",
}


def read_process_memory() -> dict[str, int]:
    """Return bytes of this process as Linux counts them; nothing on other systems.

    `resident` is all that is mapped and in memory, `private` what no other process has, and
    `proportional` divides pages by the processes that have them; of this `shared_memory` are
    those of files in memory. `peak` is the highest `resident` so far.
    """
    try:
        pages, status = _PAGES.read_text(), _STATUS.read_text()
    except OSError:
        return {}
    sizes = dict(_sizes(pages)) | dict(_sizes(status))
    return {ours: sizes[name] for name, ours in _FIELDS.items() if name in sizes}


def _sizes(text: str) -> Iterable[tuple[str, int]]:
    for line in text.splitlines():
        match line.split():
            case [name, number, "kB"] if name.endswith(":"):
                yield name[:-1], int(number) * 1024
            case _:
                continue


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors in this machine's memory; storage that several share counts
    once."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def return_free_memory() -> None:
    """Give memory that is allocated no more back to the system, where the C library keeps it.

    glibc keeps what lies between other allocations: the activations of a step, for the next one,
    which finds them in other places. Elsewhere than with glibc this does nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
