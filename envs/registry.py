"""Find games: by registered name, or by `package.module:Class`."""

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ..schemas.wire.errors import GameError, TinkermqError
from ..schemas.wire.foreign import blaming, look_here, place_of, words_of
from .game import AbstractGame

_MISSPELT = 0.9
"""Similarity of a method's name to one of a game's above which it is taken for a slip."""

# Packages that only some games need, each with its own extra of tinkermq.
#
# A game imports such a package when it is created, so that all else works without it.


@dataclass(frozen=True)
class Extra:
    """A package that is not installed with tinkermq itself."""

    package: str
    """Name of the module."""
    install: str
    """Command that installs it."""

    @property
    def installed(self) -> bool:
        """Whether the module can be imported on this machine."""
        return importlib.util.find_spec(self.package) is not None

    def missing(self) -> GameError:
        """Return the error with the command that installs it."""
        return GameError(
            f"the package {self.package} is not installed where the game runs",
            hint=f"install it there: {self.install}",
        )

    def load(self, module: str = "") -> ModuleType:
        """Import the package, or one of its modules; GameError if it is not installed."""
        if self.package not in sys.modules and not self.installed:
            raise self.missing()
        return import_quietly(f"{self.package}.{module}" if module else self.package)


def extra(package: str, name: str) -> Extra:
    """Return a package of one of our own extras."""
    return Extra(package, f"pip install 'tinkermq[{name}]'")


def import_quietly(name: str) -> ModuleType:
    """Import a module that may use the process-wide random generators."""
    if name in sys.modules:
        return sys.modules[name]
    from .running.global_random import GlobalRandom  # NumPy, which the list of games does not need

    with GlobalRandom(0).lent():
        return importlib.import_module(name)


GROUP = "tinkermq.envs"
"""Entry-point group under which packages register their games."""


@dataclass(frozen=True)
class GameInfo:
    """A registered game, for lists."""

    name: str
    """The name to put in `env.game`."""
    target: str
    """`package.module:Class`."""
    description: str
    """First line of the class's docstring, or the reason why it cannot be imported."""
    available: bool
    """Whether the game can be imported on this machine."""


def list_games() -> list[GameInfo]:
    """Return every registered game, by name."""
    return [_info(entry) for _, entries in sorted(registered_games().items()) for entry in entries]


def check_registered(game: str) -> None:
    """Raise GameError for a name that several games have, or none."""
    if ":" not in game:
        _target(game)


FOREIGN = {"trl": "tinkermq.envs.adapters.trl_environments"}
"""Prefixes of classes of other libraries, as in `trl:module:Class`, with the module whose `game_of`
makes a game of the class, a subclass of its `BASE`, and whose `modules_of` lists its imports."""


def plays_any_row(game: str) -> bool:
    """Return whether the game accepts rows of any columns, as a whole."""
    return game.partition(":")[0] in FOREIGN


def load_game(game: str) -> type[AbstractGame]:
    """Import a game by its registered name, by `package.module:Class`, or `trl:module:Class`.

    Modules in the working folder are found, too. Raises GameError with the closest registered name,
    or the end of the traceback of a failed import.
    """
    kind, _, rest = game.partition(":")
    if kind in FOREIGN:
        return importlib.import_module(FOREIGN[kind]).game_of(rest)
    if ":" in game:
        return _import_class(game)
    return _import_class(_target(game))


def import_needs(game_class: type[AbstractGame], kwargs: Mapping[str, Any]) -> None:
    """Import what a game imports when it is created, so that the time does not count as the game's.

    That is its package, if it is installed, and what its arguments name (`named_arguments`).
    """
    needs = getattr(game_class, "needs", None)
    if isinstance(needs, Extra) and needs.installed:
        needs.load()
    for target in _named(game_class, kwargs):
        import_object(target)


