"""Whatever befalls the calls of a program, it is told and trained what it would be undisturbed.

Hypothesis draws a program, and what happens to each of its calls: generators die, streams are cut,
answers and reports of their delivery are lost, requests are repeated, the program starts again.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tinkermq.actors.rollout.call_answers import CallAnswers
from tinkermq.actors.rollout.call_log import CallLog
from tinkermq.actors.rollout.call_tree import CallRow, rows_of
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.partial_rollouts import Fenced
from tinkermq.envs.agents.proxy.calls import GatheredAnswer
from tinkermq.schemas.agent import CallDelivered, CallPart, CallRequest
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.rollout.calls.asking import Asking, held, opened, request

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    # vLLM does not draw the rest of a cut answer as it would have been (docs/architecture.md).
    pytest.mark.parametrize("engine_kind", ["transformers"], indirect=True),
]


ROOM = 160
LONGEST = 7
"""Messages of a history that leave room for what is asked next."""
_tasks = count(100)


@dataclass(frozen=True)
class Step:
    """One call of a program, and what happens meanwhile."""

    move: str
    """new, on, again (the same request once more) or edit."""
    thread: int
    """Which of its conversations."""
    num_choices: int
    stream: bool
    events: Sequence[tuple[str, int]]
    """What happens, and after how many parts of the answer."""
    reported: bool
    """Whether the report of its delivery arrives."""
    starts_again: bool
    """Whether the program starts again behind it, on another host."""


EVENTS = (
    "die",  # the generator does; another one goes on behind what the proxy was told
    "die whole",  # it has written the whole answer down by then
    "cut",  # the connection breaks, and the proxy asks once more for what is lacking
    "marked",  # the same, and who asks has forgotten what it was told
    "late",  # the answer is whole and its end is lost
    "late, die",
    "unheard",  # nobody was there to hear it, and the program asks anew
)
STEPS = st.lists(
    st.builds(
        Step,
        move=st.sampled_from(("new", "on", "on", "on", "again", "edit")),
        thread=st.integers(0, 3),
        num_choices=st.sampled_from((1, 1, 1, 2)),
        stream=st.booleans(),
        events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 4)), max_size=2),
        reported=st.booleans(),
        starts_again=st.sampled_from((False, False, False, True)),
    ),
    min_size=2,
    max_size=7,
)


class Cut(Exception):
    """The connection has broken."""


@dataclass
class Proxied:
    """A program's calls on their way through a proxy to whoever plays the episode."""

    asking: Asking
    broker: Broker
    scope: JobScope
    task: int = field(default_factory=lambda: next(_tasks))
    holders: list[CallAnswers] = field(default_factory=list)
    logs: list[CallLog] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    """Numbers of the calls that the program has."""

    async def take_over(self) -> None:
        """Let the next generator hold the task; the one before does not know."""
        log = await opened(held(self.broker, self.scope, len(self.holders) + 1, self.task))
        if not log.episode:
            log.hold("e-1", "host", anew=True)
        self.logs.append(log)
        name = f"e{self.task}.{len(self.holders)}"
        self.holders.append(self.asking.calls(log, episode=name))

    async def ask(self, asked: CallRequest, events: Sequence[tuple[str, int]]) -> list[str]:
        """Return what each choice says in the end."""
        gathered = GatheredAnswer(asked.decoding.num_choices)
        name = f"r{next(_tasks)}"
        again = asked = asked.model_copy(update={"request": name})
        events = _possible(events)
        for attempt, (event, num_parts) in enumerate(events, 1):
            told = await self._until(event, num_parts, again, gathered)
            if told:
                break
            more = {"request": f"{name}-{attempt}", "begun": gathered.begun(), "is_retry": True}
            again = asked.model_copy(update=more)
            if event in ("marked", "unheard"):
                gathered = GatheredAnswer(asked.decoding.num_choices)
                name = f"r{next(_tasks)}"
                more = {"request": name, "is_retry": event == "marked"}
                again = asked = asked.model_copy(update=more)
        if not gathered.is_whole:
            await self._told(again, gathered, most=1 << 30)
        self.given += gathered.calls
        return [choice.text for choice in gathered.choices]

    async def _until(
        self, event: str, num_parts: int, asked: CallRequest, gathered: GatheredAnswer
    ) -> bool:
        """Ask until something happens; return whether the answer was there before."""
        if event.startswith("late"):
            await self._told(asked, GatheredAnswer(asked.decoding.num_choices), most=1 << 30)
        elif event == "unheard":
            heard = GatheredAnswer(asked.decoding.num_choices)
            await self._told(asked, heard, most=1 << 30)
            self._report(heard.calls, whole=False)
        else:
            try:
                await self._told(asked, gathered, most=num_parts)
                return True
            except Cut:
                if event == "die whole":
                    rest = {"request": f"{asked.request}-0", "begun": gathered.begun()}
                    again = asked.model_copy(update={**rest, "is_retry": True})
                    await self._told(
                        again, GatheredAnswer(asked.decoding.num_choices), most=1 << 30
                    )
        if "die" in event:
            await self.take_over()
        return False

    async def _told(self, asked: CallRequest, gathered: GatheredAnswer, most: int) -> None:
        """Take an answer; Cut behind so many parts of it."""
        num = 0

        async def tell(part: CallPart) -> None:
            nonlocal num
            if num >= most:
                raise Cut
            num += 1
            gathered.add(part)

        if not most:
            asking = asyncio.create_task(self.holders[-1].answer(asked, tell))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            raise Cut
        last = await self.holders[-1].answer(asked, tell)
        gathered.add(last.model_copy(update={"last": True}))

    def _report(self, calls: Sequence[int], *, whole: bool) -> None:
        self.holders[-1].note_delivered(CallDelivered(calls=list(calls), whole=whole))

    async def start_again(self) -> None:
        """Let the program begin anew on another host."""
        await self.holders[-1].start_again()
        self.logs[-1].hold(f"e-{len(self.given)}", "another", anew=True)
        self.given.clear()

    async def end(self) -> CallAnswers:
        """Report what the program has, and end; the others find out that they were overtaken."""
        self._report(self.given, whole=True)
        for holder in self.holders:
            await holder.close("its program has ended")
            if holder.failed.done():
                assert isinstance(holder.failed.exception(), Fenced)
        return self.holders[-1]


