"""Check a submission without making a job: dry runs, and checks of games and models on a node.

A finding is what `Submission.submit` would raise first, or what the nodes report of models, data
and game, or the scheduler of slots.
"""

import asyncio
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ....broker.client.connection import Broker
from ....broker.client.rpc import RequestContext
from ....schemas.config.job import JobConfig
from ....schemas.config.sections import model_paths
from ....schemas.job import (
    ActorPlacement,
    JobRecord,
    SubmissionFinding,
    SubmissionFindings,
    SubmitRequest,
)
from ....schemas.node import (
    GameCheckReply,
    GameCheckRequest,
    InspectQuestion,
    LookAnswer,
    LookQuestion,
    NodeStatus,
    PlayAnswer,
    PlayQuestion,
)
from ....schemas.wire import errors
from ..jobs.states import slots_of, wanted_actor
from ..reconciler import Reconciler
from .access import check_game
from .pool_check import ANSWER_S, MOST_ASKED, ask_for_model, ask_node, models_of
from .submission import Submission

_SCHEDULER = "scheduler"
What = Literal["job", "model", "data", "game", "slots", "memory"]


class _Seen(NamedTuple):
    """What one node says of data and game."""

    node: str
    answer: LookAnswer


class DryRun:
    """Answers clients that only try a job."""

    def __init__(self, broker: Broker, submission: Submission, reconciler: Reconciler) -> None:
        """Ask the nodes of `reconciler`; `submission` makes the job that would run."""
        self._broker = broker
        self.submission = submission
        self._reconciler = reconciler

    async def answer(self, request: SubmitRequest, context: RequestContext) -> SubmissionFindings:
        """Say of everything that a job needs whether it is there; nothing is made."""
        try:
            record, config = await self.submission.tried(context.user, request)
        except errors.TinkermqError as error:
            return SubmissionFindings(findings=[_failed("job", error)])
        nodes = self._reconciler.nodes()
        reply = await asyncio.gather(
            self._models(nodes, config, record), self._files_and_game(nodes, config)
        )
        matches = [finding for findings in reply for finding in findings]
        slots = self._slots(context.user, record.actors, nodes)
        return SubmissionFindings(findings=[*matches, slots, *await self._memory(record, config)])

    async def _memory(self, record: JobRecord, config: JobConfig) -> list[SubmissionFinding]:
        """Return what the job takes on the pool's GPUs; nothing where that is not known."""
        reader = self.submission.pool.reader(record)
        plan = await self.submission.pool.plan_on_gpus(record.kind, config, reader)
        if plan is None:
            return []
        if plan.refusal is not None:
            return [_failed("memory", plan.refusal)]
        text = "\n".join(plan.lines())
        return [SubmissionFinding(what="memory", ok=True, text=text, by=_SCHEDULER)]

    async def _models(
        self, nodes: Sequence[NodeStatus], config: JobConfig, record: JobRecord
    ) -> list[SubmissionFinding]:
        reader = self.submission.pool.reader(record)
        try:
            await self.submission.pool.refuse_long_contexts(config, reader)
        except errors.ModelError as error:
            return [_failed("model", error)]
        if record.fork_of:
            text = f"it begins with {record.fork_of}: {record.fork_dir}"
            return [SubmissionFinding(what="model", ok=True, text=text, by=_SCHEDULER)]
        known = await self.submission.pool.known_models(models_of(config), reader)
        return [await self._model(nodes, model, may_know) for model, may_know in known.items()]

    async def _model(
        self, nodes: Sequence[NodeStatus], model: str, may_know: bool
    ) -> SubmissionFinding:
        reply = await ask_for_model(self._broker, nodes, model, may_know=may_know)
        having = [item.node for item in reply if item.answer.known and not item.answer.missing]
        lacking = [item for item in reply if item.answer.missing]
        if having:
            return _of_nodes("model", having, f"{model} is there")
        if lacking and len(lacking) == len(nodes):
            answer = lacking[0].answer
            return _of_nodes("model", [item.node for item in lacking], answer.missing, answer.hint)
        return _open("model", f"{model}: {_nobody_knows(nodes)}")

    async def _files_and_game(
        self, nodes: Sequence[NodeStatus], config: JobConfig
    ) -> list[SubmissionFinding]:
        """Return what nodes say of what actors of the pool would read; clients read their own."""
        is_hosted = config.env.hosts > 0
        env = [*config.env.train_data, *config.env.val_data] if is_hosted else []
        files = list(dict.fromkeys([*env, *config.sft.data]))
        game = config.env.game if is_hosted and not config.agent.runs_programs else None
        if not files and not game:
            return []
        seen = await self._seen(nodes, files, game or "")
        findings = [_data(nodes, seen, files)] if files else []
        return [*findings, _game(nodes, seen, game)] if game else findings

    async def having_game(self, config: JobConfig) -> list[str]:
        """Return the nodes that have a job's game and its data; raises DataError or GameError."""
        nodes = self._reconciler.nodes()
        files, game = [*config.env.train_data, *config.env.val_data], str(config.env.game)
        seen = await self._seen(nodes, files, game)
        having = [item.node for item in seen if item.answer.game and not item.answer.missing]
        if having:
            return having
        findings = [(errors.DataError, _data(nodes, seen, files))] if files else []
        for kind, finding in [*findings, (errors.GameError, _game(nodes, seen, game))]:
            if not finding.ok:
                raise kind(f"{finding.by}: {finding.text}", hint=finding.hint)
        raise errors.GameError(
            f"no node has both game {game} and its data, as far as they could say",
            hint="`tinkermq train FILE --dry-run` shows what each of them lacks",
        )

    async def having_model(self, record: JobRecord, config: JobConfig) -> list[str]:
        """Return the nodes that have the model of a job, all of which its owner may know."""
        reader = self.submission.pool.reader(record)
        read = [*model_paths(config).values(), *config.sft.data]
        if not await self.submission.pool.may_know_all(read, reader):
            return []
        nodes = self._reconciler.nodes()
        reply = await ask_for_model(self._broker, nodes, config.model.path, may_know=True)
        return [item.node for item in reply if item.answer.known and not item.answer.missing]

    async def _seen(
        self, nodes: Sequence[NodeStatus], files: Sequence[str], game: str
    ) -> list[_Seen]:
        """Return what nodes say of files and a game, those that could in time."""
        question = LookQuestion(files=list(files), game=game)
        names = [node.node for node in nodes[:MOST_ASKED]]
        unknown = LookAnswer(known=False)
        asking = (
            ask_node(self._broker, name, "look", question, unknown, timeout_s=ANSWER_S)
            for name in names
        )
        answers = await asyncio.gather(*asking)
        return [_Seen(*item) for item in zip(names, answers, strict=True) if item[1].known]

    def _slots(
        self, user: str, actors: Sequence[ActorPlacement], nodes: Sequence[NodeStatus]
    ) -> SubmissionFinding:
        try:
            self.submission.pool.refuse_placing(user, actors)
        except errors.TinkermqError as error:
            return _failed("slots", error)
        there = sum(node.slots for node in nodes)
        text = f"{slots_of(actors)} of {there} on {len(nodes)} node(s)"
        return SubmissionFinding(what="slots", ok=True, text=text, by=_SCHEDULER)


