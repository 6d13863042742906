"""What a submission would be told, without making a job: the scheduler and the nodes say it.

What `Submission.submit` raises first is one finding here, and the others are told with it: the
models, data and game by the nodes that would read them, the slots by the scheduler.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ....broker.client.connection import Broker
from ....broker.client.rpc import RequestContext
from ....schemas.config.job import JobConfig
from ....schemas.config.storage import model_paths
from ....schemas.job import (
    ActorPlacement,
    JobRecord,
    SubmissionFinding,
    SubmissionFindings,
    SubmitRequest,
)
from ....schemas.node import LookAnswer, LookQuestion, NodeStatus
from ....schemas.wire.errors import DataError, GameError, TinkermqError
from ..jobs.actors import slots_of
from ..reconciler import Reconciler
from .access import check_game
from .models import ANSWER_S, MOST_ASKED, Reader, ask_for_model, ask_node, models_of
from .submission import Submission

_SCHEDULER = "scheduler"
What = Literal["job", "model", "data", "game", "slots"]


class _Seen(NamedTuple):
    """What one node says of data and game."""

    node: str
    answer: LookAnswer


class TrialSubmission:
    """Answers clients that only try a job."""

    def __init__(self, broker: Broker, submission: Submission, reconciler: Reconciler) -> None:
        """Ask the nodes that `reconciler` knows; `submission` says what a job would be."""
        self._broker = broker
        self.submission = submission
        self._reconciler = reconciler

    async def answer(self, request: SubmitRequest, context: RequestContext) -> SubmissionFindings:
        """Say of everything that a job needs whether it is there; nothing is made."""
        try:
            record, config = await self.submission.tried(context.user, request)
        except TinkermqError as error:
            return SubmissionFindings(findings=[_failed("job", error)])
        nodes = self._reconciler.nodes()
        told = await asyncio.gather(
            self._models(nodes, config, record), self._files_and_game(nodes, config)
        )
        found = [finding for findings in told for finding in findings]
        slots = self._slots(context.user, record.actors, nodes)
        return SubmissionFindings(findings=[*found, slots])

    async def _models(
        self, nodes: Sequence[NodeStatus], config: JobConfig, record: JobRecord
    ) -> list[SubmissionFinding]:
        if record.fork_of:
            text = f"it begins with {record.fork_of}: {record.fork_dir}"
            return [SubmissionFinding(what="model", ok=True, text=text, by=_SCHEDULER)]
        reader = self.submission.reader(record.user, [Path(one) for one in record.output_roots])
        return [await self._model(nodes, model, reader) for model in models_of(config)]

    async def _model(
        self, nodes: Sequence[NodeStatus], model: str, reader: Reader
    ) -> SubmissionFinding:
        told = await ask_for_model(self._broker, nodes, model, reader)
        having = [one.node for one in told if one.answer.known and not one.answer.missing]
        lacking = [one for one in told if one.answer.missing]
        if having:
            return _of_nodes("model", having, f"{model} is there")
        if lacking and len(lacking) == len(nodes):
            answer = lacking[0].answer
            return _of_nodes("model", [one.node for one in lacking], answer.missing, answer.hint)
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
        having = [one.node for one in seen if one.answer.game and not one.answer.missing]
        if having:
            return having
        findings = [(DataError, _data(nodes, seen, files))] if files else []
        for kind, finding in [*findings, (GameError, _game(nodes, seen, game))]:
            if not finding.ok:
                raise kind(f"{finding.by}: {finding.text}", hint=finding.hint)
        raise GameError(
            f"no node has both game {game} and its data, as far as they could say",
            hint="`tinkermq train FILE --dry-run` tells what each of them lacks",
        )

    async def having_model(self, record: JobRecord, config: JobConfig) -> list[str]:
        """Return the nodes that have the model of a job, all of which its owner may know."""
        reader = self.submission.reader(record.user, [Path(one) for one in record.output_roots])
        read = [*model_paths(config).values(), *config.sft.data]
        if not all([await asyncio.to_thread(reader.may_know, one) for one in read]):
            return []
        nodes = self._reconciler.nodes()
        told = await ask_for_model(self._broker, nodes, config.model.path, reader)
        return [one.node for one in told if one.answer.known and not one.answer.missing]

    async def _seen(
        self, nodes: Sequence[NodeStatus], files: Sequence[str], game: str
    ) -> list[_Seen]:
        """Return what nodes say of files and a game, those that could in time."""
        question = LookQuestion(files=list(files), game=game)
        names = [one.node for one in nodes[:MOST_ASKED]]
        unknown = LookAnswer(known=False)
        asking = (
            ask_node(self._broker, name, "look", question, unknown, timeout_s=ANSWER_S)
            for name in names
        )
        answers = await asyncio.gather(*asking)
        return [_Seen(*one) for one in zip(names, answers, strict=True) if one[1].known]

    def _slots(
        self, user: str, actors: Sequence[ActorPlacement], nodes: Sequence[NodeStatus]
    ) -> SubmissionFinding:
        try:
            self.submission.refuse_placing(user, actors)
        except TinkermqError as error:
            return _failed("slots", error)
        there = sum(one.slots for one in nodes)
        text = f"{slots_of(actors)} of {there} on {len(nodes)} node(s)"
        return SubmissionFinding(what="slots", ok=True, text=text, by=_SCHEDULER)


def _data(
    nodes: Sequence[NodeStatus], seen: Sequence[_Seen], files: Sequence[str]
) -> SubmissionFinding:
    having = [one.node for one in seen if not one.answer.missing]
    if having:
        return _of_nodes("data", having, f"{len(files)} file(s) are there")
    if seen and len(seen) == len(nodes):
        first = seen[0]
        text = f"there is no file {', '.join(first.answer.missing[:3])}"
        hint = "give files that the nodes see, by whole paths, or bring these there"
        return _of_nodes("data", [one.node for one in seen], text, hint)
    return _open("data", _nobody_knows(nodes))


def _game(nodes: Sequence[NodeStatus], seen: Sequence[_Seen], game: str) -> SubmissionFinding:
    try:
        check_game({"env": {"game": game}})
    except TinkermqError as error:
        return _failed("game", error)
    having = [one for one in seen if one.answer.game]
    if having:
        text = f"{having[0].answer.game}: its package is there; `tinkermq env check` plays it"
        return _of_nodes("game", [one.node for one in having], text)
    if seen and len(seen) == len(nodes):
        answer = seen[0].answer
        return _of_nodes("game", [one.node for one in seen], answer.lacks_game, answer.hint)
    return _open("game", f"{game}: {_nobody_knows(nodes)}")


def _nobody_knows(nodes: Sequence[NodeStatus]) -> str:
    return "no node could say in time" if nodes else "no node is there to ask"


def _failed(what: What, error: TinkermqError) -> SubmissionFinding:
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
