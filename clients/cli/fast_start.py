"""What lets a command answer at once: most of its time it would import what it never uses.

nats-py imports aiohttp, where that is installed, for WebSockets alone, which no URL of ours asks
for; that takes longer than most commands' own work. In the process of the command line, and in no
other, the first `import` of a module named here returns Python's own lazy one
(`importlib.util.LazyLoader`): it is the same module, and the first look at an attribute loads it.

structlog imports rich's tracebacks, where rich is installed, and with them pygments. A command
tells its errors itself, so structlog is imported here as if there were no rich.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import LazyLoader
from types import ModuleType

LAZY = frozenset({"aiohttp"})
_LOGS, _UNSEEN = "structlog", "rich"


class FastFinder:
    """A finder of `sys.meta_path` for a few modules by name; all others are left to the others."""

    def __init__(self, lazy: frozenset[str]) -> None:
        self._lazy = lazy

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        """Return the spec of one of the modules, with a loader that does less."""
        if name not in self._lazy and name != _LOGS:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        if name in self._lazy:
            spec.loader = LazyLoader(spec.loader)
        elif isinstance(spec.loader, SourceFileLoader) and _UNSEEN not in sys.modules:
            spec.loader = _Without(name, spec.loader.path)
        return spec


class _Without(SourceFileLoader):
    """Loads a module as if another were not installed."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[_UNSEEN] = None  # pyright: ignore[reportArgumentType]  # as Python has it
        try:
            super().exec_module(module)
        finally:
            del sys.modules[_UNSEEN]


@contextmanager
def importing(lazy: frozenset[str] = LAZY) -> Iterator[None]:
    """Import fast in this block: some modules at their first use, and without looking for garbage.

    What is imported stays, so that collecting finds none of it, and takes a tenth of the time.
    """
    finder = FastFinder(lazy)
    sys.meta_path.insert(0, finder)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if was_enabled:
            gc.enable()
