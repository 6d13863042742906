"""The trainer's service and its samplers: order, shares, turns, places, snapshots."""

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tinkermq.actors.scheduler.jobs.states import with_usage
from tinkermq.actors.storage.tinker_checkpoints import CheckpointFolders
from tinkermq.actors.tinker import exports, models, worker
from tinkermq.actors.tinker.catalogue import Catalogue
from tinkermq.actors.tinker.catalogue_service import CatalogueService
from tinkermq.actors.tinker.models import Models
from tinkermq.actors.tinker.sampling.engines import Snapshots
from tinkermq.actors.tinker.training.inputs import MAX_TARGETS
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.client.rpc import Service
from tinkermq.broker.feed import read_events
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.operations import OperationLog
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.config.sections import ADAPTER_CONFIG, ADAPTER_FILES
from tinkermq.schemas.job import JobRecord, TenantShare, TenantShares, TrainerUsage
from tinkermq.schemas.tinker import wire
from tinkermq.schemas.tinker.checkpoints import (
    ChangeCheckpoint,
    SessionState,
    TellSession,
    TinkerCheckpoint,
)
from tinkermq.schemas.tinker.names import CheckpointName, ModelName, OperationName
from tinkermq.schemas.tinker.operation import MAX_BODY_BYTES, ModelOperation, OperationTaken
from tinkermq.schemas.tinker.sampling import SamplerName
from tinkermq.schemas.wire.errors import (
    BusyError,
    ExhaustedError,
    FencedError,
    MessageError,
    NobodyAnswersError,
    NotFoundError,
    QuotaError,
    SessionOverError,
    StateError,
)
from tinkermq.schemas.wire.subjects import JobScope, rpc

from tests.support.tinker import BASE
from tests.support.tinker_service import END, MODEL, SCOPE, Trainer, create, loss, step_body
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, eventually

torch.set_num_threads(1)
_BEFORE = f"tinker://{MODEL}/weights/before"


async def test_a_trainer_that_ends_anywhere_goes_on_to_the_same_bits(trainer: Trainer) -> None:
    """What one trainer does at once is done by five that end suddenly, and in another order."""
    async with trainer.running():
        assert (await trainer.send("create_model", 0, create())).request_id == f"{MODEL}:0"
        await trainer.train(1, 6)
        undisturbed = await trainer.weights(13)
        curves = (await trainer.curves()).points
    assert await trainer.log.read_all() == ([], [])  # all of it is in a state
    trainer.begin_anew()
    await trainer.log.forget("ada", END)
    async with trainer.running(drains=False):
        await trainer.send("create_model", 0, create())
        await trainer.send("optim_step", 2, step_body(2))
        await trainer.send("forward_backward", 1, loss(1))
    async with trainer.running(drains=False):
        assert not (await trainer.send("forward_backward", 1, loss(99))).is_new
        await trainer.train(3, 1)
    async with trainer.running():
        await trainer.train(5, 1)
        await trainer.send("forward_backward", 7, loss(7))
        await trainer.result(7)  # its gradients are in the state
    async with trainer.running(drains=False):
        await trainer.send("optim_step", 8, step_body(8))
    async with trainer.running(drains=False):
        await trainer.train(9, 2)
        assert await trainer.weights(13) == undisturbed
        shown = await trainer.curves()
        assert shown.points == curves
        assert (shown.shown.steps, len(curves["series"]["loss:sum"]["y"])) == (6, 6)
    kinds = {event.kind for event in await read_events(trainer.broker, SCOPE)}
    assert "replay_differs" not in kinds


