"""Asking the teachers of a run, before a group enters the log: what they say stands in it.

So a run is a function of its log although its teachers are elsewhere, and one that is away is
waited for by the generator that holds the task, which says so, while its other tasks go on.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from ....schemas.config.algorithms.teacher import endpoint, served_job
from ....schemas.rollout import Group, Trajectory
from ....schemas.teaching import Teaching
from ....schemas.wire.subjects import JobScope
from ...runtime import JobContext
from ..engine.engine import IntVector, PromptScores
from ..episodes.chat import ChatTokenizer
from .sources import EndpointTeacher, JobTeacher, Teacher, TeacherAway

_AT_ONCE = 32
"""Episodes that one generator has scored at the same time."""
_FIRST_S, _LONGEST_S = 0.5, 20.0
"""Pauses between two tries."""


class AskedTeachers:
    """The teachers of a run that generators ask; none, mostly."""

    def __init__(self, context: JobContext, chat: ChatTokenizer) -> None:
        """Raises ConfigError for what a teacher needs and is not installed."""
        algorithm = context.config.algorithm
        self._context = context
        self._top_k = algorithm.teacher_top_k if algorithm.teacher_loss == "forward_kl" else 0
        self._loaded = frozenset(algorithm.teachers) - frozenset(algorithm.asked_teachers)
        names = dict.fromkeys(algorithm.asked_teachers.values())
        by_name = {name: _open(name, context, chat) for name in names}
        self._of_source = {s: (name, by_name[name]) for s, name in algorithm.asked_teachers.items()}
        self._all = list(by_name.values())
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._away: dict[str, float] = {}

    async def teach(self, group: Group) -> Group:
        """Return a group with what its teachers say; waits for those that are away.

        Raises ConfigError for a teacher that cannot teach this policy.
        """
        if not self._of_source:
            return group
        taught = await asyncio.gather(*(self._taught(item) for item in group.trajectories))
        return group.model_copy(update={"trajectories": list(taught)})

    async def _taught(self, item: Trajectory) -> Trajectory:
        named = self._teacher_of(item.data_source)
        if named is None or item.greedy:
            return item
        teaching = item.teaching or Teaching()
        ids, places = _read_by_teacher(item, teaching.prompt)
        async with self._places:
            scores = await self._ask(*named, ids)
        told = {
            "logprobs": scores.logprobs[places],
            **(
                {"top_ids": scores.top_ids[places], "top_logprobs": scores.top_logprobs[places]}
                if self._top_k
                else {}
            ),
        }
        return item.model_copy(update={"teaching": teaching.model_copy(update=told)})

    def _teacher_of(self, source: str) -> tuple[str, Teacher] | None:
        if source in self._loaded:
            return None
        return self._of_source.get(source, self._of_source.get(""))

    async def _ask(self, name: str, teacher: Teacher, ids: IntVector) -> PromptScores:
        pause_s, since = _FIRST_S, 0.0
        while True:
            try:
                scores = await teacher.score(ids, self._top_k)
            except TeacherAway as away:
                since = since or time.time()
                await self._tell_away(name, away)
                with self._context.missing(f"the teacher {name}: {away.message[:200]}", since):
                    await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)
            else:
                await self._tell_back(name)
                return scores

    async def _tell_away(self, name: str, away: TeacherAway) -> None:
        """Say once that a teacher does not answer, however many episodes wait for it."""
        if name not in self._away:
            self._away[name] = time.time()
            await self._context.event("teacher_away", f"the teacher {name}: {away}")

    async def _tell_back(self, name: str) -> None:
        if (since := self._away.pop(name, None)) is not None:
            away_s = time.time() - since
            await self._context.event("teacher_back", f"the teacher {name}, after {away_s:.0f} s")

    async def close(self) -> None:
        """Let go of all connections."""
        for teacher in self._all:
            await teacher.close()


def _open(name: str, context: JobContext, chat: ChatTokenizer) -> Teacher:
    job = served_job(name)
    if job is None:
        return EndpointTeacher(*endpoint(name), chat)
    scope = JobScope(context.scope.user, context.record.teachers.get(name, job))
    return JobTeacher(name, context.broker, scope, chat)


def _read_by_teacher(item: Trajectory, prompt: IntVector | None) -> tuple[IntVector, Sequence[int]]:
    """Return the tokens that a teacher reads, and the places of the generated ones among them."""
    generated = np.flatnonzero(item.mask)
    end = int(generated[-1]) + 1
    if prompt is None:
        return item.token_ids[:end], generated.tolist()
    first = int(generated[0])
    ids = np.concatenate([prompt, item.token_ids[first:end]]).astype(np.int32)
    return ids, (generated - first + len(prompt)).tolist()