def named_objects(game: str, kwargs: Mapping[str, Any]) -> list[str]:
    """Return the objects, as `module:name`, that the arguments of one of our own games name.

    No user's code is run; of other games none are known.
    """
    kind = game.partition(":")[0]
    if kind in FOREIGN:
        return _named(importlib.import_module(FOREIGN[kind]).BASE, kwargs)
    targets = [entry.value for entry in registered_games().get(game, [])]
    is_ours = len(targets) == 1 and targets[0].startswith("tinkermq.envs.")
    return _named(load_game(game), kwargs) if is_ours else []


def _named(game_class: type[AbstractGame], kwargs: Mapping[str, Any]) -> list[str]:
    values = [kwargs.get(name) for name in game_class.named_arguments]
    targets: list[Any] = []
    for value in values:
        targets += cast("list[Any]", value) if isinstance(value, list) else [value]
    return [target for target in targets if isinstance(target, str) and ":" in target]


def find_game(game: str, shown: Sequence[Path] = ()) -> str:
    """Return the module of a game, without running its code; see `find_module`.

    Raises GameError for a name that is not registered, or a package that is not installed.
    """
    target = game if ":" in game else _target(game)
    kind, _, rest = game.partition(":")
    if kind in FOREIGN:
        modules = importlib.import_module(FOREIGN[kind]).modules_of(rest)
    else:
        modules = [target.partition(":")[0]]
    for module in modules:
        find_module(module, f"game {game!r}", shown)
    return target


def find_module(target: str, what: str, shown: Sequence[Path] = ()) -> None:
    """Raise GameError unless the package of `module:name` is installed or in the working folder.

    With `shown` it must lie in one of these folders: the sandbox in which it runs has no others.
    """
    top = re.split("[.:]", target, maxsplit=1)[0]
    look_here()
    importlib.invalidate_caches()  # the file may have just been written
    imported = sys.modules.get(top)
    spec = (
        importlib.util.find_spec(top) if imported is None else getattr(imported, "__spec__", None)
    )
    if imported is None and spec is None:
        raise GameError(
            f"there is no module {top!r} for {what}",
            hint=f"install it on the nodes, or start them in the folder of {top}",
        )
    places = _places(spec) if shown else []
    roots = [folder.resolve() for folder in shown]
    if places and not any(place.is_relative_to(root) for place in places for root in roots):
        raise GameError(
            f"module {top!r} for {what} is in {places[0]}, which code of users does not see",
            hint="install it into the nodes' Python, not as a link to its folder, or start the "
            "nodes with this folder in TINKERMQ_GAME_FOLDERS and PYTHONPATH",
        )


def _places(spec: ModuleSpec | None) -> list[Path]:
    """Return the real file of a module, or the folders of a package; empty: it is built in."""
    if spec is None:
        return []
    paths = map(Path, spec.submodule_search_locations or [spec.origin or ""])
    return [place.resolve() for place in paths if place.exists() and place.is_absolute()]


def companion(game_class: type[AbstractGame], name: str) -> Callable[..., Any]:
    """Return function `name` of the game's module: `make_data` or `demonstrations`."""
    module = sys.modules[game_class.__module__]
    function = getattr(module, name, None)
    if not callable(function):
        raise GameError(
            f"{game_class.__name__} has no {name}: module {module.__name__} does not define it",
            hint=f"write a function {name} beside the class",
        )
    return cast("Callable[..., Any]", function)


def registered_games() -> dict[str, list[EntryPoint]]:
    """Return the entry points of registered games by name; usually one for each name."""
    games: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        others = games.setdefault(entry.name, [])
        if entry.value not in [other.value for other in others]:  # a package may be listed twice
            others.append(entry)
    return games


def _target(game: str) -> str:
    """Return `package.module:Class` of a registered name."""
    entries = registered_games().get(game, [])
    if not entries:
        module = game.removesuffix(".py")
        is_file = Path(f"{module}.py").is_file()
        hint = f"name the class in it: {module}:CLASS" if is_file else _closest(game)
        raise GameError(f"there is no game {game!r}", hint=hint)
    if len(entries) > 1:
        targets = " and ".join(sorted(entry.value for entry in entries))
        raise GameError(
            f"several packages register a game {game!r}: {targets}",
            hint="register yours under another name, or give one of these in place of the name",
        )
    return entries[0].value


