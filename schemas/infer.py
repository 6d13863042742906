"""What inference servers are asked: chats, completions, and whole episodes of a game."""

from typing import Annotated, Any, Literal

from pydantic import Field

from .bounds.defaults import MAX_TOP_K
from .env import Split
from .output_format import MAX_PENALTY, MAX_REPETITION, MAX_TOP_LOGPROBS, OutputFormat
from .rollout import Trajectory
from .task import Blame
from .wire.array import FloatMatrix, FloatVector, IntMatrix
from .wire.message import Message
from .wire.reply import Part

MAX_DEADLINE_S = 7200.0
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TEMPERATURE = 100.0
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
RequestId = Annotated[str, Field(min_length=1, max_length=64)]


class Decoding(Message):
    """How the tokens of one request are drawn."""

    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    """Tokens generated at most; None: as many as the context holds; 0: none, where log-probs of
    prompts alone are wanted."""
    temperature: float = Field(default=1.0, ge=0, le=MAX_TEMPERATURE)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Keep the k likeliest tokens; 0: all."""
    stop: list[str] = Field(default_factory=list[str], max_length=MAX_STOPS)
    """Texts at which generation ends; they are not part of the answer."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """The same seed draws the same tokens; None: fresh ones."""
    num_choices: int = Field(default=1, ge=1, le=MAX_CHOICES)
    """Answers to each prompt."""
    presence_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    """Taken from the logit of each token that the answer has already."""
    frequency_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    """Taken from the logit of each token as often as the answer has it."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=MAX_REPETITION)
    """Divides positive logits of tokens of the prompt and the answer, multiplies negative ones."""
    format: OutputFormat | None = None
    """The form that the answer must have; None: any."""
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    """With `logprobs`: tell so many of the likeliest tokens in the place of each."""


class ChatRequest(Message):
    """Continue a conversation, on `infer.chat`; parts come until the last one."""

    request: RequestId
    """Id made by the caller, by which it can be cancelled."""
    adapter: str = ""
    """Which of the job's further adapters answers, as `run@step`; empty: what it serves first.
    For the samplers of a Tinker service: the path of a checkpoint, `tinker://…`."""
    messages: list[dict[str, Any]] = Field(min_length=1)
    """Chat messages; the model's chat template renders them."""
    tools: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])
    """Tools, as the chat template takes them."""
    decoding: Decoding = Field(default_factory=Decoding)
    """How tokens are drawn."""
    stream: bool = False
    """Tell tokens as they are generated, instead of all at the end."""
    logprobs: bool = False
    """Tell the text and the log-prob of each token as well."""
    token_ids: bool = False
    """Tell the tokens of the prompt as well."""
    deadline_s: float = Field(default=600.0, gt=0, le=MAX_DEADLINE_S)
    """Longest time that the answer may take."""


