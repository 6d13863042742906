"""The command line: `tinkermq`."""

from .main import main

__all__ = ["main"]
