"""Which calls of a game's source draw from the process-wide generator of `random`.

Read from the source and not from the generator's state, which other threads of a host move, too.
"""

import ast
import contextlib
import inspect
import sys
from collections.abc import Iterator

DRAWS_HINT = (
    "episodes of one task begin differently by it, and a replay may not find them again: draw from "
    "self.rng; `tinkermq env check` tests it"
)
_OWN_STATE = frozenset({"Random", "SystemRandom", "getstate", "setstate"})
_MOST = 5
_TRIES = 5


def global_draws(game_class: type) -> list[str]:
    """Return where the class's module calls functions of `random`, at most five places.

    Nothing where there is no source.
    """
    module = sys.modules.get(game_class.__module__)
    try:
        tree = _parsed(inspect.getsource(module or game_class))
    except (OSError, TypeError, SyntaxError):
        return []
    modules, functions = _names(tree)
    found = [
        f"{ast.unparse(call.func)} in line {call.lineno}"
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _draws(call.func, modules, functions)
    ]
    return found[:_MOST]


def _parsed(source: str) -> ast.Module:
    """Parse, again where another thread parses too: CPython 3.11 counts their depths together."""
    for _ in range(_TRIES):
        with contextlib.suppress(SystemError):
            return ast.parse(source)
    return ast.parse(source)


def _draws(called: ast.expr, modules: set[str], functions: set[str]) -> bool:
    match called:
        case ast.Attribute(value=ast.Name(id=name), attr=function):
            return name in modules and function not in _OWN_STATE
        case ast.Name(id=name):
            return name in functions
        case _:
            return False


def _names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names under which a module has `random` and functions of it."""
    modules = {used for name, used in _imported(tree) if name == "random"}
    functions = {
        used
        for name, used in _imported(tree)
        if name.startswith("random.") and name.removeprefix("random.") not in _OWN_STATE
    }
    return modules, functions


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield what is imported under which name: `random`, or `random.choice`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((one.name, one.asname or one.name) for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((f"{node.module}.{one.name}", one.asname or one.name) for one in node.names)