def _info(entry: EntryPoint) -> GameInfo:
    try:
        game_class = _import_class(entry.value)
    except TinkermqError as error:
        return GameInfo(entry.name, entry.value, error.message, available=False)
    needs = getattr(game_class, "needs", None)
    if isinstance(needs, Extra) and not needs.installed:
        missing = needs.missing()
        text = f"{missing.message}; {missing.hint}"
        return GameInfo(entry.name, entry.value, text, available=False)
    description = (inspect.getdoc(game_class) or "").partition("\n")[0]
    return GameInfo(entry.name, entry.value, description, available=True)


def _closest(game: str) -> str:
    names = sorted(registered_games())
    near = difflib.get_close_matches(game, names, n=1)
    other = "or give package.module:Class, or install the package that registers it"
    known = f"registered are {', '.join(names)}; {other}"
    return f"did you mean {near[0]}? {known}" if near else known


def refuse_unknown(names: Iterable[str], known: Iterable[str], what: str, otherwise: str) -> None:
    """Raise GameError, `what` and the name, for a name that is not a known one.

    The hint has the closest ones, or is `otherwise`.
    """
    choices = list(known)
    for name in names:
        if name not in choices:
            near = difflib.get_close_matches(name, choices, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else otherwise
            raise GameError(f"{what} {name!r}", hint=hint)


def import_object(target: str) -> tuple[ModuleType, Any]:
    """Import the module of `package.module:name`; return it, and the object or None.

    Raises GameError for any exception of the module.
    """
    module_name, _, name = target.partition(":")
    if module_name.endswith(".py"):
        right = ".".join(Path(module_name).with_suffix("").parts)
        raise GameError(
            f"{target!r} names a file, not a module", hint=f"write {right}:{name}, from its folder"
        )
    module = _import_module(module_name, target)
    target_object: Any = module
    with _blaming_import(target):
        for part in name.split("."):
            target_object = getattr(target_object, part, None)
    return module, target_object


def _import_class(target: str) -> type[AbstractGame]:
    module_name, _, class_name = target.partition(":")
    module, target_object = import_object(target)
    if target_object is None:
        classes = [
            name
            for name, value in vars(module).items()
            if _is_game(value) and value.__module__ == module.__name__
        ]
        raise GameError(
            f"module {module_name} has no game {class_name!r}",
            hint=f"its games are {', '.join(classes) or 'none'}",
        )
    if not _is_game(target_object):
        raise GameError(
            f"{target} is not a game: it does not derive from tinkermq.envs.AbstractGame",
            hint="write `class MyGame(AbstractGame)` with reset and step",
        )
    _refuse_misspelt(target_object)
    return target_object


def _refuse_misspelt(game_class: type[AbstractGame]) -> None:
    """Raise GameError for a method that is named almost like one that a game may have."""
    known = [name for name in dir(AbstractGame) if not name.startswith("_")]
    own = [name for name, value in vars(game_class).items() if inspect.isfunction(value)]
    for name in set(own).difference(known):
        near = difflib.get_close_matches(name, known, n=1, cutoff=_MISSPELT)
        is_plural = near and name.rstrip("s") == near[0].rstrip("s")
        if near and near[0] not in own and not is_plural:
            raise GameError(
                f"{game_class.__name__} has a method {name}, which tinkermq does not call",
                hint=f"did you mean {near[0]}? If not, name it otherwise, or begin it with _",
            )


def _import_module(name: str, target: str) -> ModuleType:
    look_here()
    with _blaming_import(target):
        return importlib.import_module(name)


def _blaming_import(target: str) -> AbstractContextManager[None]:
    """Convert an exception at the import of a game's module into a GameError."""

    def blame(error: BaseException) -> GameError:
        module, place = target.partition(":")[0], place_of(error, (__file__,))
        return GameError(
            f"game {target!r} cannot be imported: {words_of(error)}",
            hint=f"{f'raised at {place}; ' if place else ''}check that "
            f"`python -c 'import {module}'` works where the environment host runs",
        )

    return blaming(blame)


def _is_game(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, AbstractGame)
