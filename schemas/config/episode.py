"""The configuration of episodes: how many, how they are sampled, and how long they may get."""

from pydantic import Field

from .section import Section

MAX_EPISODES = 4096
"""Episodes of one task."""


class RolloutConfig(Section):
    """How episodes are generated."""

    group_size: int = Field(default=8, ge=1, le=MAX_EPISODES)
    """Episodes per task."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the learner computes log-probs at the same."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; log-probs are recorded before it."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0: all."""
    max_turns: int = Field(default=1, ge=1)
    """Answers of the policy per episode; each one reaches the game."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """A first prompt longer than this fails its task."""
    max_turn_tokens: int = Field(default=512, ge=1)
    """Tokens the policy may generate in one turn; binds at generation."""
    max_response_tokens: int = Field(default=2048, ge=1)
    """Tokens after the first prompt, observations included; binds at generation."""
    max_tries: int = Field(default=3, ge=1, le=100)
    """Tries of one episode before its task is given up."""
    oversample: int = Field(default=0, ge=0)
    """Episodes of a task that are started beyond `group_size`: the first `group_size` to end are
    its group, the others are cut. This favours short episodes; `rollout/oversample/*` tells by how
    much."""

    @property
    def response_limit(self) -> int:
        """Tokens behind the first prompt at which an episode is cut."""
        return self.max_turn_tokens if self.max_turns == 1 else self.max_response_tokens

    @property
    def max_tokens(self) -> int:
        """Longest whole sequence: prompt and response."""
        return self.max_prompt_tokens + self.max_response_tokens
