"""What every engine refuses before it computes anything."""

import numpy as np

from ....schemas.bounds.defaults import MAX_TOP_K
from ....schemas.output_format import MAX_PENALTY, MAX_REPETITION, MAX_TOP_LOGPROBS
from ....schemas.wire.errors import ConfigError, EngineError, NotFoundError
from .engine import IntVector, Sampling


def check_sampling(sampling: Sampling) -> None:
    """Raise ConfigError for parameters that cannot be sampled with."""
    if (
        sampling.max_new_tokens >= 1
        and 0 <= sampling.temperature < np.inf
        and 0 < sampling.top_p <= 1
        and sampling.top_k >= 0
        and abs(sampling.presence_penalty) <= MAX_PENALTY
        and abs(sampling.frequency_penalty) <= MAX_PENALTY
        and 0 < sampling.repetition_penalty <= MAX_REPETITION
        and 0 <= sampling.num_top <= MAX_TOP_LOGPROBS
        and sampling.num_drawn >= 0
    ):
        return
    raise ConfigError(
        f"{sampling} cannot be sampled",
        hint="max_new_tokens is at least 1, temperature and top_k are 0 or more, top_p is over 0 "
        f"and at most 1, penalties are at most {MAX_PENALTY:g} either side of 0, that of "
        f"repetition is over 0 and at most {MAX_REPETITION:g}",
    )


def check_prompt(
    prompt: IntVector, sampling: Sampling, *, max_context: int, vocab_size: int
) -> None:
    """Raise ConfigError for a prompt that has no room, or tokens that the model does not have."""
    if prompt.ndim != 1 or not len(prompt):
        raise ConfigError("a prompt has no tokens", hint="give at least one token")
    _check_tokens(prompt, vocab_size)
    if len(prompt) + sampling.max_new_tokens > max_context:
        raise ConfigError(
            f"a prompt of {len(prompt)} tokens and up to {sampling.max_new_tokens} new ones "
            f"exceed the engine's {max_context} tokens",
            hint="raise rollout.max_prompt_tokens or rollout.max_response_tokens, or shorten "
            "the prompt",
        )


def check_scored(prompt: IntVector, top_k: int, *, max_context: int, vocab_size: int) -> None:
    """Raise ConfigError for a prompt that cannot be scored."""
    if prompt.ndim != 1 or not 1 <= len(prompt) <= max_context:
        raise ConfigError(
            f"a prompt of {prompt.size} tokens cannot be scored",
            hint=f"give one to {max_context} tokens",
        )
    if not 0 <= top_k <= min(MAX_TOP_K, vocab_size):
        raise ConfigError(
            f"the {top_k} likeliest tokens cannot be told",
            hint=f"ask for {min(MAX_TOP_K, vocab_size)} at most",
        )
    _check_tokens(prompt, vocab_size)


def no_adapter(name: str) -> NotFoundError:
    """Return the error of a request for an adapter that is not there."""
    return NotFoundError(f"the engine has no adapter {name}", hint="add it first")


def _check_tokens(prompt: IntVector, vocab_size: int) -> None:
    if prompt.view(np.uint32).max() >= vocab_size:  # a negative id is huge there
        wrong = prompt[prompt.view(np.uint32) >= vocab_size][0]
        raise ConfigError(
            f"token {wrong} of a prompt is outside the model's vocabulary of {vocab_size}",
            hint="tokenizer and model must belong together",
        )


def check_queue(request_id: str, pending: int, max_pending: int, *, running: bool) -> None:
    """Raise EngineError for an id that is in use, and for one request too many."""
    if running:
        raise EngineError(
            f"request {request_id} is running already", hint="give each request its own id"
        )
    if pending >= max_pending:
        raise EngineError(
            f"the engine's queue is full: {pending} requests run or wait",
            hint="lower generator.max_episodes, or raise max_waiting",
        )


def not_finite(version: int) -> EngineError:
    """Return the error of a request whose model computed no numbers."""
    return EngineError(
        f"the model of version {version} computes logits that are not finite",
        hint="training has diverged: lower learner.lr, or resume from an earlier checkpoint",
    )


def left_grammar(why: str) -> ConfigError:
    """Return the error of a request whose output format cannot be followed to its end."""
    return ConfigError(
        f"the output format cannot be followed further: {why}",
        hint="give a simpler schema: shorter alternatives, patterns and bounds",
    )


def again(error: EngineError) -> EngineError:
    """Return an error of its own for each waiter: a shared one would collect all tracebacks."""
    copy = EngineError(error.message, hint=error.hint)
    copy.__cause__ = error.__cause__
    return copy
