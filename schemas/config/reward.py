"""Configuration of rewards besides the game's own."""

import string
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from ..wire.errors import ConfigError
from .section import Section, when

_REMOTE = ("endpoint", "judge")


class RewardConfig(Section):
    """Rewards besides the game's own, computed where the game is hosted. If a source fails, its
    episode fails and is retried."""

    source: Literal["game", "function", "endpoint", "judge"] = "game"
    """The game alone, a Python function, an HTTP endpoint, or a judge model."""
    per: Literal["episode", "turn"] = Field(
        default="episode", json_schema_extra=when("source", "function", *_REMOTE)
    )
    """Once at the end of the episode, or after every turn."""
    weight: float = Field(default=1.0, json_schema_extra=when("source", "function", *_REMOTE))
    """Factor of the source's reward."""
    game_weight: float = Field(default=0.0, json_schema_extra=when("source", "function", *_REMOTE))
    """Factor of the game's own rewards, which are added."""
    function: str | None = Field(default=None, json_schema_extra=when("source", "function"))
    """`package.module:function`, with verl's arguments: `data_source`, `solution_str`,
    `ground_truth`, `extra_info`, and `messages` and `info` if it takes them. Async functions share
    one event loop."""
    url: str | None = Field(
        default=None, pattern=r"^https?://", json_schema_extra=when("source", *_REMOTE)
    )
    """Endpoint that gets the same as JSON; for a judge the base URL of an OpenAI-compatible API."""
    key_variable: str | None = Field(default=None, json_schema_extra=when("url"))
    """Environment variable of the environment host with the key for `url`."""
    judge: str | None = Field(default=None, json_schema_extra=when("source", "judge"))
    """Inference job that judges, by id or name, through the broker; or the model's name at
    `url`."""
    judge_prompt: str | None = Field(
        default=None, max_length=64 << 10, json_schema_extra=when("source", "judge")
    )
    """The judge's prompt: `$question` is the first user message, `$answer` the policy's last,
    `$ground_truth` the row's, `$conversation` all, `$scale` the best score. Default: grade the
    answer. The reply must end with a line `Score: N`; `$form` is the sentence that demands it, and
    a prompt must contain one of the two."""
    judge_scale: float = Field(default=10.0, gt=0, json_schema_extra=when("source", "judge"))
    """Best score, which earns 1."""
    judge_tokens: int = Field(default=256, ge=1, json_schema_extra=when("source", "judge"))
    """Tokens of the judge's reply; a longer one is refused."""
    judge_request: dict[str, Any] = Field(
        default_factory=dict[str, Any], json_schema_extra=when("url")
    )
    """Further fields of requests to a judge at `url`, such as `reasoning_effort`; null removes one:
    `{max_tokens: null}`. An API that refuses `max_tokens` gets `max_completion_tokens`, one that
    refuses `temperature` none."""
    timeout_s: float = Field(
        default=60.0, gt=0, le=86_400, json_schema_extra=when("source", "function", *_REMOTE)
    )
    """Time limit of one reward, with all tries."""
    tries: int = Field(default=4, ge=1, le=100, json_schema_extra=when("source", *_REMOTE))
    """Tries while endpoint or judge is unreachable, busy or slow."""
    max_requests: int = Field(
        default=64, ge=1, le=4096, json_schema_extra=when("source", "function", *_REMOTE)
    )
    """Concurrent rewards per host."""

    @model_validator(mode="after")
    def _requests_of_judges_alone(self) -> Self:
        if self.judge_request and self.source != "judge":
            raise ValueError(
                f"judge_request has no effect while source is {self.source!r}: remove it"
            )
        return self


def check_judge_prompt(reward: RewardConfig) -> None:
    """Raise ConfigError for a judge's prompt that does not demand the score's form.

    Otherwise every episode would fail.
    """
    prompt = reward.judge_prompt
    if reward.source != "judge" or prompt is None:
        return
    names_form = "form" in string.Template(prompt).get_identifiers()
    if not names_form and "score:" not in prompt.lower():
        raise ConfigError(
            f"env.reward.judge_prompt does not say how the judge is to answer: {prompt[-100:]!r}",
            hint="a score is read from a last line `Score: N` and nothing else: end the prompt "
            "with $form, which stands for the sentence that demands it, or demand it yourself",
        )
