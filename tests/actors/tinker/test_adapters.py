"""Adapters within their room: evicted, refused, mixed in one pass, with bad data."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.tinker.training.folders import read_adapter
from tinkermq.actors.tinker.training.loss_pass import LossPass
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import read_events
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.tinker import wire
from tinkermq.schemas.tinker.datum import AdamParams, Datum, LoraSpec
from tinkermq.schemas.tinker.names import CheckpointName, ModelName
from tinkermq.schemas.tinker.operation import ALONE, Company, ModelOperation, OperationKind
from tinkermq.schemas.wire.errors import (
    ConfigError,
    DataError,
    ModelError,
    NotFoundError,
    StateError,
)

from tests.support.models import make_tiny_model
from tests.support.tinker import (
    group,
    open_trainer,
    random_tokens,
    same_bits,
    sampled,
    supervised,
)
from tests.support.tinker_service import SCOPE, Trainer, create, loss, step_body
from tests.support.waiting import eventually

torch.set_num_threads(1)
SESSIONS = [f"s{number}" for number in range(4)]


def steps(trainer: AdapterTrainer, file: Path | None) -> None:
    """Train two steps; with a file the model is out of memory between all calls."""
    for seed in range(4):
        trainer.forward_backward("m", group(seed), "ppo")
        if file is not None:
            trainer.suspend("m", file)
            assert trainer.models == []
            trainer.resume("m", file)
        if seed % 2:
            trainer.optim_step("m", AdamParams(0.01))


def test_what_is_written_down_is_pending_gradients_too(base: Path, tmp_path: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for file in (None, tmp_path / "m"):
        trainer = open_trainer(base)
        trainer.create("m", LoraSpec(4, seed=3))
        steps(trainer, file)
        found.append(trainer.tensors("m"))
    assert same_bits(*found)


def test_a_step_behind_a_call_that_failed_fails_after_it_was_written_down(
    base: Path, tmp_path: Path
) -> None:
    trainer = open_trainer(base)
    trainer.create("m", LoraSpec(4))
    with pytest.raises(DataError):
        trainer.forward_backward("m", [], "ppo", operation="operation 1")
    trainer.suspend("m", tmp_path / "m")
    trainer.resume("m", tmp_path / "m")
    with pytest.raises(DataError, match="since operation 1 failed"):
        trainer.optim_step("m", AdamParams(0.01))


def test_a_file_that_is_damaged_is_said_to_be(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "m"
    file.write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="cannot be read"):
        open_trainer(base).resume("m", file)


async def run_sessions(trainer: Trainer) -> dict[str, bytes]:
    """Train all sessions at the same time; return the adapters that they save."""
    await asyncio.gather(*(_run_session(trainer, session) for session in SESSIONS))
    return {session: _saved(trainer, session) for session in SESSIONS}


async def _run_session(trainer: Trainer, session: str) -> None:
    model = f"{session}:train:0"
    kinds: list[OperationKind] = ["forward_backward", "optim_step"] * 2
    await trainer.send("create_model", 0, create(session), model=model)
    for seq, kind in enumerate(kinds, 1):
        body = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.01}}
        raw = loss(seq + ord(session[1])) if kind == "forward_backward" else json.dumps(body)
        await trainer.send(kind, seq, raw if isinstance(raw, bytes) else raw.encode(), model=model)
        assert (await trainer.result(seq, model=model)).state == "done"
    body = {"model_id": model, "seq_id": 5, "path": "end"}
    await trainer.send("save_weights", 5, body, model=model)
    assert (await trainer.result(5, model=model)).state == "done"


def _saved(trainer: Trainer, session: str) -> bytes:
    name = CheckpointName(ModelName(session, 0), "weights", "end")
    return (trainer.folders.find("ada", name).folder / "adapter_model.safetensors").read_bytes()


@pytest.mark.full
async def test_sessions_on_room_for_fewer_adapters_end_as_those_with_room_for_all(
    own_server: NatsServer, own_broker: Broker, base: Path, tmp_path: Path
) -> None:
    await create_job_streams(own_broker, SCOPE, LimitsConfig(), operations=True)
    trainer = Trainer(own_server.url, own_broker, base, tmp_path / "states")
    async with trainer.running() as service:
        undisturbed = await run_sessions(trainer)
        assert service.worker.cache.num_suspended == 0
    trainer.begin_anew()
    for session in SESSIONS:
        await trainer.log.forget("ada", ModelName(session, 0))
    async with trainer.running(adapters_in_memory=2) as service:
        assert await run_sessions(trainer) == undisturbed
        assert service.worker.cache.num_suspended > 0
    async with trainer.running(adapters_in_memory=1):  # what was not in a state is done again
        for session in SESSIONS:
            name = f"{session}:train:0"
            await trainer.send("optim_step", 6, {"model_id": name, "seq_id": 6}, model=name)
            assert (await trainer.result(6, model=name)).category == "user"
    assert "replay_differs" not in {event.kind for event in await read_events(own_broker, SCOPE)}


@pytest.mark.full
async def test_what_left_the_memory_and_is_not_used_leaves_the_log_too(
    own_server: NatsServer, own_broker: Broker, base: Path, tmp_path: Path
) -> None:
    await create_job_streams(own_broker, SCOPE, LimitsConfig(), operations=True)
    trainer = Trainer(own_server.url, own_broker, base, tmp_path / "states")

    async def logs_nothing() -> bool:
        return await trainer.log.read_all() == ([], [])

    async with trainer.running(adapters_in_memory=2, idle_s=1.0) as service:
        saved = await run_sessions(trainer)
        assert service.worker.cache.num_suspended > 0
        await eventually(logs_nothing, "the log to be trimmed")
    async with trainer.running():
        for session in SESSIONS:
            name = f"{session}:train:0"
            body = {"model_id": name, "seq_id": 6, "path": "again"}
            await trainer.send("save_weights", 6, body, model=name)
            assert (await trainer.result(6, model=name)).state == "done"
            again = CheckpointName(ModelName(session, 0), "weights", "again")
            file = trainer.folders.find("ada", again).folder / "adapter_model.safetensors"
            assert file.read_bytes() == saved[session]


# -- Which adapters there may be, what they hold, and what fails the step behind it ----------------


torch.set_num_threads(1)

SPEC = LoraSpec(8, seed=7)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> AdapterTrainer:
    """A trainer for tests that look at models of their own."""
    return open_trainer(make_tiny_model(tmp_path_factory.mktemp("adapters") / "base"))


def test_bytes_are_known_before_and_while_they_are_held(shared: AdapterTrainer) -> None:
    spec = LoraSpec(8)
    most = shared.num_bytes_of(spec)
    shared.create("m", spec)
    assert shared.num_bytes("m") == most // 4
    shared.forward_backward("m", group(0), "ppo")
    assert shared.num_bytes("m") == most // 2
    shared.optim_step("m", AdamParams(1e-3))
    assert shared.num_bytes("m") == most
    numbers = sum(tensor.numel() for tensor in shared.tensors("m").values())
    assert most // 16 >= numbers > most // 17
    assert shared.num_bytes_of(LoraSpec(8, train_unembed=False)) < most
    shared.evict("m")
    assert "m" not in shared.models


def test_a_failed_call_fails_the_optim_step_behind_it(shared: AdapterTrainer) -> None:
    shared.create("m", SPEC)
    before = shared.tensors("m")
    shared.forward_backward("m", group(0), "ppo")
    with pytest.raises(DataError, match="the call has no data"):
        shared.forward_backward("m", [], "ppo", operation="forward_backward 17")
    shared.forward_backward("m", group(1), "ppo")
    with pytest.raises(DataError, match="since forward_backward 17 failed: the call has no data"):
        shared.optim_step("m", AdamParams(1e-2))
    assert same_bits(before, shared.tensors("m"))
    told = shared.optim_step("m", AdamParams(1e-2))
    assert told["grad_norm:mean"] == 0, "what was added to the window is forgotten with it"

    with pytest.raises(DataError):
        shared.forward_backward("m", [], "ppo", backward=False)
    shared.optim_step("m", AdamParams(1e-2))

    shared.window("m").fail("forward_backward 4", "its body was lost")
    shared.window("m").fail("forward_backward 5", "that one, too")
    with pytest.raises(DataError, match="since forward_backward 4 failed: its body was lost"):
        shared.optim_step("m", AdamParams(1e-2))

    shared.begin("m", group(0), "ppo", operation="forward_backward 8")
    assert shared.window("m").num_calls == 1
    with pytest.raises(DataError, match="forward_backward 8 failed: it was not finished"):
        shared.optim_step("m", AdamParams(1e-2))
    shared.evict("m")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LoraSpec(129), "rank 129 is not offered"),
        (LoraSpec(0), "rank 0 is not offered"),
        (LoraSpec(4, 0, False, False, False), "the adapter has no layers"),
    ],
)
def test_an_adapter_that_is_not_offered_is_refused(
    shared: AdapterTrainer, spec: LoraSpec, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shared.create("m", spec)
    with pytest.raises(ConfigError, match=message):
        shared.num_bytes_of(spec)
    assert "m" not in shared.models


def test_a_model_is_made_once_and_known_by_its_name(shared: AdapterTrainer) -> None:
    shared.create("m", SPEC)
    with pytest.raises(StateError, match="model m has an adapter"):
        shared.create("m", SPEC)
    shared.evict("m")
    with pytest.raises(NotFoundError, match="model m has no adapter in memory"):
        shared.optim_step("m", AdamParams(1e-2))


# -- Micro-batches of several models in one pass: done again, they come to the same bits -----------


torch.set_num_threads(1)
SPECS = {
    "a": LoraSpec(4),
    "m": LoraSpec(8, seed=1),
    "z": LoraSpec(16, train_unembed=False, train_mlp=False),
}
USERS = ("ada", "bob", "cyd")


@pytest.fixture(scope="module")
def mixed(base: Path) -> AdapterTrainer:
    return open_trainer(base, mixed=True)


def middle(seed: int) -> list[Datum]:
    rng = np.random.default_rng(seed)
    return [supervised(rng, 20) for _ in range(3)]


def answers(seed: int) -> list[Datum]:
    rng = np.random.default_rng(seed)
    return [sampled(rng, random_tokens(rng, 6), 11 + at) for at in range(3)]


def three(trainer: AdapterTrainer, seed: int) -> list[LossPass]:
    """Begin a pass of each of three models, over data of different lengths."""
    data = [answers(seed), middle(seed), answers(seed + 1)]
    losses = ["importance_sampling", "cross_entropy", "ppo"]
    return [
        trainer.begin(model, one, name)
        for model, one, name in zip(SPECS, data, losses, strict=True)
    ]


def make(trainer: AdapterTrainer) -> None:
    for model in trainer.models:
        trainer.evict(model)
    for model, spec in SPECS.items():
        trainer.create(model, spec)


def step(trainer: AdapterTrainer) -> None:
    for model in SPECS:
        trainer.optim_step(model, AdamParams(1e-2))


def largest_difference(some: Sequence[Any], others: Sequence[Any]) -> float:
    return max(float(abs(a - b).max()) for a, b in zip(some, others, strict=True))


def test_models_beside_each_other_learn_what_they_learn_alone(
    base: Path, mixed: AdapterTrainer
) -> None:
    alone = open_trainer(base)
    told: dict[bool, list[Any]] = {}
    for trainer in (alone, mixed):
        make(trainer)
        for seed in range(3):
            passes = three(trainer, seed)
            if trainer is mixed:
                assert trainer.advance(passes) == passes
            else:
                assert trainer.advance(passes) == passes[:1]
                for one in passes[1:]:
                    trainer.advance([one])
            step(trainer)
        told[trainer is mixed] = [one.result().logprobs[0] for one in passes]
        assert [one.companies[0] == ALONE for one in passes] == [trainer is alone] * 3
    assert largest_difference(told[True], told[False]) < 1e-4
    for model in SPECS:
        pairs = alone.tensors(model), mixed.tensors(model)
        assert largest_difference(list(pairs[0].values()), list(pairs[1].values())) < 1e-3


def test_a_pass_that_is_done_again_among_strangers_has_the_same_bits(
    base: Path, mixed: AdapterTrainer
) -> None:
    make(mixed)
    companies: list[list[Company]] = []
    expected: list[Any] = []
    for seed in range(3):
        passes = three(mixed, seed)
        mixed.advance(passes)
        companies += [passes[1].companies]
        expected += passes[1].result().logprobs
        step(mixed)
    assert all(one[0].before > 0 and one[0].behind > 0 for one in companies)
    again = open_trainer(base)
    again.create("m", SPECS["m"])
    told: list[Any] = []
    for seed in range(3):
        some = again.begin("m", middle(seed), "cross_entropy", companies=companies[seed])
        again.advance([some])
        told += some.result().logprobs
        again.optim_step("m", AdamParams(1e-2))
    assert all(np.array_equal(one, other) for one, other in zip(expected, told, strict=True))
    assert same_bits(mixed.tensors("m"), again.tensors("m"))


def test_what_was_alone_before_has_no_company_now(mixed: AdapterTrainer) -> None:
    make(mixed)
    rng = np.random.default_rng(0)
    free = mixed.begin("a", [supervised(rng, 20)], "cross_entropy")
    bound = mixed.begin("m", [supervised(rng, 20)], "cross_entropy", companies=[])
    only_forward = mixed.begin("z", [supervised(rng, 20)], "cross_entropy", backward=False)
    assert mixed.advance([bound, free, only_forward]) == [bound]
    assert mixed.advance([free, only_forward]) == [free]
    assert (bound.companies, free.companies) == ([ALONE], [ALONE])


class Broken:
    """A part of a loss that fails when it is computed."""

    def read(self, *_: Any, **__: Any) -> Any:
        raise ArithmeticError("broken")


@pytest.mark.full
def test_a_pass_that_fails_takes_nobody_with_it(base: Path, mixed: AdapterTrainer) -> None:
    alone = open_trainer(base)
    for trainer in (alone, mixed):
        make(trainer)
        trainer.forward_backward("a", group(5), "ppo")
    expected = three(alone, 0)[0]
    alone.advance([expected])
    good, bad, third = passes = three(mixed, 0)
    bad._output = Broken()  # pyright: ignore[reportAttributeAccessIssue]
    assert mixed.advance(passes) == [good]
    assert good.companies == [ALONE]
    with pytest.raises(ArithmeticError, match="broken"):
        mixed.advance([bad, third])
    for trainer in (alone, mixed):
        trainer.optim_step("a", AdamParams(1e-2))
    assert same_bits(alone.tensors("a"), mixed.tensors("a"))


async def test_a_service_that_mixes_and_dies_comes_to_the_bits_that_it_told(
    own_server: NatsServer, own_broker: Broker, base: Path, tmp_path: Path
) -> None:
    await create_job_streams(own_broker, SCOPE, LimitsConfig(), operations=True)
    trainer = Trainer(own_server.url, own_broker, base, tmp_path / "tinker")
    models = {user: f"{user}:train:0" for user in USERS}

    def operation(user: str, seq: int) -> ModelOperation:
        model = models[user]
        if not seq:
            body = json.dumps(create(user)).encode()
            return ModelOperation(kind="create_model", model=model, seq=0, body=body)
        if seq % 2:
            return ModelOperation(kind="forward_backward", model=model, seq=seq, body=loss(seq))
        body = json.dumps(step_body(seq)).encode()
        return ModelOperation(kind="optim_step", model=model, seq=seq, body=body)

    async def put_into_log(first: int, last: int) -> None:
        for user in USERS:
            for seq in range(first, last + 1):
                await trainer.log.append(user, operation(user, seq))

    async def until(last: int) -> None:
        for user, model in models.items():
            assert (await trainer.result(last, user, model)).state == "done"

    await put_into_log(0, 0)
    async with trainer.running():  # then all of them are at the same place
        await until(0)
    await put_into_log(1, 11)
    tinker = {"mixed_micro_batches": True, "adapters_in_memory": 2}
    async with trainer.running(drains=False, **tinker) as service:
        await until(11)
        resident = [service.worker.cache.is_in_memory(model) for model in service.models]
        assert sum(resident) == 2  # company brings nobody else in
        told = [
            await trainer.result(seq, user, model)
            for user, model in models.items()
            for seq in range(1, 12, 2)
        ]
    assert sum(bool(one.companies) for one in told) > 1
    await put_into_log(12, 14)
    async with trainer.running():  # done again, and no longer mixed
        await until(14)
    kinds = {event.kind for event in await read_events(own_broker, SCOPE)}
    assert "replay_differs" not in kinds
    states, _ = trainer.states.read_all()
    told_of = {user: told[6 * at : 6 * at + 6] for at, user in enumerate(USERS)}
    again = open_trainer(base, max_rank=16)
    for state in states:
        companies = [one.companies for one in told_of[state.user]]
        tensors = _train_alone(again, state.user, state.applied, companies)
        assert same_bits(dict(read_adapter(state.folder, with_optimizer=False).tensors), tensors)


def _train_alone(
    trainer: AdapterTrainer, user: str, last: int, companies: list[list[Company]]
) -> dict[str, torch.Tensor]:
    """Return the adapter of a user's operations 0 to `last`, computed with recorded companies."""
    body = wire.CreateModelBody.parse(json.dumps(create(user)).encode())
    trainer.create(user, body.lora_config.spec())
    for seq in range(1, last + 1):
        if seq % 2:
            request = wire.request_of(wire.parse_request(loss(seq)))
            recorded = companies[seq // 2] if seq // 2 < len(companies) else []
            some = trainer.begin(user, request.data, request.loss_fn, companies=recorded)
            while some.num_left:
                trainer.advance([some])
        else:
            step_of = wire.OptimStepBody.parse(json.dumps(step_body(seq)).encode())
            trainer.optim_step(user, step_of.params())
    return trainer.tensors(user)


# -- Bad data and settings are refused with what is wrong, before anything is computed -------------


torch.set_num_threads(1)
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> AdapterTrainer:
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("inputs") / "base")
    made = open_trainer(folder)
    made.create("m", LoraSpec(2))
    return made