def _data(
    nodes: Sequence[NodeStatus], seen: Sequence[_Seen], files: Sequence[str]
) -> SubmissionFinding:
    having = [item.node for item in seen if not item.answer.missing]
    if having:
        return _of_nodes("data", having, f"{len(files)} file(s) are there")
    if seen and len(seen) == len(nodes):
        first = seen[0]
        text = f"there is no file {', '.join(first.answer.missing[:3])}"
        hint = "give files that the nodes see, by whole paths, or bring these there"
        return _of_nodes("data", [item.node for item in seen], text, hint)
    return _open("data", _nobody_knows(nodes))


def _game(nodes: Sequence[NodeStatus], seen: Sequence[_Seen], game: str) -> SubmissionFinding:
    try:
        check_game({"env": {"game": game}})
    except errors.TinkermqError as error:
        return _failed("game", error)
    having = [item for item in seen if item.answer.game]
    if having:
        text = f"{having[0].answer.game}: its package is there; `tinkermq env check` plays it"
        return _of_nodes("game", [item.node for item in having], text)
    if seen and len(seen) == len(nodes):
        answer = seen[0].answer
        return _of_nodes("game", [item.node for item in seen], answer.lacks_game, answer.hint)
    return _open("game", f"{game}: {_nobody_knows(nodes)}")


def _nobody_knows(nodes: Sequence[NodeStatus]) -> str:
    return "no node could say in time" if nodes else "no node is there to ask"


def _failed(what: What, error: errors.TinkermqError) -> SubmissionFinding:
    return SubmissionFinding(
        what=what, ok=False, text=error.message, hint=error.hint, by=_SCHEDULER
    )


def _open(what: What, text: str) -> SubmissionFinding:
    """Return a finding that a submission passes, since the job finds out."""
    return SubmissionFinding(what=what, ok=True, text=text, by=_SCHEDULER)


def _of_nodes(
    what: What, names: Sequence[str], text: str, hint: str | None = None
) -> SubmissionFinding:
    """Return what nodes say; with a hint it is why they cannot run the job."""
    by = f"node {', '.join(names)}"
    return SubmissionFinding(what=what, ok=hint is None, text=text, hint=hint or "", by=by)


