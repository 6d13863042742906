"""One episode of an agent program: answers its model calls and makes rows of them.

An environment host runs the program. The episode has one step, which ends when the program has
ended and its reward is known. Meanwhile its calls arrive on a subject of the episode. If the host
dies, the program starts again on another one, and its repeated requests get the earlier answers.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, cast

from ...broker.client.connection import Broker
from ...broker.client.parts import PartsService
from ...broker.client.rpc import Service
from ...broker.partial_rollouts import Fenced
from ...envs.agents.episode import NoCalls
from ...envs.game import StepResult
from ...envs.host import HostGone
from ...envs.host_client import Environments, Started
from ...schemas.agent import CallDelivered, CallPart, CallPlaces, CallRequest, CancelCall
from ...schemas.config.job import JobConfig
from ...schemas.profile import TimeUse
from ...schemas.rollout import Trajectory
from ...schemas.wire.errors import MessageError
from ...schemas.wire.subjects import JobScope
from ..engine.engine import Engine
from ..policy.chat import ChatTokenizer
from ..policy.grammar import OutputGrammars
from . import call_tree
from .agent_loop import EpisodePlan, EpisodeSampling, blaming
from .call_answers import CallAnswers
from .call_log import CallLog
from .recording import EpisodeRecorder, Transcript
from .template_facts import facts_of

# -- ended episodes --------------------------------------------------------------------------------

_MAX_SHOWN_CALLS = 1000
"""Maximum number of an episode's calls that are displayed."""


def rows_of_episode(
    calls: CallAnswers,
    plan: EpisodePlan,
    started: Started,
    result: StepResult,
    config: JobConfig,
) -> list[Trajectory]:
    """Return the rows of an episode, first the main one, which ends with the reward."""
    tree, agent = calls.tree, config.agent
    left_out = _left_out(result.info.get("untrained_calls"))
    posted = call_tree.PostedRewards.of(result.info, tree)
    tree_rows = call_tree.rows_of(tree, config.rollout.max_tokens, agent.train, left_out)
    credit = call_tree.EpisodeCredit(tree, tree_rows, posted)
    info = {
        **result.info,
        "agent": {**_figures(calls, tree_rows), **_branch_figures(posted, credit)},
        **({"without_effect": sorted(calls.without_effect)} if calls.without_effect else {}),
        "calls": [
            _describe_call(call, tree_rows, posted) for call in tree.calls[:_MAX_SHOWN_CALLS]
        ],
    }
    return [
        _trajectory(
            row,
            credit.places(row, result.reward, is_main=not place),
            plan,
            started,
            calls,
            info if not place else {},
        )
        for place, row in enumerate(tree_rows.rows)
    ]


def _left_out(named: Any) -> set[int]:
    numbers = cast("list[Any]", named) if isinstance(named, list) else []
    return {number for number in numbers if isinstance(number, int)}


def _trajectory(
    row: call_tree.CallRow,
    places: CallPlaces,
    plan: EpisodePlan,
    started: Started,
    calls: CallAnswers,
    info: dict[str, Any],
) -> Trajectory:
    tree = calls.tree
    last = tree.calls[row.calls[-1]]
    rewards = places.rewards.copy()
    rewards[-1] += places.outcome
    reasons = [tree.calls[number].generated.finish_reason for number in row.calls]
    finish: Literal["done", "turns", "length"] = calls.limit_hit or "done"
    return Trajectory(
        token_ids=row.token_ids,
        mask=row.mask,
        logprobs=row.logprobs,
        versions=row.versions,
        turn_ends=row.turn_ends,
        rewards=rewards,
        finish=finish,
        finish_reasons=["length" if reason == "length" else "stop" for reason in reasons],
        turn_times=[tree.calls[number].ended for number in row.calls],
        episode=plan.number,
        kind=row.kind,
        calls=places,
        greedy=plan.greedy,
        seed=plan.start.seed,
        messages=[message.for_template() for message in last.path_messages],
        info=info,
        host=started.host,
        data_source=started.data_source,
        generate_s=calls.generate_s if info else 0.0,
    )


