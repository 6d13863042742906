"""Sections of a configuration: unknown keys and keys without effect are errors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema

from ..bounds.defaults import bounded
from ..wire.field_docs import described

if TYPE_CHECKING:
    from .job import JobConfig

MAX_WAIT_S = 86_400.0
"""Longest configurable wait."""
OWN_FUNCTION = (
    r"^([A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*"
    r"|[a-z][a-z0-9_-]*)$"
)
"""A user's function: `module:function`, or a name registered by a package."""
MAX_TAGS = 32
MAX_NOTES = 4000
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/=+@-]{0,63}$")]
"""A tag, or the name of a group."""


def when(key: str, *values: Any) -> dict[str, Any]:
    """Declare that a field is used only if `key` of the same section has one of `values`.

    Without values: if it is set and not 0.
    """
    return {"when": {"key": key, "values": list(values)}}


def only_while(field: FieldInfo) -> str:
    """Return which values of another key a field needs, as Markdown; empty: none."""
    rule = _rule(field)
    if rule is None:
        return ""
    values = "|".join(str(value) for value in rule["values"])
    return f" Only with `{rule['key']}{f': {values}' if values else ''}`."


def _rule(field: FieldInfo) -> dict[str, Any] | None:
    extra = field.json_schema_extra
    return cast("dict[str, Any]", extra).get("when") if isinstance(extra, dict) else None


@dataclass(frozen=True)
class Rule:
    """A refused combination of values of several sections."""

    key: str
    """What is refused, as the user wrote it; `{section.key}` stands for a value."""
    when: "Callable[[JobConfig], Any]"
    """Whether a configuration has that combination."""
    because: str
    """The rest of the sentence that `key` begins: why, and what to do."""

    def sentence(self, job: "JobConfig") -> str:
        """Return the sentence with the configuration's values."""
        return f"{self.key} {self.because}".format_map(dict(job))


class Section(BaseModel):
    """Base of sections: unknown keys are errors, and every value is bounded."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return bounded(handler(source))

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return described(cls, core_schema, handler)

    @model_validator(mode="after")
    def _no_ineffective_key(self) -> Self:
        for name in self.model_fields_set:
            rule = self._unmet(name)
            if rule is not None:
                wanted = " or ".join(repr(value) for value in rule["values"])
                raise ValueError(
                    f"{name} has no effect while {rule['key']} is "
                    f"{getattr(self, rule['key'])!r}: remove it, or set {rule['key']}"
                    + (f" to {wanted}" if wanted else "")
                )
        return self

    def _unmet(self, name: str) -> dict[str, Any] | None:
        """Return the rule by which a field is unused: its own, or that of the key it names."""
        rule = _rule(type(self).model_fields[name])
        if rule is None:
            return None
        value = getattr(self, rule["key"])
        met = value in rule["values"] if rule["values"] else bool(value)
        return self._unmet(rule["key"]) or (None if met else rule)
