"""What adapters are trained to, against transformers and PEFT; they come back to the bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tinkermq.actors.policy.model_folder import load_causal_lm
from tinkermq.actors.policy.tiny_models import make_model, make_tokenizer
from tinkermq.actors.tinker.training.loss_pass import LossPass
from tinkermq.actors.tinker.training.trainer import AdapterTrainer
from tinkermq.schemas.tinker.datum import AdamParams, Datum, LoraSpec
from tinkermq.schemas.wire.errors import (
    ConfigError,
    ModelError,
    NotFoundError,
    StorageError,
)
from torch import Tensor
from transformers.models.granite import GraniteConfig, GraniteForCausalLM

from tests.support.tinker import (
    TIED,
    PlainPeft,
    group,
    open_trainer,
    random_tokens,
    same_bits,
    supervised,
)

pytestmark = pytest.mark.filterwarnings(TIED)


torch.set_num_threads(1)

SPEC = LoraSpec(8, seed=7)
STEPS = [
    AdamParams(1e-4),
    AdamParams(2e-4, beta1=0.8, beta2=0.9, eps=1e-8),
    AdamParams(1e-4, weight_decay=0.1),
    AdamParams(5e-5, grad_clip_norm=0.5),
    AdamParams(1e-4),
]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainer") / "untied"
    model = make_model(kind="llama", width=32, seed=2)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(0.1 * torch.randn(264, 32))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def shared(base: Path) -> AdapterTrainer:
    """A trainer for tests that look at models of their own."""
    return open_trainer(base)


def cross_entropy(p: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return -(inputs["weights"] * p).sum()


def importance_sampling(p: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    return -((p - inputs["logprobs"]).exp() * inputs["advantages"]).sum()


def ppo(p: Tensor, inputs: dict[str, Tensor], low: float = 0.8, high: float = 1.2) -> Tensor:
    ratio, a = (p - inputs["logprobs"]).exp(), inputs["advantages"]
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()


def cispo(p: Tensor, inputs: dict[str, Tensor], low: float = 0.0, high: float = 4.0) -> Tensor:
    ratio = (p - inputs["logprobs"]).exp().clamp(low, high).detach()
    return -(ratio * p * inputs["advantages"]).sum()


def dro(p: Tensor, inputs: dict[str, Tensor], beta: float = 0.01) -> Tensor:
    apart = p - inputs["logprobs"]
    return -(p * inputs["advantages"] - beta / 2 * apart**2).sum()


def gspo(p: Tensor, inputs: dict[str, Tensor], low: float = 0.9997, high: float = 1.0004) -> Tensor:
    a = inputs["advantages"]
    ratio = (p - inputs["logprobs"])[a != 0].mean().detach().exp() * (p - p.detach()).exp()
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()


def train(trainer: AdapterTrainer, model: str, *seeds: int) -> list[np.ndarray]:
    """Make some steps of RL; return the log-probs of the last one."""
    result = trainer.forward_backward(model, group(0), "ppo")
    for seed in seeds:
        result = trainer.forward_backward(model, group(seed), "importance_sampling")
        trainer.optim_step(model, AdamParams(1e-2))
    return result.logprobs


def random_rl(seed: int) -> list[Datum]:
    """Return data whose advantages differ from token to token, some of them 0."""
    rng = np.random.default_rng(seed)
    data = group(seed)
    for one in data:
        shape = one.tokens.shape
        one.inputs["advantages"][:] = rng.normal(size=shape) * (rng.random(shape) < 0.6)
        one.inputs["logprobs"][:] = -np.log(264) + 0.3 * rng.normal(size=shape)
    return data


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        ("base", SPEC),
        ("base", LoraSpec(5, train_mlp=False, train_unembed=False)),
        ("untied", LoraSpec(3, train_attn=False)),
    ],
)
def test_five_steps_are_those_of_peft_and_torch(
    spec: LoraSpec, model: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    trainer = open_trainer(folder)
    trainer.create("m", spec)
    trainer.save("m", tmp_path / "begin", with_optimizer=False)
    plain = PlainPeft(folder, tmp_path / "begin")
    assert plain.tensors().keys() == trainer.tensors("m").keys()
    rng = np.random.default_rng(0)
    for params in STEPS:
        data = [supervised(rng, int(rng.integers(4, 30))) for _ in range(4)]
        ours = trainer.forward_backward("m", data, "cross_entropy")
        theirs = plain.forward_backward(data, cross_entropy)
        for one, other in zip(ours.logprobs, theirs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
        expected = -sum(
            float((one.inputs["weights"].astype(np.float64) * p).sum())
            for one, p in zip(data, theirs, strict=True)
        )
        assert ours.metrics["loss:sum"] == pytest.approx(expected, abs=1e-3)
        told = trainer.optim_step("m", params)
        assert told["grad_norm:mean"] == pytest.approx(plain.optim_step(params), rel=1e-4)
        assert told["skipped:sum"] == 0
    for name, tensor in plain.tensors().items():
        torch.testing.assert_close(trainer.tensors("m")[name], tensor, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "plain", "config"),
    [
        ("importance_sampling", importance_sampling, {}),
        ("ppo", ppo, {}),
        ("ppo", ppo, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}),
        ("cispo", cispo, {}),
        ("cispo", cispo, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("dro", dro, {}),
        ("dro", dro, {"beta": 0.5}),
        ("gspo", gspo, {}),
        ("gspo", gspo, {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}),
    ],
)
def test_each_loss_is_its_formula(
    shared: AdapterTrainer,
    base: Path,
    tmp_path: Path,
    name: str,
    plain: Any,
    config: dict[str, Any],
) -> None:
    shared.create("loss", SPEC)
    train(shared, "loss", 1, 2)
    shared.save("loss", tmp_path / "begin", with_optimizer=False)
    data = random_rl(3)
    told = shared.forward_backward("loss", data, name, config)
    norm = shared.optim_step("loss", AdamParams(0.0))["grad_norm:mean"]
    shared.evict("loss")
    reference = PlainPeft(base, tmp_path / "begin")
    words = {
        key.removeprefix("clip_").removesuffix("_threshold"): one for key, one in config.items()
    }
    losses: list[float] = []

    def formula(p: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        loss = plain(p, inputs, **words)
        losses.append(float(loss.detach()))
        return loss

    reference.forward_backward(data, formula)
    assert told.metrics["loss:sum"] == pytest.approx(sum(losses), rel=1e-4, abs=1e-4)
    assert norm == pytest.approx(reference.optim_step(AdamParams(0.0)), rel=1e-4)
    if name in ("ppo", "cispo", "gspo"):
        assert 0 <= told.metrics["clipped:sum"] <= told.metrics["tokens:sum"]


def gradient_of(trainer: AdapterTrainer, *calls: tuple[list[Datum], str]) -> dict[str, Tensor]:
    """Return what a step of plain descent subtracts: the sign of Adam would hide the size."""
    trainer.create("probe", SPEC)
    train(trainer, "probe", 1)
    before = trainer.tensors("probe")
    for data, loss in calls:
        trainer.forward_backward("probe", data, loss)
    # A huge eps leaves the first moment over eps, times what the earlier step left of itself.
    trainer.optim_step("probe", AdamParams(1e6, beta1=0.0, beta2=0.0, eps=1e6))
    after = trainer.tensors("probe")
    trainer.evict("probe")
    return {name: before[name] - tensor for name, tensor in after.items()}


def assert_near(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 1e-5) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, atol=atol, rtol=1e-4)


def test_weights_multiply_the_other_losses(shared: AdapterTrainer) -> None:
    for loss in ("importance_sampling", "ppo", "cispo", "gspo"):
        data = random_rl(4)
        rng = np.random.default_rng(0)
        marks = [(rng.random(len(one.tokens)) < 0.5).astype(np.float32) for one in data]
        weighted = [
            Datum(one.tokens, {**one.inputs, "weights": mark})
            for one, mark in zip(data, marks, strict=True)
        ]
        masked = [
            Datum(one.tokens, {**one.inputs, "advantages": one.inputs["advantages"] * mark})
            for one, mark in zip(data, marks, strict=True)
        ]
        assert_near(gradient_of(shared, (weighted, loss)), gradient_of(shared, (masked, loss)))


def test_a_sequence_mask_tells_over_which_tokens_gspo_takes_the_mean(
    shared: AdapterTrainer,
) -> None:
    data = random_rl(5)
    marked = [
        Datum(
            one.tokens,
            {**one.inputs, "sequence_ratio_mask": (one.inputs["advantages"] != 0).astype("f4")},
        )
        for one in data
    ]
    everything = [
        Datum(one.tokens, {**one.inputs, "sequence_ratio_mask": np.ones(len(one.tokens), "f4")})
        for one in data
    ]
    plain, with_mask, with_all = (
        gradient_of(shared, (each, "gspo")) for each in (data, marked, everything)
    )
    assert same_bits(plain, with_mask)
    assert not same_bits(plain, with_all)


def test_several_targets_of_a_position(shared: AdapterTrainer, base: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    data = [supervised(rng, 12, most=5), supervised(rng, 7), supervised(rng, 9, most=1)]
    shared.create("many", SPEC)
    train(shared, "many", 1)
    shared.save("many", tmp_path / "begin", with_optimizer=False)
    ours = shared.forward_backward("many", data, "cross_entropy")
    norm = shared.optim_step("many", AdamParams(0.0))["grad_norm:mean"]
    shared.evict("many")
    plain = PlainPeft(base, tmp_path / "begin")
    theirs = plain.forward_backward(data, cross_entropy)
    assert [one.shape for one in ours.logprobs] == [(12, 5), (7,), (9, 1)]
    for one, other in zip(ours.logprobs, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert norm == pytest.approx(plain.optim_step(AdamParams(0.0)), rel=1e-4)


def test_calls_add_up_and_a_prompt_computed_once_changes_nothing(base: Path) -> None:
    data = group(6, prompts=3, answers=4)
    whole = open_trainer(base)
    expected = gradient_of(whole, (data, "ppo"))
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    small = open_trainer(base, microbatch_tokens=48, logits_bytes=4 * 264 * 7)
    apart = open_trainer(base, share_prompts=False)
    again = open_trainer(base, gradient_checkpointing=True)
    parts = [(data[at : at + 5], "ppo") for at in range(0, len(data), 5)]
    assert_near(expected, gradient_of(whole, *parts), atol=1e-5 * scale)
    for trainer in (small, apart, again):
        assert_near(expected, gradient_of(trainer, (data, "ppo")), atol=1e-5 * scale)
    for trainer in (whole, small, apart):
        trainer.create("m", SPEC)
    tells = [each.forward_backward("m", data, "gspo").logprobs for each in (whole, small, apart)]
    for others in tells[1:]:
        for one, other in zip(tells[0], others, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_bfloat16_is_computed_in_and_not_kept(base: Path) -> None:
    exact, rough = open_trainer(base), open_trainer(base, dtype="bfloat16")
    for trainer in (exact, rough):
        trainer.create("m", SPEC)
    for one, other in zip(train(exact, "m", 1, 2), train(rough, "m", 1, 2), strict=True):
        assert not np.array_equal(one, other)
        np.testing.assert_allclose(one, other, atol=0.2)
    assert {tensor.dtype for tensor in rough.tensors("m").values()} == {torch.float32}


def test_a_model_whose_logits_are_more_than_its_output_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        logits_scaling=4.0,
        pad_token_id=0,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path / "base")
    trainer = open_trainer(tmp_path / "base", logits_bytes=4 * 264 * 7)
    trainer.create("m", SPEC)
    train(trainer, "m", 1)
    trainer.save("m", tmp_path / "begin", with_optimizer=False)
    plain = PlainPeft(tmp_path / "base", tmp_path / "begin")
    data = random_rl(2)
    ours = trainer.forward_backward("m", data, "importance_sampling").logprobs
    theirs = plain.forward_backward(data, importance_sampling)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    norm = trainer.optim_step("m", AdamParams(0.0))["grad_norm:mean"]
    assert norm == pytest.approx(plain.optim_step(AdamParams(0.0)), rel=1e-4)


def test_a_shared_prompt_takes_its_columns_once_and_long_datums_their_own(base: Path) -> None:
    rng = np.random.default_rng(0)
    prompt = random_tokens(rng, 30)
    data = [supervised(rng, 40) for _ in range(4)]
    for one in data:
        one.tokens[:30] = prompt
    trainer = open_trainer(base, microbatch_tokens=64)
    trainer.create("m", SPEC)
    some = trainer.begin("m", data, "cross_entropy")
    assert (some.num_left, some.next_tokens) == (2, 60)
    with pytest.raises(RuntimeError, match="2 micro-batches are not computed"):
        some.result()
    assert trainer.advance([some]) == [some]
    assert (some.num_left, some.next_tokens) == (1, 40)
    assert trainer.advance([some]) == [some]
    assert (some.num_left, some.next_tokens) == (0, 0)
    longer = trainer.begin("m", [supervised(rng, 100), *data], "cross_entropy", backward=False)
    assert longer.num_left == 3


def take_turns(trainer: AdapterTrainer, passes: list[LossPass]) -> None:
    """Compute all passes, a micro-batch of each in turn."""
    while passes := [one for one in passes if one.num_left]:
        for one in passes:
            trainer.advance([one])


def test_other_adapters_change_nothing_to_the_bit(base: Path) -> None:
    alone = open_trainer(base)
    alone.create("m", SPEC)
    expected = train(alone, "m", 1, 2, 3)
    crowd = open_trainer(base)
    crowd.create("a", LoraSpec(4))
    crowd.create("m", SPEC)
    crowd.create("z", LoraSpec(16, train_unembed=False))
    passes = [crowd.begin(model, group(0), "ppo") for model in ("m", "z", "a")]
    take_turns(crowd, passes)
    for seed in (1, 2, 3):
        for model in ("a", "m", "z"):
            passes = [
                crowd.begin(model, group(seed), "importance_sampling"),
                crowd.begin("a", group(9), "cispo", backward=False),
            ]
            take_turns(crowd, passes)
            crowd.optim_step(model, AdamParams(1e-2))
            if (model, seed) == ("m", 3):
                for one, other in zip(expected, passes[0].result().logprobs, strict=True):
                    assert np.array_equal(one, other)
    assert same_bits(alone.tensors("m"), crowd.tensors("m"))


def test_fresh_adapters_depend_on_their_seed_alone(base: Path, shared: AdapterTrainer) -> None:
    other = open_trainer(base)
    other.create("first", LoraSpec(4, seed=1))
    other.create("m", LoraSpec(4))
    other.create("all", LoraSpec(4, seed=3))
    for model, spec in (("m", LoraSpec(4)), ("all", LoraSpec(4, seed=3, train_mlp=False))):
        shared.create(model, spec)
        mine, theirs = shared.tensors(model), other.tensors(model)
        assert same_bits(mine, {name: theirs[name] for name in mine})
        assert shared.spec(model).seed == other.spec(model).seed
        shared.evict(model)
    first, second = other.tensors("first"), other.tensors("m")
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]) == (".lora_B." in name)
        assert (".lora_B." in name) == bool((tensor == 0).all())


def test_the_output_layer_is_adapted_and_the_embeddings_are_not(base: Path, untied: Path) -> None:
    for folder in (base, untied):
        trainer = open_trainer(folder)
        trainer.create("m", LoraSpec(8, train_attn=False, train_mlp=False))
        [a, b] = sorted(trainer.tensors("m"))
        assert a == "base_model.model.lm_head.lora_A.weight"
        assert b == "base_model.model.lm_head.lora_B.weight"
        before = trainer.forward_backward("m", group(1), "ppo", backward=False).logprobs
        train(trainer, "m", 1, 2)
        assert trainer.tensors("m")[b].abs().max() > 0
        trainer.create("fresh", LoraSpec(2))
        after = trainer.forward_backward("fresh", group(1), "ppo", backward=False).logprobs
        assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_is(shared: AdapterTrainer) -> None:
    shared.create("m", SPEC)
    train(shared, "m", 1)
    before, steps = shared.tensors("m"), shared.num_steps("m")
    data = group(2)
    for one in data:
        one.inputs["advantages"][:] = 3e38
    told = shared.forward_backward("m", data, "importance_sampling")
    assert not np.isfinite(told.metrics["loss:sum"]) or told.metrics["loss:sum"] < -1e38
    told = shared.optim_step("m", AdamParams(1e-2))
    assert told["skipped:sum"] == 1
    assert not np.isfinite(told["grad_norm:mean"])
    assert same_bits(before, shared.tensors("m"))
    assert shared.num_steps("m") == steps
    train(shared, "m", 3)
    assert all(bool(tensor.isfinite().all()) for tensor in shared.tensors("m").values())
    shared.evict("m")


def test_a_step_without_data_goes_on_with_the_momentum(shared: AdapterTrainer) -> None:
    shared.create("m", SPEC)
    assert shared.optim_step("m", AdamParams(1.0)) == {"grad_norm:mean": 0.0, "skipped:sum": 0.0}
    before = shared.tensors("m")
    train(shared, "m", 1)
    after = shared.tensors("m")
    assert not same_bits(before, after)
    shared.optim_step("m", AdamParams(1e-2))
    assert not same_bits(after, shared.tensors("m"))
    shared.evict("m")


# -- a loss of the client's own: DPO, as the cookbook's recipe computes it -------------------------


def pair(rng: np.random.Generator) -> list[Datum]:
    """Return a chosen and a rejected answer to one prompt; the answers alone have weight."""
    prompt = random_tokens(rng, int(rng.integers(3, 9)))
    found: list[Datum] = []
    for _ in range(2):
        tokens = np.concatenate([prompt, random_tokens(rng, int(rng.integers(2, 9)))])
        weights = (np.arange(1, len(tokens)) >= len(prompt)).astype(np.float32)
        inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": weights}
        found.append(Datum(tokens[:-1], inputs))
    return found


def dpo(now: list[Tensor], before: list[np.ndarray], data: list[Datum]) -> Tensor:
    """−log σ(β(Δ_chosen − Δ_rejected)), the mean over pairs (arXiv 2305.18290)."""
    gaps = [
        ((p - torch.from_numpy(q)) * torch.from_numpy(one.inputs["weights"])).sum()
        for p, q, one in zip(now, before, data, strict=True)
    ]
    leads = torch.stack(gaps[::2]) - torch.stack(gaps[1::2])
    return -torch.nn.functional.logsigmoid(0.4 * leads).mean()


def test_dpo_of_a_client_is_cross_entropy_with_the_weights_of_its_gradient(
    shared: AdapterTrainer, base: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(6)
    data = [one for _ in range(3) for one in pair(rng)]
    shared.create("dpo", SPEC)  # a fresh adapter is its base, the reference
    before = shared.forward_backward("dpo", data, "cross_entropy", backward=False).logprobs
    train(shared, "dpo", 1, 2)
    shared.save("dpo", tmp_path / "begin", with_optimizer=False)
    seen = shared.forward_backward("dpo", data, "cross_entropy", backward=False).logprobs
    now = [torch.from_numpy(one).requires_grad_() for one in seen]
    dpo(now, before, data).backward()
    weighted = [
        Datum(one.tokens, {**one.inputs, "weights": -np.asarray(p.grad)})
        for one, p in zip(data, now, strict=True)
    ]
    told = shared.forward_backward("dpo", weighted, "cross_entropy")
    descent = AdamParams(1.0, beta1=0.0, beta2=0.0, eps=1.0)  # keeps the size of the gradient
    norm = shared.optim_step("dpo", descent)["grad_norm:mean"]
    made = shared.tensors("dpo")
    shared.evict("dpo")
    for one, other in zip(told.logprobs, seen, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)

    plain = PlainPeft(base, tmp_path / "begin")
    ids = [torch.from_numpy(one.tokens.astype(np.int64))[None] for one in data]
    logprobs = [plain.model(input_ids=each).logits[0].log_softmax(-1) for each in ids]
    targets = [torch.from_numpy(one.inputs["target_tokens"])[:, None] for one in data]
    theirs = [p.gather(1, at)[:, 0] for p, at in zip(logprobs, targets, strict=True)]
    dpo(theirs, before, data).backward()
    assert norm > 0.01
    assert norm == pytest.approx(plain.optim_step(descent), rel=1e-4)
    assert_near(made, plain.tensors())


# -- Adapters that were written down come back to the bit, and are what PEFT reads -----------------


torch.set_num_threads(1)

SMALL_SPEC = LoraSpec(4, seed=3)


@pytest.fixture
def small_trainer(base: Path) -> AdapterTrainer:
    made = open_trainer(base)
    made.create("m", SMALL_SPEC)
    return made


def train_ppo(small_trainer: AdapterTrainer, model: str, *seeds: int) -> list[np.ndarray]:
    found: list[np.ndarray] = []
    for seed in seeds:
        found += small_trainer.forward_backward(model, group(seed), "ppo").logprobs
        small_trainer.optim_step(model, AdamParams(1e-2, weight_decay=0.01))
    return found


def test_what_was_evicted_goes_on_to_the_bit(
    small_trainer: AdapterTrainer, base: Path, tmp_path: Path
) -> None:
    train_ppo(small_trainer, "m", 1, 2)
    small_trainer.save("m", tmp_path / "kept", with_optimizer=True)
    small_trainer.forward_backward("m", group(9), "ppo")  # pending, and not written
    small_trainer.evict("m")
    small_trainer.load("m", tmp_path / "kept", with_optimizer=True)
    assert (small_trainer.spec("m"), small_trainer.num_steps("m")) == (SMALL_SPEC, 2)
    back = train_ppo(small_trainer, "m", 3, 4)
    elsewhere = open_trainer(base)
    elsewhere.load("other", tmp_path / "kept", with_optimizer=True)
    through = open_trainer(base)
    through.create("m", SMALL_SPEC)
    train_ppo(through, "m", 1, 2)
    for found in (train_ppo(through, "m", 3, 4), train_ppo(elsewhere, "other", 3, 4)):
        assert all(np.array_equal(*pair) for pair in zip(back, found, strict=True))
    assert same_bits(small_trainer.tensors("m"), through.tensors("m"))
    assert same_bits(small_trainer.tensors("m"), elsewhere.tensors("other"))


def test_an_adapter_that_was_never_stepped_comes_back_too(
    small_trainer: AdapterTrainer, tmp_path: Path
) -> None:
    fresh = small_trainer.tensors("m")
    small_trainer.save("m", tmp_path / "kept", with_optimizer=True)
    train_ppo(small_trainer, "m", 1)
    small_trainer.load("m", tmp_path / "kept", with_optimizer=True)
    assert same_bits(small_trainer.tensors("m"), fresh)
    assert small_trainer.num_steps("m") == 0


def test_without_the_optimiser_it_begins_anew_and_pending_gradients_are_forgotten(
    small_trainer: AdapterTrainer, tmp_path: Path
) -> None:
    train_ppo(small_trainer, "m", 1, 2)
    small_trainer.save("m", tmp_path / "with", with_optimizer=True)
    small_trainer.save("m", tmp_path / "without", with_optimizer=False)
    assert not (tmp_path / "without" / "optimizer.safetensors").exists()
    kept = small_trainer.tensors("m")
    for name in ("with", "without"):
        small_trainer.forward_backward("m", group(5), "ppo")
        small_trainer.window("m").fail("forward_backward 3", "whatever")
        small_trainer.load("m", tmp_path / name, with_optimizer=False)
        assert same_bits(small_trainer.tensors("m"), kept)
        assert small_trainer.num_steps("m") == 0
        told = small_trainer.optim_step("m", AdamParams(1e-2))
        assert told["grad_norm:mean"] == 0
        assert same_bits(small_trainer.tensors("m"), kept), "no gradient, no momentum"
    with pytest.raises(ModelError, match="was saved without the optimiser's state"):
        small_trainer.load("m", tmp_path / "without", with_optimizer=True)


def test_peft_reads_what_was_saved_as_it_is(
    small_trainer: AdapterTrainer, base: Path, tmp_path: Path
) -> None:
    train_ppo(small_trainer, "m", 1, 2)
    rng = np.random.default_rng(0)
    data = [supervised(rng, 12)]
    told = small_trainer.forward_backward("m", data, "cross_entropy", backward=False)
    small_trainer.save("m", tmp_path / "kept", with_optimizer=True)
    with torch.no_grad():
        plain = load_causal_lm(str(base), dtype=torch.float32)
        model = PeftModel.from_pretrained(plain, str(tmp_path / "kept"))
        logits = model(torch.from_numpy(data[0].tokens.astype(np.int64))[None]).logits[0]
    targets = torch.from_numpy(data[0].inputs["target_tokens"])[:, None]
    expected = logits.log_softmax(-1).gather(1, targets)[:, 0]
    np.testing.assert_allclose(told.logprobs[0], expected, atol=1e-5)
    stored = json.loads((tmp_path / "kept" / "adapter_config.json").read_text())
    assert (stored["r"], stored["lora_alpha"]) == (4, 32)
    assert stored["base_model_name_or_path"] == str(base)
    assert "lm_head" in stored["target_modules"]


@pytest.mark.parametrize("alpha", [8, 32])
def test_an_adapter_of_peft_is_loaded_whatever_its_alpha(
    base: Path, tmp_path: Path, alpha: int
) -> None:
    plain = load_causal_lm(str(base), dtype=torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
    theirs = get_peft_model(plain, LoraConfig(r=4, lora_alpha=alpha, target_modules=targets))
    for name, parameter in theirs.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    with pytest.warns(UserWarning, match="save_embedding_layers"):  # and so it has the base's, too
        theirs.save_pretrained(str(tmp_path / "theirs"))
    small_trainer = open_trainer(base)
    small_trainer.load("m", tmp_path / "theirs", with_optimizer=False)
    spec = small_trainer.spec("m")
    assert (spec.rank, spec.train_attn, spec.train_mlp, spec.train_unembed) == (
        4,
        True,
        False,
        True,
    )
    rng = np.random.default_rng(0)
    data = [supervised(rng, 12)]
    told = small_trainer.forward_backward("m", data, "cross_entropy", backward=False).logprobs
    expected = PlainPeft(base, tmp_path / "theirs").forward_backward(data, lambda p, _: p.sum())
    np.testing.assert_allclose(told[0], expected[0], atol=1e-5)


def test_what_does_not_fit_is_refused_and_changes_nothing(
    small_trainer: AdapterTrainer, base: Path, tmp_path: Path
) -> None:
    train_ppo(small_trainer, "m", 1)
    small_trainer.save("m", tmp_path / "kept", with_optimizer=True)
    kept = small_trainer.tensors("m")
    small_trainer.create("rank", LoraSpec(8))
    small_trainer.create("layers", LoraSpec(4, train_unembed=False))
    for model, message in (
        ("rank", "has rank 4, the model 8"),
        (
            "layers",
            r"other layers than the model: .*lm_head.* there and missing here",
        ),
    ):
        before = small_trainer.tensors(model)
        with pytest.raises(ModelError, match=message):
            small_trainer.load(model, tmp_path / "kept", with_optimizer=True)
        assert same_bits(before, small_trainer.tensors(model))
    other = AdapterTrainer.open(str(base), base_model="another", max_rank=2)
    with pytest.raises(ConfigError, match="rank 4 is not offered"):
        other.load("m", tmp_path / "kept", with_optimizer=True)
    other = AdapterTrainer.open(str(base), base_model="another")
    with pytest.raises(ModelError, match="belongs to tiny, this is another"):
        other.load("m", tmp_path / "kept", with_optimizer=True)
    assert not other.models
    with pytest.raises(NotFoundError, match="there is no adapter in"):
        small_trainer.load("m", tmp_path / "nothing", with_optimizer=True)
    assert same_bits(kept, small_trainer.tensors("m"))


def test_a_damaged_folder_is_named(small_trainer: AdapterTrainer, tmp_path: Path) -> None:
    small_trainer.save("m", tmp_path / "kept", with_optimizer=True)
    file = tmp_path / "kept" / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(StorageError, match=r"safetensors differs from what was written"):
        small_trainer.load("m", tmp_path / "kept", with_optimizer=True)


def test_whoever_may_read_a_folder_may_read_its_weights(
    small_trainer: AdapterTrainer, tmp_path: Path
) -> None:
    small_trainer.save("m", tmp_path / "kept", with_optimizer=True)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "kept").iterdir()}
    assert modes == {(tmp_path / "kept").stat().st_mode & 0o666}


def test_what_a_killed_save_has_left_is_replaced(
    small_trainer: AdapterTrainer, tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    small_trainer.save("m", folder, with_optimizer=True)
    first = small_trainer.tensors("m")
    train_ppo(small_trainer, "m", 1)
    (tmp_path / ".kept.writing").mkdir()  # left by one that was killed
    small_trainer.save("m", folder, with_optimizer=False)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert not (folder / "optimizer.safetensors").exists()
    second = small_trainer.tensors("m")
    small_trainer.load("m", folder, with_optimizer=False)
    assert same_bits(second, small_trainer.tensors("m"))
    assert not same_bits(first, small_trainer.tensors("m"))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="could not be written"):
        small_trainer.save("m", tmp_path / "file" / "below", with_optimizer=False)
