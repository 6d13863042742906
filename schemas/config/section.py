"""A section of a configuration: it refuses keys that are unknown or have no effect."""

from typing import Any, Self, cast

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema

from ..bounds.defaults import bounded


def when(key: str, *values: Any) -> dict[str, Any]:
    """Say that a field is read only while `key` of the same section has one of `values`."""
    return {"when": {"key": key, "values": list(values)}}


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, and every value is bounded."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return bounded(handler(source))

    @model_validator(mode="after")
    def _no_ineffective_key(self) -> Self:
        for name in self.model_fields_set:
            rule = self._unmet(name)
            if rule is not None:
                wanted = " or ".join(repr(value) for value in rule["values"])
                raise ValueError(
                    f"{name} has no effect while {rule['key']} is "
                    f"{getattr(self, rule['key'])!r}: remove it, or set {rule['key']} to {wanted}"
                )
        return self

    def _unmet(self, name: str) -> dict[str, Any] | None:
        """Return the rule by which a field is not read: its own, or that of the key it names."""
        extra = cast("dict[str, Any] | None", type(self).model_fields[name].json_schema_extra)
        rule: dict[str, Any] | None = (extra or {}).get("when")
        if rule is None or getattr(self, rule["key"]) not in rule["values"]:
            return rule
        return self._unmet(rule["key"])
