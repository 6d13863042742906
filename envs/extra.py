"""Packages that only some games need: each comes with an extra of its own.

A game imports such a package when it is made, so that everything else starts without it.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType

from ..schemas.wire.errors import GameError


@dataclass(frozen=True)
class Extra:
    """A package that is not installed with tinkermq itself."""

    package: str
    """Name under which it is imported."""
    install: str
    """What installs it."""

    @property
    def installed(self) -> bool:
        """Whether it can be imported here."""
        return importlib.util.find_spec(self.package) is not None

    def missing(self) -> GameError:
        """Return the error that says what to install."""
        return GameError(
            f"the package {self.package} is not installed where the game runs",
            hint=f"install it there: {self.install}",
        )

    def load(self, module: str = "") -> ModuleType:
        """Import the package, or one of its modules; GameError when it is not installed."""
        if self.package not in sys.modules and not self.installed:
            raise self.missing()
        return import_quietly(f"{self.package}.{module}" if module else self.package)


def extra(package: str, name: str) -> Extra:
    """Return a package that comes with one of our own extras."""
    return Extra(package, f"pip install 'tinkermq[{name}]'")


def import_quietly(name: str) -> ModuleType:
    """Import a module that may draw from the process-wide generators, or seed them."""
    if name in sys.modules:
        return sys.modules[name]
    from .running.global_random import GlobalRandom  # NumPy, which a list of games does without

    with GlobalRandom(0).lent():
        return importlib.import_module(name)