def _figures(calls: CallAnswers, tree_rows: call_tree.TreeRows) -> dict[str, float]:
    """Return figures of an episode for the metrics."""
    tree = calls.tree
    prompts = sum(call.num_tokens - len(call.generated.token_ids) for call in tree.calls)
    num_new = sum(len(call.given_ids) for call in tree.calls)
    branches = Counter(call.branch for call in tree.calls if call.branch)
    return {
        "calls": float(len(tree.calls)),
        "rows": float(len(tree_rows.rows)),
        "reused_share": (prompts - num_new) / max(1, prompts),
        "untrained_calls": float(len(tree_rows.untrained)),
        "undelivered": float(sum(not call.delivered for call in tree.calls)),
        "cut_tokens": float(tree_rows.num_cut),
        "replayed_tokens": float(calls.num_replayed),
        **_masked(tree, tree_rows),
        **{f"branch_{name}": float(count) for name, count in branches.items()},
    }


def _masked(tree: call_tree.CallTree, tree_rows: call_tree.TreeRows) -> dict[str, float]:
    """Return the probability removed by formats, summed over trained tokens, if there were any."""
    trained = [tree.calls[number].generated for row in tree_rows.rows for number in row.calls]
    if all(generation.masked is None for generation in trained):
        return {}
    return {"masked_tokens": sum(float(x.masked.sum()) for x in trained if x.masked is not None)}


def _branch_figures(
    posted: call_tree.PostedRewards, credit: call_tree.EpisodeCredit
) -> dict[str, float]:
    """Return the mean posted rewards of calls and branches, if there are any."""
    branches, calls = posted.branches, posted.calls
    return {
        **({"reward_of_calls": sum(calls.values()) / len(calls)} if calls else {}),
        **({"reward_of_branches": sum(branches.values()) / len(branches)} if branches else {}),
        **({"lost_rewards": float(lost)} if (lost := credit.num_lost) else {}),
    }


def _describe_call(
    call: call_tree.ModelCall, tree_rows: call_tree.TreeRows, posted: call_tree.PostedRewards
) -> dict[str, Any]:
    """Return a call's fields for display (`envs/agents/call_selection.py` reads them)."""
    rows = [place for place, row in enumerate(tree_rows.rows) if call.number in row.calls]
    return {
        "call": call.number,
        "parent": None if call.parent is None else call.parent.number,
        "follows": None if call.follows is None else call.follows.number,
        "branch": call.branch,
        "row": rows[0] if rows else None,
        "untrained": "" if rows else tree_rows.why_not.get(call.number, "cut"),
        "given_tokens": len(call.given_ids),
        "tokens": len(call.generated.token_ids),
        "finish": call.generated.finish_reason,
        "reward": posted.calls.get(call.number),
        "branch_reward": posted.branches.get(call.number),
        "name": posted.names.get(call.number, ""),
        "text": call.reply.text[:200],
        "tools": [tool_call.name for tool_call in call.reply.calls],
    }


Tell: TypeAlias = Callable[..., Awaitable[None]]
"""`await tell(kind, message, **data)` publishes an event of the job."""
_MAX_TOLD = 100
"""Field names in the event."""
_MAX_STARTS = 100
"""Maximum number of hosts on which one episode is started."""


