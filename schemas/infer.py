"""Inference: chats, completions, and episodes of a game."""

from typing import Any, Literal

from pydantic import Field

from .env import Split
from .generation import (
    MAX_TEMPERATURE,
    RequestId,
    TextPart,
    TextRequest,
    TokenId,
)
from .model_apis.canonical import ModelMessage
from .rollout import Trajectory
from .task import Blame
from .wire.array import FloatMatrix, FloatVector, IntMatrix
from .wire.bounds import MAX_TOP_K
from .wire.message import Message, Part

MAX_DEADLINE_S = 7200.0


class ChatRequest(TextRequest):
    """Continue a conversation, on `infer.chat`; parts come until the last one."""

    adapter: str = ""
    """One of the job's adapters, as `run@step`; empty: its main model. Of a Tinker service: a
    checkpoint, `tinker://…`."""
    messages: list[ModelMessage] = Field(min_length=1)
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """Tools in the form that the chat template takes."""
    template_options: dict[str, Any] = Field(default_factory=dict[str, Any], max_length=32)
    """Variables of the chat template (`enable_thinking`); one that it does not have is refused,
    unless its value is false or empty."""
    effort: str = Field(default="", max_length=32)
    """How much to think, for templates with a variable `reasoning_effort`; `none` does not."""
    thinks: bool | None = None
    """Think or not, for templates with a variable `enable_thinking` or `thinking`."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_K)
    """As in a CompletionRequest."""
    deadline_s: float = Field(default=600.0, gt=0, le=MAX_DEADLINE_S)
    """Longest duration of the answer."""


class CompletionRequest(TextRequest):
    """Continue texts without a chat template, on `infer.complete`."""

    adapter: str = ""
    """One of the job's adapters, as `run@step`; empty: its main model. Of a Tinker service: a
    checkpoint, `tinker://…`."""
    prompts: list[str | list[TokenId]] = Field(min_length=1, max_length=1024)
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens to texts."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_K)
    """Return the prompts' log-probs at temperature 1, and so many of the likeliest tokens at each
    position; null: neither."""
    echo: bool = False
    """Begin each answer with its prompt, with `logprobs` with those of its tokens, too."""
    deadline_s: float = Field(default=600.0, gt=0, le=MAX_DEADLINE_S)
    """Longest duration of the answer."""


class PromptScore(Message):
    """Log-probs of N successive tokens of a prompt, at temperature 1."""

    prompt: int = Field(ge=0)
    start: int = Field(ge=0)
    """Position of the first scored token."""
    logprobs: FloatVector
    """float32[N]: log-probs; NaN for a prompt's first token."""
    top_ids: IntMatrix
    """int32[N, K]: likeliest tokens at each position, best first."""
    top_logprobs: FloatMatrix
    """float32[N, K]: their log-probs."""


class InferPart(TextPart):
    """Part of the answer to a chat or completion."""

    model: str = ""
    """`run@step`, the job's name, or a checkpoint path."""
    scores: list[PromptScore] = Field(default_factory=list[PromptScore])
    """Prompt log-probs, if requested; before the last part."""
    vocabulary: str = ""
    """Digest of the vocabulary, with `scores`; equal for equal tokenizers."""
    max_context: int = 0
    """Most tokens of prompt and answer; in the first part with content."""
    bounded_tokens: int | None = None
    """Longest answer, if less than was asked for fits behind the prompt; in the first part."""
    without_effect: list[Literal["effort", "thinks"]] = Field(
        default_factory=list[Literal["effort", "thinks"]]
    )
    """Options that the chat template has no variable for; in the first part."""


class PlayRequest(Message):
    """Play one episode with the training code, on `infer.play`.

    A limit that is null is that of `rollout`.
    """

    request: RequestId
    """Id of the request, made by the caller, for cancelling."""
    session: str = Field(default="", max_length=64)
    """Session in which the caller hosts the game; empty: the job's environment hosts."""
    split: Split = "val"
    sample: int | None = None
    """Data row; null: generated state."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the game's random generator."""
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments for the game's `reset`."""
    temperature: float = Field(default=0.0, ge=0, le=MAX_TEMPERATURE)
    """0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    max_turns: int | None = Field(default=None, ge=1, lt=2**31)
    max_prompt_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_turn_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    max_response_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    """Tokens after the first prompt, observations included."""
    deadline_s: float = Field(default=3600.0, gt=0, le=MAX_DEADLINE_S)
    """Time limit of the episode with all tries."""


class PlayPart(Part):
    """Answer to a play request: parts without content, then one with the episode."""

    model: str = ""
    """`run@step`, or the job's name."""
    trajectory: Trajectory | None = None
    """The episode, with messages and token ids."""
    blame: Blame | None = None
    """Failure of the last try."""


class CancelInference(Message):
    """Cancel the rest of an answer, on `infer.cancel`, which all servers get."""

    request: str