async def test_losses_that_no_step_follows_do_not_fill_the_log(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is all users' log: who only asks for losses, or went away, keeps nothing in it."""
    monkeypatch.setattr(worker, "SAVE_OPERATIONS", 2)

    async def logs(*numbers: int) -> bool:
        return [one.seq for _, one in (await trainer.log.read_all())[0]] == list(numbers)

    async def losses(*numbers: int) -> None:
        for seq in numbers:
            await trainer.send("forward_backward", seq, loss(seq))
            assert (await trainer.result(seq)).state == "done"

    async with trainer.running():
        await trainer.send("create_model", 0, create())
        await losses(1, 2, 3, 4, 5)
        await trainer.send("optim_step", 6, step_body(6))
        undisturbed = await trainer.weights(7)
    trainer.begin_anew()
    await trainer.log.forget("ada", END)
    async with trainer.running(drains=False):
        await trainer.send("create_model", 0, create())
        await losses(1, 2, 3, 4)
        await eventually(lambda: logs(4), "the log to be trimmed")
    async with trainer.running(drains=False, idle_s=0.01):
        await losses(5)
        await eventually(logs, "the log of an idle model to be trimmed")
    async with trainer.running():
        await trainer.send("optim_step", 6, step_body(6))
        assert await trainer.weights(7) == undisturbed
        await losses(8)
        await trainer.send("forward_backward", 9, loss(9, "none"))
        assert (await trainer.result(9)).state == "failed"
    assert await logs()
    async with trainer.running():
        await trainer.send("optim_step", 10, step_body(10))
        assert "since operation 9 failed" in (await trainer.result(10)).error


async def test_what_is_wrong_is_told_by_the_result_and_leaves_no_hole(trainer: Trainer) -> None:
    async with trainer.running():
        await trainer.send("create_model", 0, create())
        await trainer.send("forward_backward", 1, loss(1))
        await trainer.send("forward_backward", 2, loss(2, "stable_reinforce"))
        await trainer.send("optim_step", 3, step_body(3))
        await trainer.send("forward_backward", 4, b"\xff")
        await trainer.send("optim_step", 5, {"model_id": MODEL, "seq_id": 5, "adam_params": 3})
        failed = [await trainer.result(seq) for seq in (2, 3, 4, 5)]
        assert {(one.state, one.category) for one in failed} == {("failed", "user")}
        assert "loss_fn=importance_sampling" in failed[0].error
        assert "since operation 2 failed" in failed[1].error
        assert "is not a ForwardBackwardRequest" in failed[2].error
        assert "adam_params" in failed[3].error
        await trainer.send("optim_step", 6, step_body(6))
        assert "since operation 4 failed" in (await trainer.result(6)).error
        before = await trainer.weights(7, "before")
        held = await trainer.checkpoint(_BEFORE)
        assert (held.base, held.rank) == (BASE, 4)
        for path, user in ((f"tinker://{MODEL}/weights/none", "ada"), (_BEFORE, "bob")):
            with pytest.raises(NotFoundError, match="there is no checkpoint"):
                await trainer.checkpoint(path, user)
        await trainer.train(8, 1)
        assert (await trainer.result(9)).state == "done"
        assert await trainer.weights(10, "behind") != before


async def test_a_step_on_a_gradient_that_is_not_finite_is_told_as_json(trainer: Trainer) -> None:
    message = wire.ForwardBackwardRequest.FromString(loss(1))
    for datum in message.data:
        datum.loss_fn_inputs["weights"].dense = np.full(12, 3e38, "<f4").tobytes()

    def constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    async with trainer.running():
        await trainer.send("create_model", 0, create())
        await trainer.send("forward_backward", 1, message.SerializeToString())
        await trainer.send("optim_step", 2, step_body(2))
        told = json.loads((await trainer.result(2)).body, parse_constant=constant)
        assert told == {"metrics": {"skipped:sum": 1.0}}
        assert not math.isfinite((await trainer.curves()).shown.last["grad_norm:mean"])


async def test_results_that_no_message_holds_are_not_computed_and_end_no_trainer(
    trainer: Trainer,
) -> None:
    async with trainer.running():
        await trainer.send("create_model", 0, create())
        await trainer.send("forward_backward", 1, _wide(MAX_TARGETS // 8 + 1))
        await trainer.send("optim_step", 2, step_body(2))
        assert "have 2,000,008 target_tokens together" in (await trainer.result(1)).error
        assert "since operation 1 failed" in (await trainer.result(2)).error
        long = "\x80" * (3 << 20)  # as Python shows it, twice as many bytes
        extra = json.dumps({**step_body(4), "more": long}, ensure_ascii=False).encode()
        await trainer.send("forward_backward", 3, loss(3, long))
        await trainer.send("optim_step", 4, extra)
        for seq in (3, 4):
            failed = await trainer.result(seq)
            assert (failed.state, failed.category) == ("failed", "user")
            assert len(failed.error) < 10_000
        await trainer.train(5, 2)  # the first step fails for operation 3
        assert (await trainer.result(8)).state == "done"


def _wide(width: int) -> bytes:
    """Return a request of eight positions with so many targets each, which are sparse."""
    message = wire.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(9, 17, dtype="<i4").tobytes()
    for name, dtype in (("target_tokens", 2), ("weights", 1)):
        tensor = datum.loss_fn_inputs[name]
        tensor.dtype = dtype
        tensor.shape.extend([8, width])
        tensor.sparse_csr.crow_indices = np.zeros(9, "<i8").tobytes()
    return message.SerializeToString()


async def test_models_of_others_and_what_cannot_be_are_refused_before_the_log(
    trainer: Trainer,
) -> None:
    async with trainer.running():
        await trainer.send("create_model", 0, create())
        assert (await trainer.result(0)).state == "done"
        for ask in (trainer.info("bob"), trainer.result(0, "bob"), _as_bob(trainer)):
            with pytest.raises(NotFoundError):
                await ask
        with pytest.raises(MessageError, match="cannot be create_model"):
            await trainer.send("create_model", 1, create())
        with pytest.raises(MessageError, match="cannot be missing"):
            await trainer.send("missing", 1, {})
        told = [seq for _, one in (await trainer.log.read_all())[0] for seq in [one.seq]]
        assert told == [0]
        for session, body, words in (
            ("s2", create("s2", rank=17), "rank 17 is not offered"),
            ("s3", create("s3", base="other"), "no base model 'other' here"),
        ):
            model = f"{session}:train:0"
            await trainer.send("create_model", 0, body, model=model)
            assert words in (await trainer.result(0, model=model)).error
            await trainer.send("optim_step", 1, step_body(1), model=model)
            assert "was never made" in (await trainer.result(1, model=model)).error


async def _as_bob(trainer: Trainer) -> OperationTaken:
    return await trainer.send("optim_step", 1, step_body(1), "bob")


async def test_a_number_that_never_comes_fails_and_those_behind_it_go_on(trainer: Trainer) -> None:
    async with trainer.running(gap_s=AFTER_PATIENCE_S):
        await trainer.send("create_model", 0, create())
        assert (await trainer.result(0)).state == "done"
        await trainer.send("optim_step", 2, step_body(2))

        async def waits() -> bool:
            waiting = await trainer.result(2, wait_s=0.1)
            assert waiting.state == "pending"
            return "waits for operation 1, which has not arrived" in waiting.queue_reason

        await eventually(waits, "the reason of the wait")
    async with trainer.running(gap_s=0.5):
        assert (await trainer.result(2)).state == "done"
        assert "never arrived" in (await trainer.result(1)).error
        assert not (await trainer.send("forward_backward", 1, loss(1))).is_new


async def test_garbage_in_the_log_ends_one_model_and_nothing_else(trainer: Trainer) -> None:
    """Of a pool without users anybody may write there."""

    async def write(seq: int, payload: bytes, model: str = "s1", log: str = "operation") -> None:
        subject = getattr(SCOPE, log)("ada", model, 0, seq)
        await trainer.broker.append(subject, payload, deadline_s=PATIENCE_S, waiting_for="it")

    async with trainer.running(drains=False, gap_s=0.5):
        await trainer.send("create_model", 0, create())
        await trainer.train(1, 1)
        assert (await trainer.result(2)).state == "done"
        await write(4, b"garbage")
        await trainer.send("forward_backward", 3, loss(3))
        await trainer.send("optim_step", 5, step_body(5))
        ended = await trainer.result(5)
        assert (ended.state, ended.category) == ("failed", "server")
        assert "operation 4 cannot be read" in ended.error
    await write(1, b"garbage", model="s2")
    await write(
        0, ModelOperation(kind="optim_step", model="s3:train:0", seq=0, body=b"").to_bytes(), "s3"
    )
    await write(0, b"garbage", model="s4", log="result")
    async with trainer.running(gap_s=0.5):
        assert (await trainer.result(3)).state == "done"
        assert "operation 4 cannot be read" in (await trainer.result(4)).error
        with pytest.raises(StateError, match=r"entry \d+ of the operation log"):
            await trainer.send("optim_step", 6, step_body(6))
        await trainer.send("create_model", 0, create("s2"), model="s2:train:0")
        with pytest.raises(MessageError, match="cannot be read"):
            await trainer.send("optim_step", 1, step_body(1), model="s2:train:0")
        with pytest.raises(MessageError, match="cannot be optim_step"):
            await trainer.send("create_model", 0, create("s3"), model="s3:train:0")
        await trainer.send("create_model", 0, create("s4"), model="s4:train:0")
        await trainer.send("create_model", 0, create("s5"), model="s5:train:0")
        assert (await trainer.result(0, model="s5:train:0")).state == "done"
    kinds = [event.kind for event in await read_events(trainer.broker, SCOPE)]
    assert kinds.count("operation_unreadable") == 3  # s1 by either trainer, s2
    assert "result_unreadable" in kinds


async def test_what_computes_has_the_threads_of_the_configuration(trainer: Trainer) -> None:
    async with trainer.running(threads=2) as service:
        await trainer.send("create_model", 0, create())
        await trainer.result(0)
        thread = service.worker._thread
        assert await asyncio.wrap_future(thread.submit(torch.get_num_threads)) == 2
    torch.set_num_threads(1)


async def test_a_trainer_that_another_has_replaced_neither_applies_nor_writes(
    trainer: Trainer,
) -> None:
    """The first one is cut off with operations in its memory; the second one takes over."""
    async with trainer.running(drains=False):
        await trainer.send("create_model", 0, create())
        await trainer.train(1, 2)
        assert (await trainer.result(4)).state == "done"
        log = OperationLog(trainer.broker, SCOPE)
        await log.claim()
        await trainer.send("optim_step", 5, step_body(5))
        with pytest.raises(FencedError, match="another trainer of job"):
            await asyncio.wait_for(trainer.task or asyncio.Future(), PATIENCE_S)
    assert await trainer.log.result("ada", OperationName(END, 5)) is None
    async with trainer.running():
        assert (await trainer.result(5)).state == "done"
        other = ModelOperation(kind="optim_step", model=MODEL, seq=6, body=b"{}")
        await trainer.log.append("ada", other)  # as a trainer does that is not yet fenced off
        assert (await trainer.result(6)).category == "user"


# -- What users have used is told to the scheduler; who has used up a quota waits, and goes on -----


torch.set_num_threads(1)


class Scheduler:
    """Knows quotas of tokens, as the scheduler does."""

    def __init__(self) -> None:
        self.quota = 50
        self.told: dict[str, int] = {}

    async def answer(self, usage: TrainerUsage) -> TenantShares:
        assert usage.job == SCOPE.job
        self.told |= usage.tokens
        users = {
            user: TenantShare(weight=2.0, tokens_left=max(self.quota - used, 0))
            for user, used in usage.tokens.items()
        }
        return TenantShares(users=users)


async def test_a_used_up_quota_holds_up_losses_until_it_is_raised(
    own_server: NatsServer, own_broker: Broker, base: Path, tmp_path: Path
) -> None:
    await create_job_streams(own_broker, SCOPE, LimitsConfig(), operations=True)
    trainer, scheduler = Trainer(own_server.url, own_broker, base, tmp_path / "s"), Scheduler()
    subject = rpc(SCOPE.user, "scheduler", "tinker-usage")
    async with await Service.start(own_broker, name="scheduler", description="") as service:
        await service.endpoint("tinker-usage", subject, TrainerUsage, scheduler.answer)
        async with trainer.running() as running:
            await trainer.send("create_model", 0, create())
            await trainer.result(0)
            await running.shares.report()
            assert running.models.turns.weights == {"ada": 2.0}
            await trainer.train(1, 2)  # 36 tokens each
            await trainer.result(4)
            await running.shares.report()
            assert scheduler.told == {"ada": 72}
            with pytest.raises(ExhaustedError, match="used all tokens of the quota"):
                await trainer.send("forward_backward", 5, loss(5))
            await trainer.send("optim_step", 6, step_body(6))  # what costs no tokens is taken
            scheduler.quota = 1000
            await running.shares.report()
            await trainer.train(5, 1)
            assert (await trainer.result(6)).state == "done"
        async with trainer.running() as running:  # counted once, also behind a state
            await trainer.result(6)
            assert running.models.tokens() == {"ada": 108}


def test_what_a_sampler_tells_counts_once_whatever_starts_again() -> None:
    record = JobRecord(
        job="t", name="t", user="pool", kind="tinker", state="RUNNING", config={}, created=1.0
    )

    def told(tokens: int, since: float, sampler: str = "sampler-0") -> None:
        nonlocal record
        usage = TrainerUsage(job="t", tokens={"ada": tokens}, sampler=sampler, since=since)
        record = with_usage(record, usage)
        assert with_usage(record, usage) is record  # asked twice, as after a lost reply

    told(10, 1.0)
    told(25, 1.0)
    told(5, 2.0)  # it was killed and started again
    told(7, 1.5, "sampler-1")
    told(90, 1.0)  # the one that was replaced still tells
    assert record.tinker_sampled == {"ada": 25 + 5 + 7}
    record = with_usage(record, TrainerUsage(job="t", tokens={"ada": 100}))
    record = with_usage(record, TrainerUsage(job="t", tokens={"ada": 60}))
    assert record.tinker_tokens == {"ada": 100}


# -- Whose operation is done next, and what a user may have waiting --------------------------------


def operation(session: str, seq: int, body: bytes = b"") -> ModelOperation:
    kind = "create_model" if seq == 0 else "optim_step"
    return ModelOperation(kind=kind, model=f"{session}:train:0", seq=seq, body=body)


def done(every: Models, cost: float = 1000.0) -> tuple[str, int] | None:
    """Do what is next; return whose it was, and its number."""
    chosen = every.choose()
    if chosen is None:
        return None
    every.charge(chosen[0], cost)
    every.applied(*chosen)
    return chosen[0].user, chosen[1].seq


def test_operations_wait_for_those_before_them_in_whichever_order_they_come() -> None:
    every = Models()
    for seq in (0, 3, 2):
        every.enqueue("ada", operation("a", seq))
    assert done(every) == ("ada", 0)
    model = every.find("ada", ModelName("a", 0))
    assert model is not None
    assert model.has_gap
    assert done(every) is None
    every.enqueue("ada", operation("a", 1))
    assert [done(every) for _ in range(4)] == [("ada", 1), ("ada", 2), ("ada", 3), None]


def test_what_comes_again_changes_nothing() -> None:
    every = Models()
    every.enqueue("ada", operation("a", 0))
    assert done(every) == ("ada", 0)
    every.enqueue("ada", operation("a", 0))
    every.enqueue("ada", operation("a", 1, b"first"))
    model = every.enqueue("ada", operation("a", 1, b"second"))
    assert model.waiting[1].body == b"first"
    assert done(every) == ("ada", 1)
    assert done(every) is None


def filled(**users: int) -> Models:
    """Return models of users who have so many operations waiting."""
    every = Models(quantum=2000)
    for user, count in users.items():
        for seq in range(count):
            every.enqueue(user, operation(user[0], seq))
    return every


def test_a_light_user_waits_for_one_piece_of_heavy_ones() -> None:
    every = filled(heavy=40, large=40)
    for _ in range(21):
        done(every)
    for seq in range(2):
        every.enqueue("tiny", operation("t", seq))
    assert [done(every) for _ in range(2)] == [("tiny", 0), ("tiny", 1)]


def test_one_who_comes_again_and_again_does_not_keep_others_from_their_turns() -> None:
    every = filled(heavy=40)
    users: list[str] = []
    for seq in range(20):
        every.enqueue("often", operation("o", seq))
        users += [one[0] for _ in range(2) if (one := done(every))]
    assert 18 <= users.count("heavy") <= 22


def test_users_have_turns_by_their_weights() -> None:
    every = filled(half=60, one=60, two=60)
    every.turns.weights |= {"half": 0.5, "two": 2.0}
    users = [one[0] for _ in range(70) if (one := done(every))]
    assert [users.count(name) for name in ("half", "one", "two")] == [10, 20, 40]


def test_pieces_of_different_sizes_come_to_the_same_shares() -> None:
    every = filled(small=400, large=400)
    had: dict[str, float] = {"small": 0.0, "large": 0.0}
    for _ in range(200):
        chosen = every.choose()
        assert chosen is not None
        cost = 300.0 if chosen[0].user == "small" else 1900.0
        every.charge(chosen[0], cost)
        every.applied(*chosen)
        had[chosen[0].user] += cost
    assert abs(had["small"] - had["large"]) < 0.05 * had["large"]


def test_who_was_away_has_no_claim_to_the_time_that_was_not_used() -> None:
    every = filled(first=40)
    for _ in range(20):
        done(every)
    for seq in range(20):
        every.enqueue("second", operation("s", seq))
    users = [one[0] for _ in range(20) if (one := done(every))]
    assert 7 <= users.count("first") <= 13


def test_a_user_has_bounds_that_cost_nobody_else() -> None:
    every = Models()
    big = b"x" * MAX_BODY_BYTES
    for seq in range(models.MAX_WAITING_BYTES // MAX_BODY_BYTES):
        every.check_room("ada", operation("a", seq, big))
        every.enqueue("ada", operation("a", seq, big))
    with pytest.raises(BusyError, match="wait for user 'ada'"):
        every.check_room("ada", operation("a", 99, big))
    every.check_room("bob", operation("b", 0, big))
    done(every)
    every.check_room("ada", operation("a", 99, big))


def test_numbers_far_ahead_and_models_without_end_are_refused() -> None:
    every = Models()
    with pytest.raises(StateError, match="too far ahead: number 0 is next"):
        every.check_room("ada", operation("a", models.MAX_AHEAD))
    for number in range(models.MAX_MODELS):
        every.enqueue("ada", operation(f"a{number}", 0))
    with pytest.raises(QuotaError, match="has 256 models"):
        every.check_room("ada", operation("more", 0))


# -- What samplers draw with: found on the trainer's disk or fetched, and newer as it is saved -----


torch.set_num_threads(1)


async def save(trainer: Trainer, seq: int, kind: str, **more: object) -> SamplerName:
    """Save weights without a name; return what is sampled from."""
    body = {"model_id": MODEL, "seq_id": seq, "sampling_session_seq_id": seq, "kind": kind, **more}
    await trainer.send("save_weights_for_sampler", seq, body)
    result = await trainer.result(seq)
    assert result.state == "done", result.error
    return SamplerName.parse(json.loads(result.body)["sampling_session_id"])


async def test_a_sampler_finds_what_is_saved_wherever_the_disk_is(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, elsewhere = tmp_path / "states", JobScope("local", "elsewhere")
    here = Snapshots(trainer.broker, SCOPE, states)
    away = Snapshots(trainer.broker, elsewhere, tmp_path / "nothing")
    (tmp_path / "nothing").mkdir()
    async with (
        trainer.running(),
        await Service.start(trainer.broker, name="parts", description="parts") as service,
    ):
        await trainer.send("create_model", 0, create())
        fixed = await save(trainer, 1, "snapshot")
        moves = await save(trainer, 2, "inflight")
        monkeypatch.setattr(exports, "PART_BYTES", 1000)
        await CatalogueService(Catalogue(states), Models()).open(service, elsewhere)
        assert (fixed.moves, moves.moves) == (False, True)
        for source, seq in ((fixed, 1), (moves, 2)):
            local, remote = await here.find("ada", source), await away.find("ada", source)
            assert (local.name, local.version) == (remote.name, remote.version)
            assert local.version == seq
            assert local.folder is not None
            assert remote.folder is None
            fetched = await away.fetch(remote)
            assert {file.name for file in fetched.iterdir()} == set(ADAPTER_FILES)
            weights = "adapter_model.safetensors"
            assert (fetched / weights).read_bytes() == (local.folder / weights).read_bytes()
            config = json.loads((local.folder / ADAPTER_CONFIG).read_text())
            with_base = {**config, "base_model_name_or_path": BASE}
            assert json.loads((fetched / ADAPTER_CONFIG).read_text()) == with_base
            away.free(remote)
            assert not fetched.exists()
        assert (here.is_here, away.is_here) == (True, False)
        await trainer.send("optim_step", 3, step_body(3))
        await save(trainer, 4, "inflight")
        assert await versions(here, away, moves) == (4, 4)
        assert await versions(here, away, fixed) == (1, 1)
        for one in (here, away):
            with pytest.raises(NotFoundError):
                await one.find("bob", fixed)
            with pytest.raises(NotFoundError):
                await one.find("bob", moves)
        await refused_with_a_name(trainer)
    away.close()


async def versions(here: Snapshots, away: Snapshots, source: SamplerName) -> tuple[int, int]:
    """Return which operations have saved what is found."""
    return (await here.find("ada", source)).version, (await away.find("ada", source)).version


async def refused_with_a_name(trainer: Trainer) -> None:
    """Weights with a name stay what they are."""
    body = {"model_id": MODEL, "seq_id": 5, "path": "named", "kind": "inflight"}
    await trainer.send("save_weights_for_sampler", 5, body)
    result = await trainer.result(5)
    assert (result.state, result.category) == ("failed", "user")
    assert "kind='inflight' is not offered for weights with a name" in result.error


@pytest.mark.full
async def test_without_a_trainer_nothing_is_guessed(own_broker: Broker, tmp_path: Path) -> None:
    snapshots = Snapshots(own_broker, SCOPE, tmp_path)
    source = SamplerName("s1", 0, f"tinker://{MODEL}/sampler_weights/passing-1")
    with pytest.raises(NobodyAnswersError):
        await snapshots.find("ada", source)
    assert CheckpointFolders(tmp_path).mark == ""


# -- Models that begin with a checkpoint: which may be, and that nothing hangs on it afterwards ----


torch.set_num_threads(1)
OTHER = "s2:train:0"


async def save_as(trainer: Trainer, seq: int, name: str, model: str = MODEL) -> str:
    await trainer.send(
        "save_weights", seq, {"model_id": model, "seq_id": seq, "path": name}, model=model
    )
    assert (await trainer.result(seq, model=model)).state == "done"
    return f"tinker://{model}/weights/{name}"


async def load(trainer: Trainer, path: str, model: str = OTHER, **more: object) -> str:
    """Let a new model begin with a checkpoint; return why not."""
    session = model.split(":")[0]
    body = {"session_id": session, "model_seq_id": 0, "path": path, **more}
    await trainer.send("load_weights", 0, body, model=model)
    return (await trainer.result(0, model=model)).error


async def test_a_checkpoint_may_go_once_it_was_loaded_whatever_ends_then(trainer: Trainer) -> None:
    """A trainer that begins anew neither loads it again nor saves again what was deleted."""
    async with trainer.running(drains=False):
        await trainer.send("create_model", 0, create())
        path = await save_as(trainer, 1, "first")
        assert await load(trainer, path, optimizer=True) == ""
        before = await save_as(trainer, 1, "copied", OTHER)
        for one in (path, before):
            await trainer.ask(
                "ada", "change", ChangeCheckpoint(path=one, action="delete"), TinkerCheckpoint
            )
    async with trainer.running():
        await save_as(trainer, 2, "again", OTHER)
        for one in (path, before):
            with pytest.raises(NotFoundError, match="was deleted"):
                await trainer.checkpoint(one)
    kinds = {event.kind for event in await read_events(trainer.broker, SCOPE)}
    assert "replay_differs" not in kinds


async def test_what_a_model_begins_with_is_in_its_state_before_anybody_is_told(
    trainer: Trainer,
) -> None:
    """It may be deleted from then on."""
    async with trainer.running() as service:
        await trainer.send("create_model", 0, create())
        path = await save_as(trainer, 1, "first")
        body = {"session_id": "s2", "model_seq_id": 0, "path": path}
        await trainer.send("load_weights", 0, body, model=OTHER)
        while (await trainer.result(0, model=OTHER, wait_s=0.001)).state == "pending":
            pass
        model = service.models.find("ada", ModelName.parse(OTHER))
        assert model is not None
        assert model.saved == model.applied == 0


async def test_what_cannot_be_loaded_is_told_by_the_result(trainer: Trainer) -> None:
    async with trainer.running():
        await trainer.send("create_model", 0, create())
        path = await save_as(trainer, 1, "first")
        folders = trainer.folders
        words = await load(trainer, path, "s3:train:0", base_model="org/other")
        assert "is an adapter of tiny, not of org/other" in words
        stored = folders.find("ada", _name(path))
        folders.commit(replace(stored, info=stored.info.model_copy(update={"base": "org/other"})))
        assert "is an adapter of org/other, not of tiny" in await load(trainer, path, "s4:train:0")
        folders.commit(replace(stored, expires=5.0))
        assert "has expired: its time was over at 1970-01-01" in await load(trainer, path)
        none = await load(trainer, path.replace("first", "none"), "s5:train:0")
        assert "there is no checkpoint" in none
        with pytest.raises(NotFoundError, match="there is no session s1"):
            await trainer.send("create_model", 0, create("s1"), "bob", "s1:train:1")


async def test_models_of_sessions_that_are_over_make_room(trainer: Trainer) -> None:
    async def tell(session: str, event: str) -> None:
        told = TellSession.model_validate({"session": session, "event": event})
        await trainer.ask("ada", "session", told, SessionState)

    async with trainer.running() as service:
        service.models.max_models = 2
        for session in ("s1", "s2"):
            await tell(session, "begin")
            await trainer.send("create_model", 0, create(session), model=f"{session}:train:0")
            assert (await trainer.result(0, model=f"{session}:train:0")).state == "done"
        path = await save_as(trainer, 1, "kept")
        with pytest.raises(QuotaError, match="user 'ada' has 2 models here"):
            await trainer.send("create_model", 0, create("s3"), model="s3:train:0")
        await tell("s1", "finish")
        assert not (await trainer.send("create_model", 0, create("s1"))).is_new  # sent once more
        for model in ("s1:train:0", "s1:train:1"):
            kind, seq = ("optim_step", 2) if model == "s1:train:0" else ("create_model", 0)
            with pytest.raises(SessionOverError, match="session s1 is over: finished") as error:
                await trainer.send(kind, seq, create("s1"), model=model)
            assert (error.value.status, (await trainer.log.read_all())[1]) == (410, [])
        await trainer.send("create_model", 0, create("s3"), model="s3:train:0")
        assert (await trainer.result(0, model="s3:train:0")).state == "done"
        with pytest.raises(NotFoundError, match="there is no model s1:train:0"):
            await trainer.info()
        assert (await trainer.checkpoint(path)).rank == 4
    async with trainer.running():
        with pytest.raises(NotFoundError, match="there is no model s1:train:0"):
            await trainer.info()
        assert (await trainer.result(0, model="s2:train:0")).state == "done"


def _name(path: str) -> CheckpointName:
    return CheckpointName.parse(path)
