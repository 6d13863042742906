"""Generated text: the fields of every request for it, and of every part of its answer.

A chat or completion of a served model (`infer.py`) and a model call of an agent program
(`agent.py`) are such requests. They have the same messages, the same decoding options and the same
stream of deltas.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field

from .output_format import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_TOP_LOGPROBS,
    OutputFormat,
)
from .wire.message import Message, Part

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_NAMED_TOKENS = 4096
"""Tokens of a bias, or allowed ones, of one request."""
MAX_BAD_WORDS = 128
MAX_WORD_CHARS = 256
MAX_TEMPERATURE = 100.0
MAX_COUNT = 2**31
MAX_SEED = 2**63
TokenId = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
TokenText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
"""A token's id as the key of a map."""
RequestId = Annotated[str, Field(min_length=1, max_length=64)]

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_p",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
"""Sampling options, by the name that they have in every API and in `Decoding`."""
EPISODE_SAMPLING = SAMPLING[:7]
"""Those that an episode may take from its program. The others draw from a distribution that the
learner does not compute: only served models have them."""


class Decoding(Message):
    """Decoding options of one request."""

    max_tokens: int | None = Field(default=None, ge=0, lt=MAX_COUNT)
    """Longest answer; null: as the context allows; 0: only prompt log-probs."""
    temperature: float | None = Field(default=None, ge=0, le=MAX_TEMPERATURE)
    """0: greedy; null: 1, or the job's in an episode."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling; null: 1, or the job's in an episode."""
    top_k: int | None = Field(default=None, ge=0, lt=MAX_COUNT)
    """Likeliest tokens to keep; 0: all; null: all, or the job's in an episode."""
    stop: list[str] = Field(default_factory=list[str], max_length=MAX_STOPS)
    """Texts that end an answer and are not part of it."""
    seed: int | None = Field(default=None, ge=0, lt=MAX_SEED)
    """Seed of sampling; null: random. In an episode it has no effect."""
    num_choices: int = Field(default=1, ge=1, le=MAX_CHOICES)
    presence_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    """Subtracted from the logits of the answer's tokens."""
    frequency_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    """Subtracted likewise, times the number of occurrences in the answer."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=MAX_REPETITION)
    """Divides positive logits of tokens in prompt and answer, multiplies negative ones."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Keep tokens with this share of the likeliest one's probability. This option and the next six
    are for served models only."""
    min_tokens: int = Field(default=0, ge=0, lt=MAX_COUNT)
    """The answer ends, or stops at a text, after so many tokens at the earliest."""
    ignore_eos: bool = False
    """What ends the model's turns does not end the answer."""
    stop_token_ids: list[TokenId] = Field(default_factory=list[TokenId], max_length=MAX_STOPS * 4)
    """Further tokens that end the answer, and have no text in it."""
    logit_bias: dict[TokenText, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] = Field(
        default_factory=dict[str, float], max_length=MAX_NAMED_TOKENS
    )
    """Added to the logits of tokens, by id."""
    allowed_token_ids: list[TokenId] = Field(
        default_factory=list[TokenId], max_length=MAX_NAMED_TOKENS
    )
    """The only tokens that are drawn; empty: all."""
    bad_words: list[Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]] = Field(
        default_factory=list[str], max_length=MAX_BAD_WORDS
    )
    """Texts whose last token is not drawn after their others, with and without a space before."""
    format: OutputFormat | None = None
    """Required form of the answer."""
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    """Number of likeliest tokens to return at each position, with `logprobs`."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling options that differ from their defaults."""
        values = {name: getattr(self, name) for name in SAMPLING}
        return {
            name: value
            for name, value in values.items()
            if value != Decoding.model_fields[name].get_default(call_default_factory=True)
        }


class TextRequest(Message):
    """Fields of every request for generated text."""

    request: RequestId
    """Id of the request, made by the caller, for cancelling."""
    decoding: Decoding = Field(default_factory=Decoding)
    stream: bool = False
    logprobs: bool = False
    """Return each token's text and log-prob."""
    token_ids: bool = False
    """Return the prompt's token ids."""
    count_only: bool = False
    """Only return the number of the prompt's tokens, and what else is asked of the prompt."""


TOKEN_COLUMNS = (
    "token_ids",
    "logprobs",
    "versions",
    "tokens",
    "token_bytes",
    "top_tokens",
    "top_logprobs",
    "top_bytes",
)
"""Columns of a delta: each has one value per token, or is empty."""


class Delta(Message):
    """What one choice of an answer has gained since the previous part."""

    choice: int = Field(ge=0)
    """Number of the choice: prompt · `num_choices` + number within the prompt."""
    text: str = ""
    token_ids: list[int] = Field(default_factory=list[int])
    """New tokens; their last text may follow in a later part. Empty for a repeated prompt, whose
    first log-prob is NaN."""
    logprobs: list[float] = Field(default_factory=list[float])
    """Log-probs before penalties, form, top-p and top-k, if requested; always in an episode."""
    versions: list[int] = Field(default_factory=list[int])
    """Policy version of each new token, in an episode."""
    tokens: list[str] = Field(default_factory=list[str])
    """Texts of the new tokens, with `logprobs`."""
    token_bytes: list[bytes] = Field(default_factory=list[bytes])
    """Bytes of the new tokens, perhaps parts of characters; empty for what ends a turn."""
    top_tokens: list[list[str]] = Field(default_factory=list[list[str]])
    """Texts of the likeliest tokens at each position, best first, if requested."""
    top_logprobs: list[list[float]] = Field(default_factory=list[list[float]])
    """Log-probs of these likeliest tokens."""
    top_bytes: list[list[bytes]] = Field(default_factory=list[list[bytes]])
    """Bytes of these likeliest tokens."""
    finish: Literal["stop", "length", "cancelled"] | None = None
    """Why the choice ended; null: not yet."""
    stop: str | int = ""
    """The stop text, or the token of `stop_token_ids`, that ended it."""

    def of_tokens(self, start: int, end: int | None = None, **fields: Any) -> Self:
        """Return the delta of its tokens from `start` to `end`, with other `fields` replaced."""
        columns = {name: getattr(self, name)[start:end] for name in TOKEN_COLUMNS}
        return self.model_copy(update={**columns, **fields})

    def extended(self, later: Self) -> Self:
        """Return the delta joined with the next one; its columns are extended in place."""
        for name in TOKEN_COLUMNS:
            getattr(self, name).extend(getattr(later, name))
        finish = later if later.finish is not None else self
        update = {"text": self.text + later.text, "finish": finish.finish, "stop": finish.stop}
        return self.model_copy(update=update)


class TextPart(Part):
    """Part of the answer to a request for generated text."""

    deltas: list[Delta] = Field(default_factory=list[Delta])
    prompt_tokens: int = 0
    """Tokens of all prompts; in the first part with content."""
    prompt_token_ids: list[list[int]] = Field(default_factory=list[list[int]])
    """Token ids of each prompt, if requested; in the first part with content."""
    opened: str = ""
    """The mark with which the prompt opened the reasoning, which the text follows; in the first
    part with content."""
