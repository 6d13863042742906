"""Which adapters there may be, what they hold, and what fails the step behind it."""

import pytest
import torch
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.schemas.tinker.datum import AdamParams, LoraSpec
from tinkermq.schemas.wire.errors import ConfigError, DataError, NotFoundError, StateError

from tests.support.models import make_tiny_model
from tests.support.tinker import group, open_trainer, same_bits

torch.set_num_threads(1)

SPEC = LoraSpec(8, seed=7)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> AdapterTrainer:
    """A trainer for tests that look at models of their own."""
    return open_trainer(make_tiny_model(tmp_path_factory.mktemp("windows") / "base"))


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
    with pytest.raises(DataError, match="a call without data"):
        shared.forward_backward("m", [], "ppo", operation="forward_backward 17")
    shared.forward_backward("m", group(1), "ppo")
    with pytest.raises(DataError, match="since forward_backward 17 failed: a call without data"):
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
    with pytest.raises(DataError, match="forward_backward 8 failed: it did not come to its end"):
        shared.optim_step("m", AdamParams(1e-2))
    shared.evict("m")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LoraSpec(129), "rank 129 is not offered"),
        (LoraSpec(0), "rank 0 is not offered"),
        (LoraSpec(4, 0, False, False, False), "an adapter of no layers"),
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


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (AdamParams(float("nan")), "learning_rate is nan"),
        (AdamParams(-1.0), r"learning_rate is -1\.0"),
        (AdamParams(1e-3, beta1=1.0), r"beta1 is 1\.0"),
        (AdamParams(1e-3, grad_clip_norm=float("inf")), "grad_clip_norm is inf"),
    ],
)
def test_an_optimiser_that_makes_no_sense_is_refused_without_effect(
    shared: AdapterTrainer, params: AdamParams, message: str
) -> None:
    shared.create("m", SPEC)
    shared.forward_backward("m", group(0), "ppo")
    with pytest.raises(ConfigError, match=message):
        shared.optim_step("m", params)
    assert shared.optim_step("m", AdamParams(1e-3))["grad_norm:mean"] > 0
    shared.evict("m")
