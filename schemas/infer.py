"""Inference: chats, completions, and episodes of a game."""

from typing import Annotated, Any, Literal

from pydantic import Field

from .env import Split
from .output_format import MAX_PENALTY, MAX_REPETITION, MAX_TOP_LOGPROBS, OutputFormat
from .rollout import Trajectory
from .task import Blame
from .wire.array import FloatMatrix, FloatVector, IntMatrix
from .wire.bounds import MAX_TOP_K
from .wire.message import Message, Part

MAX_DEADLINE_S = 7200.0
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TEMPERATURE = 100.0
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
RequestId = Annotated[str, Field(min_length=1, max_length=64)]


class Decoding(Message):
    """Sampling options of one request."""

    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    """null: as the context allows; 0: only prompt log-probs."""
    temperature: float = Field(default=1.0, ge=0, le=MAX_TEMPERATURE)
    """0: greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Likeliest tokens to keep; 0: all."""
    stop: list[str] = Field(default_factory=list[str], max_length=MAX_STOPS)
    """Texts that end an answer; not part of it."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Seed of sampling; null: random."""
    num_choices: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Answers per prompt."""
    presence_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    """Subtracted from the logits of the answer's tokens."""
    frequency_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    """The same, times their number in the answer."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=MAX_REPETITION)
    """Divides positive logits of tokens in prompt and answer, multiplies negative ones."""
    format: OutputFormat | None = None
    """Required form of the answer."""
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    """With `logprobs`: so many of the likeliest tokens at each position."""


class ChatRequest(Message):
    """Continue a conversation, on `infer.chat`; parts come until the last one."""

    request: RequestId
    """Made by the caller, for cancelling."""
    adapter: str = ""
    """One of the job's adapters, as `run@step`; empty: its main model. Of a Tinker service: a
    checkpoint, `tinker://…`."""
    messages: list[dict[str, Any]] = Field(min_length=1)
    """Chat messages."""
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """As the chat template takes them."""
    decoding: Decoding = Field(default_factory=Decoding)
    stream: bool = False
    """Stream tokens."""
    logprobs: bool = False
    """Return each token's text and log-prob."""
    token_ids: bool = False
    """Return the prompt's token ids."""
    deadline_s: float = Field(default=600.0, gt=0, le=MAX_DEADLINE_S)
    """Longest duration of the answer."""


class CompletionRequest(Message):
    """Continue texts without a chat template, on `infer.complete`."""

    request: RequestId
    """Made by the caller, for cancelling."""
    adapter: str = ""
    """One of the job's adapters, as `run@step`; empty: its main model. Of a Tinker service: a
    checkpoint, `tinker://…`."""
    prompts: list[str | list[TokenId]] = Field(min_length=1, max_length=1024)
    """Texts or token ids."""
    add_special_tokens: bool = True
    """To texts, by the tokenizer."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_K)
    """Return the prompts' log-probs at temperature 1, and so many of the likeliest tokens at each
    position; null: neither."""
    decoding: Decoding = Field(default_factory=Decoding)
    stream: bool = False
    """Stream tokens."""
    logprobs: bool = False
    """Return each token's text and log-prob."""
    token_ids: bool = False
    """Return the prompt's token ids."""
    deadline_s: float = Field(default=600.0, gt=0, le=MAX_DEADLINE_S)
    """Longest duration of the answer."""


class Delta(Message):
    """What one choice has gained since the previous part."""

    choice: int = Field(ge=0)
    """Prompt · `num_choices` + number within the prompt."""
    text: str = ""
    token_ids: list[int] = Field(default_factory=list[int])
    """New tokens; their last text may follow in a later part."""
    tokens: list[str] = Field(default_factory=list[str])
    """Their texts, with `logprobs`."""
    token_bytes: list[bytes] = Field(default_factory=list[bytes])
    """Their bytes, which may be part of a character; empty for what ends a turn."""
    logprobs: list[float] = Field(default_factory=list[float])
    """Log-probs before penalties, form, top-p and top-k, if requested."""
    top_tokens: list[list[str]] = Field(default_factory=list[list[str]])
    """Texts of the likeliest tokens at each position, best first, if requested."""
    top_logprobs: list[list[float]] = Field(default_factory=list[list[float]])
    """Their log-probs."""
    top_bytes: list[list[bytes]] = Field(default_factory=list[list[bytes]])
    """Their bytes."""
    finish: Literal["stop", "length", "cancelled"] | None = None
    """Why the choice ended; null: not yet."""
    stop: str = ""
    """The stop text that ended it."""


class PromptScore(Message):
    """Log-probs of N successive tokens of a prompt, at temperature 1."""

    prompt: int = Field(ge=0)
    start: int = Field(ge=0)
    """Position of the first of them."""
    logprobs: FloatVector
    """float32[N]: log-probs; NaN for a prompt's first token."""
    top_ids: IntMatrix
    """int32[N, K]: likeliest tokens at each position, best first."""
    top_logprobs: FloatMatrix
    """float32[N, K]: their log-probs."""


class InferPart(Part):
    """Part of the answer to a chat or completion."""

    model: str = ""
    """`run@step`, the job's name, or a checkpoint path."""
    deltas: list[Delta] = Field(default_factory=list[Delta])
    prompt_tokens: int = 0
    """In the first part with content and in the last."""
    completion_tokens: int = 0
    """Of all choices; in the last part."""
    prompt_token_ids: list[list[int]] = Field(default_factory=list[list[int]])
    """Of each prompt, if requested; in the first part with content."""
    scores: list[PromptScore] = Field(default_factory=list[PromptScore])
    """Prompt log-probs, if requested; before the last part."""
    vocabulary: str = ""
    """Digest, with `scores`: equal for equal tokenizers."""
    is_thinking: bool = False
    """The prompt has opened the reasoning."""


class PlayRequest(Message):
    """Play one episode with the training code, on `infer.play`.

    A limit that is null is that of `rollout`.
    """

    request: RequestId
    """Made by the caller, for cancelling."""
    session: str = Field(default="", max_length=64)
    """In which the caller hosts the game; empty: the job's environment hosts."""
    split: Split = "val"
    """Data set of the sample."""
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
    """Largest number of turns."""
    max_prompt_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    """Longest first prompt."""
    max_turn_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    """Generated tokens per turn."""
    max_response_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    """After the first prompt, observations included."""
    deadline_s: float = Field(default=3600.0, gt=0, le=MAX_DEADLINE_S)
    """Of the episode with all tries."""


class PlayPart(Part):
    """Answer to a play request: parts without content, then one with the episode."""

    model: str = ""
    """`run@step`, or the job's name."""
    trajectory: Trajectory | None = None
    """With messages and token ids."""
    blame: Blame | None = None
    """Failure of the last try."""


class CancelInference(Message):
    """Cancel the rest of an answer, on `infer.cancel`, which all servers get."""

    request: str