class CompletionRequest(Message):
    """Continue texts as they are, without a chat template, on `infer.complete`."""

    request: RequestId
    """Id made by the caller, by which it can be cancelled."""
    adapter: str = ""
    """Which of the job's further adapters answers, as `run@step`; empty: what it serves first.
    For the samplers of a Tinker service: the path of a checkpoint, `tinker://…`."""
    prompts: list[str | list[TokenId]] = Field(min_length=1, max_length=1024)
    """Texts, or token ids."""
    add_special_tokens: bool = True
    """Whether texts get what the tokenizer puts around them, such as a token that begins them."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_K)
    """Tell the log-prob of each token of the prompts, and so many of the likeliest in its place, at
    temperature 1; None: neither."""
    decoding: Decoding = Field(default_factory=Decoding)
    """How tokens are drawn."""
    stream: bool = False
    """Tell tokens as they are generated, instead of all at the end."""
    logprobs: bool = False
    """Tell the text and the log-prob of each token as well."""
    token_ids: bool = False
    """Tell the tokens of the prompt as well."""
    deadline_s: float = Field(default=600.0, gt=0, le=MAX_DEADLINE_S)
    """Longest time that the answer may take."""


class Delta(Message):
    """What one choice has gained since the part before."""

    choice: int = Field(ge=0)
    """Number of the choice: prompt times `num_choices` plus the number within the prompt."""
    text: str = ""
    """New text."""
    token_ids: list[int] = Field(default_factory=list[int])
    """New tokens; the text of the newest may come with a later part."""
    tokens: list[str] = Field(default_factory=list[str])
    """Text of each new token by itself, where `logprobs` was asked for."""
    token_bytes: list[bytes] = Field(default_factory=list[bytes])
    """Bytes of each of them, which may be a part of a character; none for a special token."""
    logprobs: list[float] = Field(default_factory=list[float])
    """Log-prob of each new token before penalties, a format, top-p and top-k, where it was asked
    for."""
    top_tokens: list[list[str]] = Field(default_factory=list[list[str]])
    """Texts of the likeliest tokens in the place of each, best first, where asked for."""
    top_logprobs: list[list[float]] = Field(default_factory=list[list[float]])
    """Their log-probs."""
    top_bytes: list[list[bytes]] = Field(default_factory=list[list[bytes]])
    """Their bytes."""
    finish: Literal["stop", "length", "cancelled"] | None = None
    """Why the choice has ended, or None while it goes on."""
    stop: str = ""
    """The stop text that ended it; empty: none has."""


class PromptScore(Message):
    """Log-probs of successive tokens of a prompt, N of them, at temperature 1."""

    prompt: int = Field(ge=0)
    """Number of the prompt."""
    start: int = Field(ge=0)
    """Place of the first of them in the prompt."""
    logprobs: FloatVector
    """float32[N]: log-prob of each behind those before it; NaN for a prompt's first token."""
    top_ids: IntMatrix
    """int32[N, K]: the likeliest tokens in the place of each, best first."""
    top_logprobs: FloatMatrix
    """float32[N, K]: their log-probs."""


class InferPart(Part):
    """A piece of the answer to a chat or completion."""

    model: str = ""
    """What answers: `run@step`, the name of the job, or the path of a checkpoint."""
    deltas: list[Delta] = Field(default_factory=list[Delta])
    """What is new, by choice."""
    prompt_tokens: int = 0
    """Tokens of the prompts; in the first part that carries anything, and in the last."""
    completion_tokens: int = 0
    """Tokens generated for all choices; in the last part."""
    prompt_token_ids: list[list[int]] = Field(default_factory=list[list[int]])
    """Tokens of each prompt, where they were asked for; in the first part that carries anything."""
    scores: list[PromptScore] = Field(default_factory=list[PromptScore])
    """Log-probs of the prompts' tokens, where they were asked for; in parts before the last."""
    vocabulary: str = ""
    """Digest of all tokens that the model knows, with `scores`: equal for equal tokenizers."""
    is_thinking: bool = False
    """Whether the prompt has opened the reasoning of the answer; with `prompt_tokens`."""


class PlayRequest(Message):
    """Play one episode of a game with the code that training uses, on `infer.play`."""

    request: RequestId
    """Id made by the caller, by which it can be cancelled."""
    session: str = Field(default="", max_length=64)
    """Session in which the caller hosts the game; empty: the job's own environment hosts."""
    split: Split = "val"
    """Which data `sample` is a row of."""
    sample: int | None = None
    """Row of the data, or None for a game that generates its states."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the game's own random generator."""
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments of the game's `reset`."""
    temperature: float = Field(default=0.0, ge=0, le=MAX_TEMPERATURE)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Keep the k likeliest tokens; 0: all."""
    max_turns: int | None = Field(default=None, ge=1, lt=2**31)
    """Answers of the policy; None: as configured (`rollout`), as the three below."""
    max_prompt_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    """Longest first prompt."""
    max_turn_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    """Tokens that the policy may generate in one turn."""
    max_response_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    """Tokens after the first prompt, observations included."""
    deadline_s: float = Field(default=3600.0, gt=0, le=MAX_DEADLINE_S)
    """Longest time that the episode may take, all its tries together."""


class PlayPart(Part):
    """The answer to a play request: one part with the episode, after any number without."""

    model: str = ""
    """What played: `run@step`, or the name of the job."""
    trajectory: Trajectory | None = None
    """The episode, with its messages and token ids."""
    blame: Blame | None = None
    """Why there is no episode: what its last try failed of."""


class CancelInference(Message):
    """A caller does not want the rest of an answer, on `infer.cancel`, which all servers hear."""

    request: str
    """Id of the request."""
