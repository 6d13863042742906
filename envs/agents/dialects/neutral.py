"""Fields of requests that ask for nothing: labels, and values that are what happens anyway.

Makers' libraries and frameworks send many of them with every request. A value that would change
the answer is not among them, and `null` asks for nothing wherever it stands.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

LABELS = frozenset(
    {
        "cache_control",
        "cache_salt",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "user",
        "user_id",
    }
)
"""What is written down about a request or speeds it up, and changes no answer."""

_OFF: tuple[Any, ...] = (False, 0)
_NEUTRAL: Mapping[str, Iterable[Any]] = {
    # Chat Completions and Completions
    "best_of": (1,),
    "echo": _OFF,
    "frequency_penalty": (0,),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default", "standard_only"),
    "store": _OFF,
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "stateful": (True,),  # of episodes: they always are
    # Responses
    "background": _OFF,
    "include": (["reasoning.encrypted_content"],),  # reasoning is told whole: it needs no cipher
    "text.verbosity": ("medium",),
    "reasoning": ({"summary": ("auto", "concise", "detailed"), "generate_summary": ("auto",)},),
    "truncation": ("disabled",),
    # Messages
    "output_config.effort": ("high",),
    "thinking": ({"type": "disabled"},),
    "tool_choice.disable_parallel_tool_use": _OFF,
    "stream_options.include_obfuscation": _OFF,
    # what vLLM's and other servers take besides
    "add_generation_prompt": (True,),
    "add_special_tokens": _OFF,
    "continue_final_message": _OFF,
    "detokenize": (True,),
    "ignore_eos": _OFF,
    "include_reasoning": (True,),
    "include_stop_str_in_output": _OFF,
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "priority": (0,),
    "repetition_penalty": (1,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": _OFF,
}
_EMPTY: tuple[Any, ...] = ([], {}, "")


def is_label(name: str) -> bool:
    """Whether a field changes no answer, whatever its value."""
    return name in LABELS


def asks_nothing(name: str, value: Any) -> bool:
    """Whether a field's value is what happens without it; `name` with the object it stands in."""
    if value is None or value in _EMPTY:
        return True
    if name not in _NEUTRAL:
        return value is False
    return any(_is(value, neutral) for neutral in _NEUTRAL[name])


def _is(value: Any, neutral: Any) -> bool:
    if not isinstance(neutral, dict) or not isinstance(value, dict):
        return bool(value == neutral)
    fields = cast("dict[str, Any]", neutral)
    return all(
        told is None or _among(told, fields.get(name, ()))
        for name, told in cast("dict[str, Any]", value).items()
    )


def _among(value: Any, neutral: Any) -> bool:
    """Whether a value within an object is one of those, or the one, that ask for nothing."""
    return value in neutral if isinstance(neutral, tuple) else bool(value == neutral)