def _possible(events: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """Return events of one call that leave somebody who knows what became of it."""
    names = [event for event, _ in events]
    if "marked" in names:
        return [("marked", 1)]  # its proxy has died, and with it whatever else it knew
    if "unheard" in names:  # only the generator knows
        return events[: names.index("unheard") + 1]
    return events


async def play(steps: Sequence[Step], proxied: Proxied, *, disturbed: bool) -> list[list[str]]:
    """Play a program; return what it was told. It starts again once at most."""
    heard: list[list[str]] = []
    again = next((at for at, step in enumerate(steps) if step.starts_again), -1)
    if disturbed and again >= 0:
        before = await _play(steps[: again + 1], proxied, disturbed=True)
        await proxied.start_again()
        heard = await _play(steps, proxied, disturbed=True, quiet_until=again + 1)
        assert heard[: again + 1] == before, "what was told before is told again"
        return heard
    return await _play(steps, proxied, disturbed=disturbed)


async def _play(
    steps: Sequence[Step], proxied: Proxied, *, disturbed: bool, quiet_until: int = 0
) -> list[list[str]]:
    threads: list[list[str]] = []
    heard: list[list[str]] = []
    for number, step in enumerate(steps):
        history = _next_history(threads, step, number)
        asked = request(*history, num_choices=step.num_choices, stream=step.stream)
        disturb = disturbed and number >= quiet_until
        num_given = len(proxied.given)
        said = await proxied.ask(asked, step.events if disturb else ())
        if step.reported or not disturbed:
            proxied._report(proxied.given[num_given:], whole=True)
        heard.append(said)
        threads.append([*history, said[0]])
    return heard


def _next_history(threads: Sequence[list[str]], step: Step, number: int) -> list[str]:
    if step.move == "new" or not threads:
        return [f"t{number}"]
    thread = threads[step.thread % len(threads)]
    if step.move == "again" or len(thread) > LONGEST:
        return thread[:-1]
    if step.move == "edit":
        return [*thread[:-2], "else"]
    return [*thread, "on"]


def assert_equal(found: Sequence[CallRow], wanted: Sequence[CallRow]) -> None:
    """The rows are the same, token for token."""
    assert len(found) == len(wanted)
    for row, other in zip(found, wanted, strict=True):
        for column in ("token_ids", "mask", "versions", "turn_ends"):
            np.testing.assert_array_equal(getattr(row, column), getattr(other, column))
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-5)


async def assert_undisturbed(
    steps: Sequence[Step], asking: Asking, broker: Broker, scope: JobScope
) -> None:
    disturbed = Proxied(asking, broker, scope)
    await disturbed.take_over()
    alone = Proxied(asking, broker, scope)
    log = CallLog(f"5 {disturbed.task} 0")  # as the task has it; kept nowhere
    log.begin_try()
    alone.holders.append(asking.calls(log, episode=f"alone{disturbed.task}"))
    wanted = await play(steps, alone, disturbed=False)
    heard = await play(steps, disturbed, disturbed=True)
    assert heard == wanted
    undisturbed, played = await alone.end(), await disturbed.end()
    made = rows_of(played.tree, ROOM)
    assert_equal(made.rows, rows_of(undisturbed.tree, ROOM).rows)
    trained = Counter(number for row in made.rows for number in row.calls)
    assert trained == Counter(
        call.number for call in played.tree.calls if call.delivered and call.num_generated
    )
    assert sorted(set(disturbed.given)) == list(range(len(played.tree.calls)))
    restored = asking.calls(await opened(held(broker, scope, 99, disturbed.task)))
    assert [call.digest for call in restored.tree.calls] == [
        call.digest for call in played.tree.calls
    ], "all of it is in the log"
    await restored.close("")


def _property(num_examples: int, *, derandomize: bool) -> Callable[..., Any]:
    @settings(
        max_examples=num_examples,
        derandomize=derandomize,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],  # to shrink an example takes minutes
        print_blob=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    @given(steps=STEPS)
    async def check(steps: list[Step], asking: Asking, broker: Broker, recorded: JobScope) -> None:
        await assert_undisturbed(steps, asking, broker, recorded)

    return check


test_a_program_notices_nothing_and_is_trained_as_if_nothing_had_happened = _property(
    4, derandomize=True
)
test_nor_does_any_of_very_many = pytest.mark.long(
    pytest.mark.timeout(900)(_property(120, derandomize=False))
)
