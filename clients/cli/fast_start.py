"""What lets a command answer at once: most of its time it would import what it never uses.

nats-py imports aiohttp, where that is installed, for WebSockets alone, which no URL of ours asks
for; that takes longer than most commands' own work. In the process of the command line, and in no
other, the first `import` of a module named here returns Python's own lazy one
(`importlib.util.LazyLoader`): it is the same module, and the first look at an attribute loads it.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader

LAZY = frozenset({"aiohttp"})


class LazyFinder:
    """A finder of `sys.meta_path` for a few modules by name; all others are left to the others."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        """Return the spec of one of the modules, with a loader that waits."""
        spec = PathFinder.find_spec(name, path) if name in self._names else None
        if spec is None or spec.loader is None:
            return None
        spec.loader = LazyLoader(spec.loader)
        return spec


@contextmanager
def importing(lazy: frozenset[str] = LAZY) -> Iterator[None]:
    """Import fast in this block: some modules at their first use, and without looking for garbage.

    What is imported stays, so that collecting finds none of it, and takes a tenth of the time.
    """
    finder = LazyFinder(lazy)
    sys.meta_path.insert(0, finder)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if was_enabled:
            gc.enable()
