"""Configuration of episodes: number, sampling, and length."""

from pydantic import Field

from .section import Section

MAX_EPISODES = 4096
"""Largest group size."""


class RolloutConfig(Section):
    """How episodes are generated."""

    group_size: int = Field(default=8, ge=1, le=MAX_EPISODES)
    """Episodes per task."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature, also for the learner's log-probs."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; log-probs are recorded before it."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0: all."""
    max_turns: int = Field(default=1, ge=1)
    """Policy turns per episode."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """A task with a longer first prompt fails."""
    max_turn_tokens: int = Field(default=512, ge=1)
    """Generated tokens per turn."""
    max_response_tokens: int = Field(default=2048, ge=1)
    """Tokens after the first prompt, observations included."""
    max_tries: int = Field(default=3, ge=1, le=100)
    """Tries of an episode before its task fails."""
    oversample: int = Field(default=0, ge=0)
    """Episodes started beyond `group_size`: the first `group_size` to end are the group, the others
    are cut. This favours short episodes, measured by `rollout/oversample/*`."""

    @property
    def response_limit(self) -> int:
        """Tokens after the first prompt at which an episode is cut."""
        return self.max_turn_tokens if self.max_turns == 1 else self.max_response_tokens

    @property
    def max_tokens(self) -> int:
        """Longest whole sequence: prompt and response."""
        return self.max_prompt_tokens + self.max_response_tokens
