"""The step makes the gradients of a plain implementation, and the same bits when repeated."""

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.training import model as training_model
from tinkermq.actors.training.batch import TrainingBatch, assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.step import StepReport, Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group
from torch import nn
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedModel

from tests.actors.learner.plain_step import Episodes, grpo, plain_logprobs, plain_step
from tests.support.configs import learner_job
from tests.support.groups import make_group, make_trajectory, random_group
from tests.support.models import changed, gradients_of, loaded

torch.set_num_threads(1)

VERSION = 3
STEP = VERSION + 1


@pytest.fixture(scope="module")
def initial(folder: Path) -> PreTrainedModel:
    """The policy that it started from."""
    return load_model(learner_job(folder).model, learner_job(folder).learner)


@pytest.fixture(scope="module")
def policy(initial: PreTrainedModel) -> PreTrainedModel:
    """A policy that has moved away from the initial one."""
    return loaded(initial, changed(initial, seed=3, scale=0.1))


def _groups(seed: int = 0, num: int = 4, **options: Any) -> list[Group]:
    """Groups of which the third has equal rewards; two episodes of the first differ in a token."""
    rng = np.random.default_rng(seed)
    groups = [random_group(rng, number, version=VERSION, **options) for number in range(num)]
    first, second = (item.model_copy(deep=True) for item in [groups[0].trajectories[0]] * 2)
    second.token_ids[-1] = 9
    second.rewards[:] = 3.0
    groups[0].trajectories[:2] = [first, second]
    groups[2] = random_group(rng, 2, version=VERSION, turns=1, **options)
    for item in groups[2].trajectories:
        item.rewards[:] = 1.0
    return groups


def _recorded(batch: TrainingBatch, model: nn.Module, groups: list[Group]) -> TrainingBatch:
    """Give the batch behaviour log-probs near the policy's, further off in some sequences."""
    rng = np.random.default_rng(7)
    with torch.no_grad():
        exact, _ = plain_logprobs(model, [t for g in groups for t in g.sampled], 1.0)
    scales = itertools.cycle([0.001, 0.3, 0.6])
    noisy = [
        item + torch.from_numpy(rng.normal(0, next(scales), len(item))).float() for item in exact
    ]
    noisy[4][0] += 9.6  # this one is caught by `veto`
    return replace(batch, behaviour_N=torch.cat(noisy))


def _episodes(batch: TrainingBatch, groups: list[Group]) -> Episodes:
    trajectories = [item for group in groups for item in group.sampled]
    counts = [item.num_generated for item in trajectories]
    group = [at for at, item in enumerate(groups) for _ in item.sampled]
    lags = (VERSION - batch.versions_N).float()
    return Episodes(
        trajectories, group, list(batch.behaviour_N.split(counts)), list(lags.split(counts)), []
    )


def _advantages_of(groups: list[Group]):
    sizes = [len(group.sampled) for group in groups]
    trajectories = [item for group in groups for item in group.sampled]

    def of(rewards: list[float]) -> list[torch.Tensor]:
        ends = np.cumsum([0, *sizes])
        values = grpo([rewards[a:b] for a, b in itertools.pairwise(ends)])
        return [
            torch.full((item.num_generated,), float(value))
            for item, value in zip(trajectories, values, strict=True)
        ]

    return of


def _train(model: nn.Module, config: JobConfig, batch: TrainingBatch) -> StepReport:
    return Trainer(model, config, total_steps=10).step(batch, STEP)


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def _assert_same_training(
    policy: nn.Module,
    config: JobConfig,
    groups: list[Group],
    *,
    initial: nn.Module | None = None,
    advantages_of: Any = None,
) -> StepReport:
    """Train two copies of the policy, one by the step and one plainly, and compare them."""
    batch = _recorded(assemble(groups), policy, groups)
    plain, ours = copy.deepcopy(policy), copy.deepcopy(policy)
    of = advantages_of or _advantages_of(groups)
    plain_step(plain, initial or policy, config, _episodes(batch, groups), of)
    report = _train(ours, config, batch)
    wanted = gradients_of(plain)
    assert wanted.abs().max() > 1e-4
    tolerance = 1e-5 * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(gradients_of(ours), wanted, rtol=1e-4, atol=tolerance)
    torch.testing.assert_close(_weights(ours), _weights(plain), rtol=0, atol=1e-5)
    return report


