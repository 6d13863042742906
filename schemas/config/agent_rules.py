"""Options that agent programs exclude.

A program's episode is a tree of calls, and its rows are paths of that tree. Baselines, sequence
means and training count episodes, whatever their number of rows; per-turn values follow the calls.
Options that need one row per episode are refused.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .algorithms.corrections import OF_WHOLE_SEQUENCES
from .algorithms.losses import LOSSES_OF_SEQUENCES
from .section import Rule

if TYPE_CHECKING:
    from .job import JobConfig

_BY_CALL = ("gae", "gigpo", "grpo_per_turn", "reinforce_pp")

_ROWS = (
    Rule(
        "algorithm.loss={algorithm.loss}",
        lambda job: job.algorithm.loss in LOSSES_OF_SEQUENCES,
        "weighs a sequence as a whole, and an agent's episode has several: choose another loss",
    ),
    Rule(
        "algorithm.advantage=grpo_per_step",
        lambda job: job.algorithm.advantage == "grpo_per_step",
        "follows one turn after the other, and those of an agent's episode stand in branches: "
        "choose grpo_per_turn, which compares calls of the same place",
    ),
    Rule(
        "algorithm.correction={algorithm.correction}",
        lambda job: job.algorithm.correction in OF_WHOLE_SEQUENCES,
        "keeps or drops a sequence as a whole, and an agent's episode has several: choose tis, "
        "icepop, decoupled or m2po",
    ),
    Rule(
        "algorithm.correction_masks",
        lambda job: any(mask.over != "token" for mask in job.algorithm.correction_masks),
        "keep or drop a sequence as a whole, and an agent's episode has several: set over: token",
    ),
    Rule(
        "algorithm.correction_level=sequence",
        lambda job: (
            job.algorithm.correction == "tis" and job.algorithm.correction_level == "sequence"
        ),
        "weighs a sequence as a whole, and an agent's episode has several: set "
        "algorithm.correction_level=token",
    ),
    Rule(
        "algorithm.sample=turn",
        lambda job: job.algorithm.sample == "turn",
        "compares turns of the same number, and those of an agent's episodes stand in branches: "
        "set algorithm.sample=episode",
    ),
    Rule(
        "algorithm.overlong_buffer",
        lambda job: job.algorithm.overlong_buffer,
        "takes a sequence's length for the episode's, and an agent's episode has several: remove "
        "it, or bound episodes by agent.max_tokens",
    ),
    Rule(
        "algorithm.length_coef",
        lambda job: job.algorithm.length_coef,
        "compares sequences' lengths as those of episodes, and an agent's episode has several: "
        "remove it",
    ),
)


def _of_programs(when: "Callable[[JobConfig], Any]") -> "Callable[[JobConfig], Any]":
    return lambda job: job.agent.runs_programs and when(job)


_BRANCHES = "algorithm.branch_credit={algorithm.branch_credit}"

AGENT_RULES = (
    *(replace(rule, when=_of_programs(rule.when)) for rule in _ROWS),
    Rule(
        _BRANCHES,
        lambda job: job.algorithm.branch_credit != "episode" and not job.agent.runs_programs,
        "credits branches of agent programs, and this job runs none: remove it",
    ),
    Rule(
        _BRANCHES,
        lambda job: job.algorithm.branch_credit != "episode" and job.algorithm.advantage == "remax",
        "compares branches with those of their role, and remax with a greedy episode, which need "
        "not have one: choose another advantage, such as grpo",
    ),
    Rule(
        _BRANCHES,
        lambda job: job.algorithm.branch_credit == "both" and job.algorithm.advantage == "gae",
        "adds two advantages, and the critic of gae learns what one is compared with: set "
        "algorithm.branch_credit=own or episode",
    ),
    Rule(
        _BRANCHES,
        lambda job: job.algorithm.branch_credit != "episode" and job.algorithm.filter_equal_rewards,
        "lets branches differ where episodes do not, and algorithm.filter_equal_rewards drops "
        "groups by the rewards of episodes: remove one of them",
    ),
    Rule(
        "policies",
        _of_programs(lambda job: job.policies),
        "are those of a game's roles, and an agent program has none: remove them",
    ),
    Rule(
        "self_play.past_share",
        _of_programs(lambda job: job.self_play.past_share),
        "is for games with roles, and an agent program has none: remove it",
    ),
    Rule(
        "rollout.oversample",
        _of_programs(lambda job: job.rollout.oversample),
        "cuts the longest episodes of a task, which is not built for agent programs: remove it",
    ),
    Rule(
        "generator.segment_tokens",
        _of_programs(lambda job: job.generator.segment_tokens),
        "has no effect in an agent job, where each call is written down: remove it",
    ),
    Rule(
        "env.reward.source={env.reward.source}",
        _of_programs(lambda job: job.env.reward.source != "game"),
        "asks for the rewards of games, and an agent program's come from agent.reward or from "
        "what it posts itself: remove env.reward",
    ),
)


_WITHOUT_PLACES = Rule(
    "algorithm.advantage={algorithm.advantage}",
    lambda job: job.algorithm.advantage in _BY_CALL and not job.agent.runs_programs,
    "follows rewards from turn to turn, and only in an agent job rows say which call led to which: "
    "choose an advantage of whole episodes, such as grpo, rloo or reinforce_pp_baseline",
)


def why_no_rows(job: "JobConfig") -> str | None:
    """Return why a job cannot train episodes of several rows; None: it can."""
    rules = (*_ROWS, _WITHOUT_PLACES)
    return next((rule.sentence(job) for rule in rules if rule.when(job)), None)
