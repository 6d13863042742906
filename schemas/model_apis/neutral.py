"""Fields of requests, of every API, that ask for nothing: labels, and values that are the default.

Client libraries and frameworks send them with every request.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

LABELS = frozenset(
    {
        "cache_control",
        "cache_salt",
        "guided_decoding_backend",
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
"""Fields that label or speed up a request, and never change an answer."""

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
    "stateful": (True,),  # episodes are always stateful
    # Responses
    "background": _OFF,
    "include": (["reasoning.encrypted_content"],),  # reasoning is returned in full, not encrypted
    "text.verbosity": ("medium",),
    "reasoning.summary": ("auto", "concise", "detailed"),
    "reasoning.generate_summary": ("auto",),
    "truncation": ("disabled",),
    # Messages
    "output_config.effort": ("high",),
    "tool_choice.disable_parallel_tool_use": _OFF,
    "stream_options.include_obfuscation": _OFF,
    # further fields of vLLM's and other servers
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
    """Whether a field's value is its default; `name` includes the object that it is in."""
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
        inner is None or _is_one_of(inner, fields.get(name, ()))
        for name, inner in cast("dict[str, Any]", value).items()
    )


def _is_one_of(value: Any, neutral: Any) -> bool:
    """Whether a value within an object is its default, or one of several defaults."""
    return value in neutral if isinstance(neutral, tuple) else bool(value == neutral)