class ProgramLoop:
    """Runs the episodes of a job's programs with an engine and the job's hosts."""

    def __init__(
        self,
        broker: Broker,
        scope: JobScope,
        engine: Engine,
        chat: ChatTokenizer,
        environments: Environments,
        config: JobConfig,
        sampling: EpisodeSampling,
        time_use: TimeUse | None = None,
        tell: Tell | None = None,
    ) -> None:
        """`time_use` records when episodes wait for the engine and for their programs, `tell`
        publishes events."""
        self._broker = broker
        self._scope = scope
        self._engine = engine
        self._chat = chat
        self._environments = environments
        self._config = config
        self._sampling = sampling
        self._time_use = time_use or TimeUse("generate", "environment", rest="other")
        self._tell = tell
        self._grammars = OutputGrammars(chat)
        self._told_without_effect: set[str] = set()
        self._told_branch_rewards = False
        self._parts: PartsService | None = None
        self._service: Service | None = None

    async def start(self) -> None:
        """Prepare to answer calls, and report limitations of the model's template."""
        if (lacks := "; ".join(facts_of(self._chat).limitations())) and self._tell is not None:
            await self._tell("agent_template", f"limits of the model's chat template: {lacks}")
        name, description = "tinkermq-calls", f"calls of programs, job {self._scope.job}"
        self._service = await Service.start(self._broker, name=name, description=description)
        self._parts = PartsService(self._broker, self._service)

    async def close(self) -> None:
        """Stop answering."""
        if self._service is not None:
            await self._service.stop(0)

    async def run(
        self,
        plan: EpisodePlan,
        transcript: Transcript | None = None,
        recorder: EpisodeRecorder | None = None,
    ) -> list[Trajectory]:
        """Run one episode to its end; return its rows, the main one first.

        Continues from the calls in `recorder`, a `CallLog`. Raises EpisodeFailed with the boundary
        to blame if there is nothing to train, and Fenced if another generator has taken the episode
        over.
        """
        del transcript
        log = recorder if isinstance(recorder, CallLog) else CallLog(plan.episode)
        log.begin_try()
        engine, config = self._engine, self._config
        calls = CallAnswers(
            plan.episode,
            engine,
            self._chat if plan.time is None else self._chat.at(plan.time),
            config,
            EpisodeSampling(0.0) if plan.greedy else self._sampling,
            log,
            self._time_use,
            self._broker.max_payload_bytes,
            self._grammars,
        )
        async with contextlib.AsyncExitStack() as opened:
            playing = _Playing(self, plan, calls, log)
            opened.push_async_callback(playing.stop_listening)
            opened.callback(playing.free)
            opened.push_async_callback(calls.close, "it was given up")
            try:
                with blaming("environment"):
                    started, result = await playing.play()
            except Fenced:
                playing.is_over = True
                raise
            await calls.close("its program has ended")
            await self._report_without_effect(calls.without_effect)
            await self._report_branch_rewards(result)
            with blaming("environment"):
                return await asyncio.to_thread(self._rows, plan, calls, started, result)

    async def _report_without_effect(self, fields: set[str]) -> None:
        """Report the fields without effect once; the `info` of each episode has them, too."""
        fresh = sorted(fields - self._told_without_effect)[:_MAX_TOLD]
        if not fresh or self._tell is None or len(self._told_without_effect) > _MAX_TOLD:
            return
        self._told_without_effect.update(fresh)
        message = f"programs send fields without effect: {', '.join(fresh)}"
        await self._tell("agent_params", message, fields=fresh)

    async def _report_branch_rewards(self, result: StepResult) -> None:
        """Report once that rewards of branches have no effect."""
        is_read = self._config.algorithm.branch_credit != "episode"
        if self._tell is None or is_read or self._told_branch_rewards:
            return
        if result.info.get("branch_rewards"):
            self._told_branch_rewards = True
            await self._tell(
                "agent_branch_rewards",
                "programs post rewards of branches, which have no effect: "
                "algorithm.branch_credit is episode, set own or both",
            )

    def _rows(
        self, plan: EpisodePlan, calls: CallAnswers, started: Started, result: StepResult
    ) -> list[Trajectory]:
        rows = rows_of_episode(calls, plan, started, result, self._config)
        if not rows:
            raise NoCalls(
                f"the program ended with {len(calls.tree.calls)} answers of the model, and none of "
                f"them can be trained: agent.train={self._config.agent.train} selects among those "
                "that arrived",
                hint="`tinkermq agent check` shows for each call whether it is trained",
            )
        return rows

    async def listen(
        self, episode: str, calls: CallAnswers, delivery: int, opened: contextlib.AsyncExitStack
    ) -> None:
        """Answer the calls of an episode until `opened` is closed.

        `delivery` is the number of deliveries of its task, including this one.
        """
        assert self._parts is not None, "start the loop first"
        parts, scope = self._parts, self._scope

        def cancel(message: Any) -> None:
            if request := _read(CancelCall, message.data):
                parts.cancel(request.request)

        def delivered(message: Any) -> None:
            if request := _read(CallDelivered, message.data):
                calls.note_delivered(request)

        for name, take in (("cancel", cancel), ("delivered", delivered)):
            listening = await self._broker.listen(scope.episode(episode, name), take)
            opened.push_async_callback(listening.stop)
        answering = await parts.listen(
            scope.episode(episode, "call"),
            CallRequest,
            CallPart,
            calls.answer,
            blank=CallPart(delivery=delivery),
        )
        opened.push_async_callback(answering.stop)

    @property
    def environments(self) -> Environments:
        """The hosts of the job."""
        return self._environments

    @property
    def time_use(self) -> TimeUse:
        """Records the episodes' waits by kind."""
        return self._time_use