def changed(loss: str, name: str, value: Any, at: Any = 3) -> list[Datum]:
    """Return three datums of which the second has one value, or a whole field, replaced."""
    rng = np.random.default_rng(0)
    data = [supervised(rng, 8) for _ in range(3)] if loss == "cross_entropy" else group(0)[:3]
    one = data[1]
    fields = {"tokens": one.tokens, **one.inputs}
    if at is None:
        fields[name] = value
    else:
        fields[name] = fields[name].copy()
        fields[name][at] = value
    given = {key: array for key, array in fields.items() if array is not None and key != "tokens"}
    data[1] = Datum(fields["tokens"], given)
    return data


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


def ids(*shape: int) -> np.ndarray:
    return np.full(shape, 9, dtype=np.int64)


LONG = {"target_tokens": ids(5000), "weights": zeros(5000)}


@pytest.mark.parametrize(
    ("loss", "data", "message"),
    [
        ("ppo", changed("ppo", "tokens", 264), r"tokens\[3\] of datum 1 is 264, .* 0 to 263"),
        ("ppo", changed("ppo", "tokens", -1, 0), r"tokens\[0\] of datum 1 is -1"),
        ("ppo", changed("ppo", "target_tokens", -100), r"target_tokens\[3\] of datum 1 is -100"),
        ("ppo", changed("ppo", "target_tokens", 264), r"target_tokens\[3\] of datum 1 is 264"),
        ("ppo", changed("ppo", "advantages", NAN), r"advantages\[3\] of datum 1 is nan"),
        ("ppo", changed("ppo", "logprobs", -INF, 1), r"logprobs\[1\] of datum 1 is -inf"),
        (
            "cross_entropy",
            changed("cross_entropy", "weights", np.full(8, 1e300), None),
            r"weights\[0\] of datum 1 is 1e\+300",
        ),
        ("ppo", changed("ppo", "advantages", None, None), "datum 1 has no advantages, which"),
        ("ppo", changed("ppo", "target_tokens", None, None), "datum 1 has no target_tokens"),
        ("cross_entropy", changed("cross_entropy", "weights", None, None), "1 has no weights"),
        ("ppo", changed("ppo", "rewards", zeros(8), None), "datum 1 has an input 'rewards'"),
        ("ppo", changed("ppo", "advantages", zeros(2), None), r"advantages of .* shape \[2\]"),
        ("ppo", changed("ppo", "target_tokens", ids(2), None), r"shape \[2\], its tokens are"),
        (
            "cross_entropy",
            changed("cross_entropy", "target_tokens", ids(8, 2), None),
            r"weights of datum 1 have the shape \[8\], its target_tokens \[8, 2\]",
        ),
        (
            "cross_entropy",
            changed("cross_entropy", "target_tokens", ids(8, 0), None),
            r"target_tokens of datum 1 have the shape \[8, 0\]",
        ),
        (
            "cross_entropy",
            changed("cross_entropy", "target_tokens", zeros(8), None),
            "target_tokens of datum 1 are float32",
        ),
        (
            "cross_entropy",
            changed("cross_entropy", "weights", np.array(["a"] * 8), None),
            "weights of datum 1 are <U1",
        ),
        (
            "cross_entropy",
            changed("cross_entropy", "tokens", zeros(8), None),
            r"tokens of datum 1 are float32 of shape \[8\]",
        ),
        (
            "importance_sampling",
            [Datum(one.tokens, {k: v[:, None] for k, v in one.inputs.items()}) for one in group(0)],
            "loss_fn importance_sampling takes one target for each token",
        ),
        ("cross_entropy", [Datum(ids(0), LONG)], "datum 0 has no tokens"),
        (
            "cross_entropy",
            [supervised(np.random.default_rng(0), 3), Datum(ids(5000), LONG)],
            "datum 1 has 5000 tokens, more than the model's 4096",
        ),
        ("cross_entropy", [], "the call has no data"),
    ],
)
def test_bad_data_is_refused(
    trainer: AdapterTrainer, loss: str, data: list[Datum], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        trainer.forward_backward("m", data, loss)
    with pytest.raises(DataError, match=message):
        trainer.optim_step("m", AdamParams(1e-3))
    assert trainer.optim_step("m", AdamParams(1e-3))["grad_norm:mean"] == 0


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("stable_reinforce", {}, "stable_reinforce is not offered.*\n.*importance_sampling"),
        ("dpo", {}, "there is no loss_fn 'dpo'\n.*cross_entropy"),
        ("ppo", {"clip_low": 0.2}, "loss_fn ppo has no setting 'clip_low'\n.*clip_low_threshold"),
        ("cross_entropy", {"beta": 0.2}, "no setting 'beta'\n.*it has none"),
        ("dro", {"beta": NAN}, "beta of loss_fn dro is nan"),
        ("dro", {"beta": "much"}, "beta of loss_fn dro is 'much'"),
        ("cispo", {"clip_high_threshold": -1.0}, "clip_high_threshold of loss_fn cispo is -1"),
        ("ppo", {"clip_low_threshold": 1.5}, r"clip_low_threshold of loss_fn ppo is 1\.5, above"),
    ],
)
def test_a_loss_that_is_not_offered_is_refused(
    trainer: AdapterTrainer, loss: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        trainer.forward_backward("m", group(0), loss, config, backward=False)
    assert re.search(message, str(caught.value), re.DOTALL)


def test_a_call_for_log_probs_needs_no_weights_and_passes_over_what_is_beside(
    trainer: AdapterTrainer,
) -> None:
    rl = group(0)
    told = trainer.forward_backward("m", rl, "cross_entropy", backward=False)
    wanted = trainer.forward_backward("m", rl, "ppo", backward=False)
    assert all(np.array_equal(*pair) for pair in zip(told.logprobs, wanted.logprobs, strict=True))
    total = sum(float(one.sum()) for one in told.logprobs)
    assert told.metrics["loss:sum"] == pytest.approx(-total, rel=1e-5)
    assert {name.count(":") for name in wanted.metrics} == {1}


def test_log_probs_that_belong_to_no_advantage_may_be_anything(trainer: AdapterTrainer) -> None:
    for name in ("importance_sampling", "ppo", "cispo", "gspo"):
        data = group(1)
        for one in data:
            one.inputs["logprobs"][one.inputs["advantages"] == 0] = -1e30
        told = trainer.forward_backward("m", data, name)
        assert np.isfinite(told.metrics["loss:sum"])
        assert trainer.optim_step("m", AdamParams(0.0))["skipped:sum"] == 0
