"""How a program has ended, and whether that counts.

A program that has not called the model has nothing to be trained from. One that crashed is tried
again, and so is, once, one that was stuck; the last try counts as it is, as does what the model's
own limits have ended.
"""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from ....schemas.config.agent import AgentConfig
from ....schemas.wire.errors import GameError
from ..episode import NoCalls, Outcome, ProgramEpisode

How: TypeAlias = Literal["exit", "said", "timeout", "stuck", "memory", "disk"]
"""By itself, after it said so, or by a limit."""
_FAILED = ("failed", "timeout", "stuck", "crash")
_SHOWN_CHARS = 1000


class ProgramCrashed(GameError):
    """A program that ended with an error, or hung, after it had called the model."""

    code: ClassVar[str] = "program_crashed"


@dataclass(frozen=True)
class Ending:
    """How a program ended."""

    how: How
    exit_code: int
    printed: str
    """The end of what it printed."""


def outcome_of(ending: Ending, episode: ProgramEpisode) -> Outcome:
    """Return what an ending is called."""
    if ending.how in ("timeout", "stuck"):
        return ending.how
    if episode.status:
        return episode.status
    return "done" if ending.how == "exit" and ending.exit_code == 0 else "crash"


def earns_failed_reward(outcome: Outcome) -> bool:
    """Whether an episode that ended so has a reward though nobody gives it one."""
    return outcome in _FAILED


def check_counts(
    ending: Ending, episode: ProgramEpisode, config: AgentConfig, max_tries: int
) -> Outcome:
    """Return the outcome of an episode that counts.

    Raises NoCalls, and ProgramCrashed for one that is to be tried again.
    """
    outcome = outcome_of(ending, episode)
    if not episode.num_calls:
        raise NoCalls(
            f"the program {_described(ending, config)} without one answered call of the model",
            hint=f"{_last_words(ending)}; it finds the model by OPENAI_BASE_URL, OPENAI_API_KEY, "
            "ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY",
        )
    tries = try_number(episode.episode)
    again = {"crash": tries < max_tries, "stuck": tries == 1 < max_tries}.get(outcome, False)
    if again and config.on_crash == "retry" and not episode.limit:
        raise ProgramCrashed(
            f"the program {_described(ending, config)} after {episode.num_calls} calls",
            hint=f"{_last_words(ending)}; the last of rollout.max_tries={max_tries} tries counts, "
            "each with agent.on_crash=score",
        )
    return outcome


def try_number(episode: str) -> int:
    """Return which try of an episode an id stands for: they end with `-<n>`; others are the first.

    A try that was lost with its host is counted, too: the one that counts may come a try sooner.
    """
    found = re.search(r"-(\d{1,6})\Z", episode)
    return int(found[1]) if found else 1


def _described(ending: Ending, config: AgentConfig) -> str:
    words = {
        "said": "said that it had ended",
        "timeout": f"ran out of time (agent.timeout_s={config.timeout_s:g})",
        "stuck": f"made no call for agent.idle_s={config.idle_s:g} s",
        "memory": f"held more than agent.memory_mb={config.memory_mb}",
        "disk": f"wrote more than agent.disk_mb={config.disk_mb}",
    }
    return words.get(ending.how, f"exited with code {ending.exit_code}")


def _last_words(ending: Ending) -> str:
    said = ending.printed.strip()[-_SHOWN_CHARS:]
    return f"it printed at last: {said}" if said else "it printed nothing"
