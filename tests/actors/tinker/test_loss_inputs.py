"""Bad data and settings are refused with what is wrong, before anything is computed."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.schemas.tinker.datum import AdamParams, Datum, LoraSpec
from tinkermq.schemas.wire.errors import ConfigError, DataError

from tests.support.models import make_tiny_model
from tests.support.tinker import group, open_trainer, supervised

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
            "datum 1 has 5000 tokens, the model reads 4096 at most",
        ),
        ("cross_entropy", [], "a call without data"),
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
    for loss in ("importance_sampling", "ppo", "cispo", "gspo"):
        data = group(1)
        for one in data:
            one.inputs["logprobs"][one.inputs["advantages"] == 0] = -1e30
        told = trainer.forward_backward("m", data, loss)
        assert np.isfinite(told.metrics["loss:sum"])
        assert trainer.optim_step("m", AdamParams(0.0))["skipped:sum"] == 0