LOSSES = ["ppo", "gspo", "cispo", "reinforce"]
CORRECTIONS: list[dict[str, Any]] = [
    {"correction": "none"},
    {"correction": "tis"},
    {"correction": "tis", "correction_level": "sequence"},
    {"correction": "icepop"},
    {"correction": "geometric"},
    {"correction": "mis"},
    {"correction": "veto"},
    {"correction": "decoupled"},
    {"correction": "decoupled", "proximal": "loglinear"},
    {"correction": "m2po"},
]
AGGREGATIONS: list[dict[str, Any]] = [
    {"loss_agg": "token-mean"},
    {"loss_agg": "seq-mean-token-mean"},
    {"loss_agg": "seq-mean-token-sum"},
    {"loss_agg": "seq-mean-token-sum-norm", "loss_agg_length": 7},
]
KLS: list[dict[str, Any]] = [
    {},
    {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3"},
    {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k2"},
    {"kl_coef": 0.1, "kl_in": "loss", "kl_estimator": "k3+"},
]


def _cases() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every loss with every correction; the other choices take turns, so that all pairs occur."""
    turns = itertools.cycle(itertools.product(AGGREGATIONS, (1, 2), KLS, (True, False)))
    step = 11  # has no factor in common with the number of combinations
    algorithms: list[dict[str, Any]] = [
        {"loss": loss, **correction} for loss in LOSSES for correction in CORRECTIONS
    ]
    algorithms += [{"loss": "dppo"}] * 6
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for algorithm in algorithms:
        aggregation, minibatches, kl, share = next(itertools.islice(turns, step - 1, None))
        clip = {"clip_low": 0.01, "clip_high": 0.02} if algorithm["loss"] == "ppo" else {}
        cases.append(
            (
                {**algorithm, **aggregation, **kl, **clip},
                {"num_minibatches": minibatches, "share_prompts": share},
            )
        )
    return cases


@pytest.mark.parametrize(("algorithm", "learner"), _cases(), ids=str)
def test_it_trains_as_a_plain_implementation_does(
    folder: Path,
    policy: PreTrainedModel,
    initial: PreTrainedModel,
    algorithm: dict[str, Any],
    learner: dict[str, Any],
) -> None:
    config = learner_job(folder, algorithm=algorithm, learner=learner)
    _assert_same_training(policy, config, _groups(), initial=initial)


def test_the_entropy_bonus_and_the_temperature_enter_the_gradient(
    folder: Path, policy: PreTrainedModel
) -> None:
    config = learner_job(folder, algorithm={"entropy_coef": 0.3}, rollout={"temperature": 0.7})
    report = _assert_same_training(policy, config, _groups())
    batch = assemble(_groups())
    with torch.no_grad():
        trajectories = [item for group in _groups() for item in group.sampled]
        _, entropies = plain_logprobs(policy, trajectories, 0.7)
    assert report.numbers["actor/entropy"] == pytest.approx(float(torch.cat(entropies).mean()))
    assert report.numbers["staleness/num_tokens/lag_0"] == int((batch.versions_N == VERSION).sum())


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("algorithm", [{}, {"loss": "gspo"}, {"entropy_share": 0.8}], ids=str)
def test_a_batch_is_gone_through_several_times(
    folder: Path, policy: PreTrainedModel, algorithm: dict[str, Any], num_minibatches: int
) -> None:
    learner = {"ppo_epochs": 3, "num_minibatches": num_minibatches, "lr": 0.01}
    clips = {"clip_low": 0.5, "clip_high": 0.5}
    config = learner_job(folder, algorithm=clips | algorithm, learner=learner)
    report = _assert_same_training(policy, config, _groups())
    once = _train(copy.deepcopy(policy), learner_job(folder), assemble(_groups()))
    name = "staleness/num_tokens/lag_0"
    assert report.numbers[name] == once.numbers[name]


def test_only_the_tokens_of_the_highest_entropy_are_trained(
    folder: Path, policy: PreTrainedModel
) -> None:
    config = learner_job(folder, algorithm={"entropy_share": 0.2})
    report = _assert_same_training(policy, config, _groups())
    assert report.numbers["critic/advantages/mean"] != 0


def test_sequences_without_advantage_take_no_part_and_change_nothing(
    folder: Path, policy: PreTrainedModel
) -> None:
    groups = _groups()
    report = _assert_same_training(policy, learner_job(folder), groups)
    counted = sum(
        value for key, value in report.numbers.items() if key.startswith("staleness/num_tokens")
    )
    assert counted == assemble(groups).num_tokens


def test_a_batch_without_any_advantage_still_counts_as_a_step(
    folder: Path, policy: PreTrainedModel
) -> None:
    config = learner_job(folder, learner={"weight_decay": 0.5})
    model = copy.deepcopy(policy)
    report = _train(model, config, assemble([_groups()[2]]))
    torch.testing.assert_close(_weights(model), _weights(policy) * (1 - 0.1 * 0.5))
    assert report.numbers["actor/grad_norm"] == 0.0
    assert report.numbers["actor/entropy"] > 0


def test_remax_compares_with_the_greedy_episode(folder: Path, policy: PreTrainedModel) -> None:
    groups = _groups(greedy=True)
    greedy = [item.reward for g in groups for item in g.trajectories if item.greedy]
    baselines = [value for value in greedy for _ in range(4)]
    lengths = [item.num_generated for group in groups for item in group.sampled]

    def advantages(rewards: list[float]) -> list[torch.Tensor]:
        return [
            torch.full((num,), reward - baseline)
            for num, reward, baseline in zip(lengths, rewards, baselines, strict=True)
        ]

    config = learner_job(folder, algorithm={"advantage": "remax"})
    _assert_same_training(policy, config, groups, advantages_of=advantages)


def test_overlong_responses_lose_reward(folder: Path, policy: PreTrainedModel) -> None:
    groups = _groups()
    lengths = [item.num_generated for group in groups for item in group.sampled]
    plain = _advantages_of(groups)

    def advantages(rewards: list[float]) -> list[torch.Tensor]:
        penalties = [-2.0 * min(max(length - (16 - 12), 0) / 12, 1.0) for length in lengths]
        return plain([a + b for a, b in zip(rewards, penalties, strict=True)])

    config = learner_job(
        folder,
        algorithm={"overlong_buffer": 12, "overlong_factor": 2.0},
        rollout={"max_response_tokens": 16},
    )
    report = _assert_same_training(policy, config, groups, advantages_of=advantages)
    batch = assemble(groups)
    assert report.numbers["critic/rewards/mean"] < float(batch.rewards_S.mean())


def test_each_turn_is_compared_with_the_same_turn_of_its_group(
    folder: Path, policy: PreTrainedModel
) -> None:
    def episode(first: float, second: float):
        return make_trajectory([9, 10], [([20, 21], [30]), ([22], [])], [first, second])

    group = make_group([episode(1, 0), episode(0, 3), episode(0, 1)])
    # Returns to go with γ = 0.5: first turns 1, 1.5, 0.5; second turns 0, 3, 1.
    first = torch.tensor([0.0, 1.0, -1.0])
    second = (torch.tensor([0.0, 3.0, 1.0]) - 4 / 3) / 1.527525
    wanted = [torch.stack([a, a, b]) for a, b in zip(first, second, strict=True)]
    config = learner_job(folder, algorithm={"advantage": "grpo_per_turn", "gamma": 0.5})
    batch = _recorded_as_is(assemble([group]))
    ours, plain = copy.deepcopy(policy), copy.deepcopy(policy)
    plain_step(plain, policy, config, _episodes(batch, [group]), lambda _: wanted)
    _train(ours, config, batch)
    torch.testing.assert_close(gradients_of(ours), gradients_of(plain), rtol=1e-4, atol=1e-5)


def _recorded_as_is(batch: TrainingBatch) -> TrainingBatch:
    return replace(batch, behaviour_N=torch.full_like(batch.behaviour_N, -6.0))


def test_the_same_step_from_the_same_state_gives_the_same_bits(
    folder: Path, policy: PreTrainedModel
) -> None:
    config = learner_job(
        folder, learner={"eps": 1e-8, "lr": 1e-3, "max_row_tokens": 64, "microbatch_tokens": 128}
    )
    weights: list[torch.Tensor] = []
    for _ in range(2):
        trainer = Trainer(copy.deepcopy(policy), config, total_steps=10)
        for step in (1, 2, 3):
            trainer.step(assemble(_groups(step)), step)
        weights.append(_weights(trainer.model))
    assert torch.equal(weights[0], weights[1])


def test_gradients_add_up_over_small_micro_batches(folder: Path, policy: PreTrainedModel) -> None:
    learner = {"max_row_tokens": 64, "microbatch_tokens": 64}
    _assert_same_training(policy, learner_job(folder, learner=learner), _groups(num=6))


def test_gradient_checkpointing_changes_no_gradient(folder: Path, policy: PreTrainedModel) -> None:
    config = learner_job(folder, learner={"gradient_checkpointing": True})
    batch = assemble(_groups())
    ours = load_model(config.model, config.learner)
    ours.load_state_dict(policy.state_dict())
    plain = copy.deepcopy(policy)
    _train(ours, config, batch)
    _train(plain, learner_job(folder), batch)
    assert ours.is_gradient_checkpointing
    torch.testing.assert_close(gradients_of(ours), gradients_of(plain), rtol=1e-5, atol=1e-7)


def test_offloaded_activations_give_the_same_bits_and_are_the_inputs_of_layers(
    folder: Path, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    offloaded: list[torch.Size] = []

    class Recording(save_on_cpu):
        """Notes the shapes of what leaves the GPU."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: offloaded.append(tensor.shape) or pack(tensor)

    monkeypatch.setattr(training_model, "save_on_cpu", Recording)
    batch, trained = assemble(_groups()), list[PreTrainedModel]()
    for offload in (False, True):
        learner = {"gradient_checkpointing": True, "offload_activations": offload}
        config = learner_job(folder, learner=learner)
        ours = load_model(config.model, config.learner)
        ours.load_state_dict(policy.state_dict())
        _train(ours, config, batch)
        trained.append(ours)
    assert torch.equal(*map(gradients_of, trained))
    widths = {shape[-1] for shape in offloaded}
    assert widths == {trained[0].config.hidden_size}
    assert len(offloaded) % trained[0].config.num_hidden_layers == 0 < len(offloaded)


def test_bfloat16_stays_close_and_keeps_float32_masters(
    folder: Path, policy: PreTrainedModel
) -> None:
    batch = assemble(_groups())
    ours, plain = copy.deepcopy(policy), copy.deepcopy(policy)
    _train(ours, learner_job(folder, learner={"dtype": "bfloat16"}), batch)
    _train(plain, learner_job(folder), batch)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    close = torch.nn.functional.cosine_similarity(gradients_of(ours), gradients_of(plain), dim=0)
    assert 0.99 < float(close) < 1.0


def test_an_update_without_a_finite_gradient_is_left_out_and_counted(
    folder: Path, policy: PreTrainedModel
) -> None:
    batch = assemble(_groups())
    batch.behaviour_N[:] = float("nan")
    model = copy.deepcopy(policy)
    report = _train(model, learner_job(folder), batch)
    assert torch.equal(_weights(model), _weights(policy))
    assert report.numbers["actor/skipped_updates"] == 1.0
    assert "actor/grad_norm" not in report.numbers


def test_the_learning_rate_follows_its_schedule(folder: Path, policy: PreTrainedModel) -> None:
    config = learner_job(
        folder, learner={"lr": 0.1, "schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.1}
    )
    trainer = Trainer(copy.deepcopy(policy), config, total_steps=5)
    batch = assemble(_groups(num=3))
    rates = [trainer.step(batch, step).numbers["actor/lr"] for step in (1, 2, 3, 4, 5)]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.055, 0.01])


def test_the_gradient_norm_is_bounded(folder: Path, policy: PreTrainedModel) -> None:
    model = copy.deepcopy(policy)
    report = _train(model, learner_job(folder, learner={"grad_clip": 0.01}), assemble(_groups()))
    assert report.numbers["actor/grad_norm"] > 0.01
    assert float(gradients_of(model).norm()) == pytest.approx(0.01, rel=1e-3)


def test_dppo_corrects_by_itself(folder: Path) -> None:
    assert learner_job(folder, algorithm={"loss": "dppo"}).algorithm.correction == "none"
    with pytest.raises(ValueError, match="correction=tis cannot be used with loss=dppo"):
        learner_job(folder, algorithm={"loss": "dppo", "correction": "tis"})
    with pytest.raises(ValueError, match="correction_cap has no effect"):
        learner_job(folder, algorithm={"loss": "dppo", "correction_cap": 3.0})
