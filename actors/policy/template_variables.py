"""The variables of chat templates that a request may set, such as `enable_thinking`."""

import re
from collections.abc import Collection, Mapping
from typing import Any

import jinja2
from jinja2 import meta

from ...schemas.wire.errors import ConfigError

_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags of transformers' own around an answer."""
_OWN_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Variables of templates, and arguments of transformers, that no request sets."""


def variables_of(template: str) -> frozenset[str]:
    """Return the variables of a chat template that a request may set; none of an unreadable one."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])  # noqa: S701 - no HTML
    try:
        parsed = environment.parse(_GENERATION.sub("", template))
    except jinja2.TemplateSyntaxError:
        return frozenset()
    own = _OWN_VARIABLES.union(environment.globals)
    return frozenset(meta.find_undeclared_variables(parsed)) - own


def settable(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the options that a template with the `known` variables has.

    Raises ConfigError for another one, such as `messages`, unless its value is false or empty.
    """
    for name, value in options.items():
        if name not in known and value:
            raise ConfigError(
                f"the chat template has no variable {name!r:.80} that a request may set",
                hint=f"it has: {', '.join(sorted(known)) or 'none'}",
            )
    return {name: value for name, value in options.items() if name in known}
