"""The release of this package, as `tinkermq.__version__` and every process says it."""

VERSION = "0.1.0"
"""A constant: reading the installed metadata takes a tenth of an actor's start."""
