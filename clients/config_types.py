"""The configuration of a job as typed dictionaries, for editors: config_types.pyi has the keys."""

from typing import Any, TypeAlias

JobConfigDict: TypeAlias = dict[str, Any]
"""A tree of the keys of docs/configuration.md, each of them optional."""
