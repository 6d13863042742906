"""Micro-batches of several models in one pass: done again, they come to the same bits."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.tinker.replay import replay_session
from tinkermq.actors.tinker.training.loss_pass import LossPass
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import read_events
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.nats_server import NatsServer
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.tinker.datum import AdamParams, Datum, LoraSpec
from tinkermq.schemas.tinker.operation import ALONE, Company, ModelOperation

from tests.actors.tinker.test_replaying import record
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

torch.set_num_threads(1)
SPECS = {
    "a": LoraSpec(4),
    "m": LoraSpec(8, seed=1),
    "z": LoraSpec(16, train_unembed=False, train_mlp=False),
}
USERS = ("ada", "bob", "cyd")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("mixed") / "base")


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
    for user in USERS:
        [found] = replay_session(record(base, tmp_path), user)
        assert (found.identical, found.operations) == (True, 15), found.differing