def _read(model: Any, payload: bytes) -> Any:
    try:
        return model.from_bytes(payload)
    except MessageError:
        return None  # untrusted; the sender gets no answer


@dataclass(eq=False)
class _Playing:
    """Runs the program of one episode on environment hosts."""

    loop: ProgramLoop
    plan: EpisodePlan
    calls: CallAnswers
    log: CallLog
    subscriptions: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    is_over: bool = False
    """Whether its program has ended, or is another generator's."""

    async def play(self) -> tuple[Started, StepResult]:
        """Run the program to its end, on another host if one dies."""
        num_starts = 0
        while True:
            try:
                started = await self._start(num_starts)
                return started, await self._unless_failed(self._until_end(started))
            except HostGone:
                num_starts += 1
                if num_starts >= _MAX_STARTS:
                    raise

    def free(self) -> None:
        """Free the episode at its host."""
        if self.log.episode and not self.is_over:
            self.loop.environments.close(self.log.host, self.log.episode)

    async def _start(self, num_starts: int) -> Started:
        """Rejoin the program that another generator began, or start it."""
        environments, plan, log = self.loop.environments, self.plan, self.log
        if log.episode and not num_starts:
            await self._listen(log.episode)
            held = replace(plan.start, only_held=True)
            try:
                return await self._unless_failed(environments.rejoin(log.host, log.episode, held))
            except HostGone:
                pass
        if log.episode:
            environments.close(log.host, log.episode)
            await self.calls.start_again()
        episode = f"{plan.episode}-{num_starts}" if num_starts else plan.episode
        await self._listen(episode)
        return await self._unless_failed(self._reset(episode))

    async def _reset(self, episode: str) -> Started:
        started = await self.loop.environments.reset(episode, self.plan.start)
        self.log.hold(episode, started.host, anew=True)
        return started

    async def _until_end(self, started: Started) -> StepResult:
        with self.loop.time_use.doing("environment"):
            result = await self.loop.environments.step(started.host, self.log.episode, 0, "")
        self.is_over = True
        return result

    async def _unless_failed(self, work: Any) -> Any:
        """Await an awaitable; raises Fenced if another generator takes the episode over."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self.calls.failed}, return_when=asyncio.FIRST_COMPLETED)
            if self.calls.failed.done():
                self.calls.failed.result()
            return task.result()
        finally:
            task.cancel()

    async def _listen(self, episode: str) -> None:
        await self.stop_listening()
        await self.loop.listen(episode, self.calls, self.log.delivery, self.subscriptions)

    async def stop_listening(self) -> None:
        """Stop answering calls."""
        await self.subscriptions.aclose()