# Checks on a node: playing a game (`tinkermq env check --on-node`) or inspecting a model (`tinkermq
# train --dry-run` from a light client). A node needs longer than a request waits, so the client
# repeats the request under the same id until the check is done.

GAME_ANSWER_S = 3.0
"""After which a client has to ask again."""
KEPT_S = 60.0
"""How long an answer waits for a client that is away."""
_NODE_S = 90.0
_INSPECT_S = 150.0


class _Check(NamedTuple):
    request_id: str
    task: asyncio.Task[GameCheckReply]


class EnvChecks:
    """The checks of all users, of each the last one."""

    def __init__(self, broker: Broker, trial: DryRun) -> None:
        """Check nothing yet; `trial` makes the job that would run, and finds its game's nodes."""
        self._broker = broker
        self._trial = trial
        self._checks: dict[str, _Check] = {}

    async def answer(self, request: GameCheckRequest, context: RequestContext) -> GameCheckReply:
        """Say how far a check is, which begins with the first request of its id.

        Raises what `Submission.submit` does for a job that would be refused, GameError where no
        node has the game, BusyError while a check of this user runs, or the nodes try others.
        """
        user = context.user
        check = self._checks.get(user)
        if check is None or (check.request_id != request.request_id and check.task.done()):
            task = asyncio.create_task(self._check(user, request), name=f"game check of {user}")
            check = self._checks[user] = _Check(request.request_id, task)
            task.add_done_callback(lambda _: self._forget_later(user, check))
        elif check.request_id != request.request_id:
            raise errors.BusyError(f"another check of user {user!r} runs", hint="wait for its end")
        await asyncio.wait({check.task}, timeout=GAME_ANSWER_S)
        if not check.task.done():
            return GameCheckReply(done=False)
        return check.task.result()

    def _forget_later(self, user: str, check: _Check) -> None:
        """Keep an answer for a while; a failure is gone at once, so that it can be tried again."""

        def forget() -> None:
            if self._checks.get(user) is check:
                del self._checks[user]

        failed = check.task.cancelled() or check.task.exception() is not None
        asyncio.get_running_loop().call_later(0.0 if failed else KEPT_S, forget)

    async def _check(self, user: str, request: GameCheckRequest) -> GameCheckReply:
        submitted = SubmitRequest(request_id=request.request_id, config=request.config)
        record, config = await self._trial.submission.tried(user, submitted)
        if request.look == "model":
            return await self._look_into(record, config)
        host = _host(config, record.actors)
        for name in await self._trial.having_game(config):
            answer = await self._play(name, record, host, config)
            if answer.trouble:
                raise errors.GameError(f"node {name}: {answer.trouble}", hint=answer.hint)
            if answer.known:
                return GameCheckReply(done=True, node=name, checks=answer.checks)
        raise errors.BusyError(
            "the nodes that have the game try another one, or are leaving",
            hint="ask again in a minute",
        )

    async def _look_into(self, record: JobRecord, config: JobConfig) -> GameCheckReply:
        """Let a node with the job's model inspect it; find nothing if no node can."""
        having = await self._trial.having_model(record, config)
        question = InspectQuestion(config=config.model_dump(mode="json", exclude_unset=True))
        for name in having:
            unknown = PlayAnswer(known=False)
            answer = await ask_node(
                self._broker, name, "inspect", question, unknown, timeout_s=_INSPECT_S
            )
            if answer.trouble:
                raise errors.ModelError(f"node {name}: {answer.trouble}", hint=answer.hint)
            if answer.known:
                return GameCheckReply(done=True, node=name, checks=answer.checks)
        return GameCheckReply(done=True)

    async def _play(
        self, name: str, record: JobRecord, host: ActorPlacement, config: JobConfig
    ) -> PlayAnswer:
        question = PlayQuestion(
            wanted=wanted_actor(record, host, config),
            env=config.env.model_dump(mode="json", exclude_unset=True),
            seed=config.seed,
        )
        unknown = PlayAnswer(known=False)
        return await ask_node(self._broker, name, "play", question, unknown, timeout_s=_NODE_S)


def _host(config: JobConfig, actors: list[ActorPlacement]) -> ActorPlacement:
    """Return the environment host that a job would have; ConfigError for one without."""
    if config.agent.runs_programs:
        raise errors.ConfigError(
            "an agent job has no game", hint="try its program: `tinkermq agent check FILE`"
        )
    host = next((actor for actor in actors if actor.role == "environment"), None)
    if host is None:
        raise errors.ConfigError(
            "no node would play this game: env.hosts=0 leaves it to clients",
            hint="check it here, without --on-node",
        )
    return host
