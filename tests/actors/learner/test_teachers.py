"""Teachers: the reverse KL of each token as its advantage, alone or beside rewards."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.policy.tiny_models import make_tokenizer
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.distillation import (
    check_same_language,
    forward_kl,
    teacher_advantage,
)
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, Teaching, Trajectory
from tinkermq.schemas.wire.errors import DataError, ModelError

from tests.actors.learner.plain_step import plain_logprobs
from tests.support.configs import learner_job
from tests.support.groups import random_group
from tests.support.models import changed, gradients_of, loaded

torch.set_num_threads(1)
VERSION = 3


def _config(folder: Path, **algorithm: Any) -> JobConfig:
    return learner_job(folder, algorithm=algorithm)


@pytest.fixture(scope="module")
def teacher(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that has moved away from it."""
    place = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(folder, place)
    config = _config(folder)
    model = load_model(config.model, config.learner)
    loaded(model, changed(model, seed=5, scale=0.1)).save_pretrained(place)
    return place


def _groups(sources: tuple[str, ...] = ("", "")) -> list[Group]:
    rng = np.random.default_rng(0)
    groups = [random_group(rng, number, version=VERSION) for number in range(len(sources))]
    return [
        group.model_copy(
            update={
                "trajectories": [
                    item.model_copy(update={"data_source": source}) for item in group.trajectories
                ]
            }
        )
        for group, source in zip(groups, sources, strict=True)
    ]


def _trainer(config: JobConfig) -> Trainer:
    return Trainer(load_model(config.model, config.learner), config, total_steps=10)


def _moved(config: JobConfig, groups: list[Group]) -> tuple[dict[str, torch.Tensor], Any]:
    trainer = _trainer(config)
    report = trainer.step(assemble(groups), VERSION + 1)
    return trainer.weights(), report.numbers


def test_the_gap_to_the_teacher_is_what_each_token_is_credited_with(
    folder: Path, teacher: Path
) -> None:
    config, groups = _config(folder, teacher=str(teacher), reward_coef=0.0), _groups()
    trainer = _trainer(config)
    batch = assemble(groups)
    numbers = trainer.step(batch, VERSION + 1).numbers
    own = load_model(config.model, config.learner)
    theirs = load_model(_config(teacher).model, config.learner)
    gaps = torch.cat(
        [
            torch.cat(plain_logprobs(theirs, group.sampled, 1.0)[0])
            - torch.cat(plain_logprobs(own, group.sampled, 1.0)[0])
            for group in groups
        ]
    ).detach()
    assert numbers["distillation/reverse_kl"] == pytest.approx(-float(gaps.mean()), abs=1e-5)
    assert numbers["critic/advantages/max"] == pytest.approx(float(gaps.max()), abs=1e-4)
    assert numbers["distillation/taught_share"] == 1.0
    assert numbers["actor/grad_norm"] > 0


def test_a_teacher_that_is_the_policy_itself_changes_nothing(folder: Path) -> None:
    groups = _groups()
    alone, _ = _moved(_config(folder), groups)
    beside, numbers = _moved(_config(folder, teacher=str(folder), teacher_coef=3.0), groups)
    assert numbers["distillation/reverse_kl"] == pytest.approx(0.0, abs=1e-6)
    for name, tensor in alone.items():
        assert torch.allclose(tensor, beside[name], atol=1e-5), name
    silent, told = _moved(_config(folder, teacher=str(folder), reward_coef=0.0), groups)
    assert told["actor/grad_norm"] == pytest.approx(0.0, abs=1e-4)
    assert set(silent) == set(alone)


def test_teaching_brings_the_policy_nearer_and_repeats_to_the_bit(
    folder: Path, teacher: Path
) -> None:
    config = _config(folder, teacher=str(teacher), reward_coef=0.0, teacher_normalise=True)
    config.learner.lr = 1e-3
    runs: list[list[float]] = []
    weights: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        trainer, kls = _trainer(config), list[float]()
        for step in range(1, 13):
            kls.append(trainer.step(assemble(_groups()), step).numbers["distillation/reverse_kl"])
        runs.append(kls)
        weights.append(trainer.weights())
    assert runs[0] == runs[1]
    assert runs[0][-1] != runs[0][0]
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())


def test_each_data_source_has_its_own_teacher(folder: Path, teacher: Path) -> None:
    groups = _groups(("math", "code", "other"))
    config = _config(folder, teacher={"math": str(teacher), "code": str(folder)})
    _, numbers = _moved(config, groups)
    counts = [sum(one.num_generated for one in group.sampled) for group in groups]
    assert numbers["distillation/taught_share"] == pytest.approx(sum(counts[:2]) / sum(counts))
    _, only = _moved(_config(folder, teacher=str(teacher)), groups[:1])
    kl = only["distillation/reverse_kl"] * counts[0] / sum(counts[:2])
    assert numbers["distillation/reverse_kl"] == pytest.approx(kl, abs=1e-5)
    _, all_taught = _moved(_config(folder, teacher={"math": str(folder), "": str(teacher)}), groups)
    assert all_taught["distillation/taught_share"] == 1.0


def test_normalised_gaps_keep_their_sign() -> None:
    gap, taught = torch.tensor([0.5, 1.5, -1.0, 0.0]), torch.tensor([True, True, True, False])
    scaled = teacher_advantage(gap, taught, normalise=True)
    assert torch.allclose(scaled[:3], gap[:3] / gap[:3].std(), atol=1e-5)
    assert scaled[3] == 0
    assert teacher_advantage(gap, taught, normalise=False) is gap


def test_a_teacher_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"has another tokenizer than .*: 1 entries differ"):
        check_same_language(_config(folder), str(tmp_path / "other"))
    check_same_language(_config(folder), str(folder))


def test_the_forward_kl_counts_all_other_tokens_as_one() -> None:
    teacher = torch.tensor([[0.5, 0.2], [0.6, 0.4]]).log()
    policy = torch.tensor([[0.25, 0.25], [0.6, 0.4]]).log().requires_grad_()
    # 0.5 ln 2 + 0.2 ln (0.2/0.25) + 0.3 ln (0.3/0.5); where both agree, and nothing is left: 0.
    expected = 0.5 * np.log(2) + 0.2 * np.log(0.8) + 0.3 * np.log(0.6)
    kl = forward_kl(policy, teacher)
    torch.testing.assert_close(
        kl, torch.tensor([expected, 0.0], dtype=torch.float32), atol=1e-6, rtol=0
    )
    kl[0].backward()
    assert policy.grad is not None
    # d/d log π_k = −p_k + rest · π_k / (1 − Σπ)
    torch.testing.assert_close(policy.grad[0], torch.tensor([-0.5 + 0.15, -0.2 + 0.15]))


def _plain_forward_kl(
    policy: Any, teacher: Any, groups: list[Group], top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean forward KL over the tokens, one episode after the other, and the whole KL's."""
    found, whole = [], []
    for item in (one for group in groups for one in group.sampled):
        ids = torch.from_numpy(item.token_ids.astype(np.int64))[None]
        at = np.flatnonzero(item.mask) - 1
        own = policy(ids, use_cache=False).logits[0, at].log_softmax(-1)
        with torch.no_grad():
            theirs = teacher(ids, use_cache=False).logits[0, at].log_softmax(-1)
        top = theirs.topk(top_k, -1)
        picked = own.gather(1, top.indices)
        rest, own_rest = (1 - one.exp().sum(-1) for one in (top.values, picked))
        kl = (top.values.exp() * (top.values - picked)).sum(-1)
        found.append(kl + rest * (rest.log() - own_rest.log()))
        whole.append((theirs.exp() * (theirs - own)).sum(-1))
    return torch.cat(found).mean(), torch.cat(whole).mean()


def test_a_forward_kl_has_the_loss_and_the_gradient_of_a_plain_implementation(
    folder: Path, teacher: Path
) -> None:
    keys = {"teacher": str(teacher), "teacher_loss": "forward_kl", "teacher_top_k": 8}
    config = _config(folder, reward_coef=0.0, teacher_coef=0.5, **keys)
    groups = _groups()
    trainer = _trainer(config)
    own, theirs = (load_model(_config(one).model, config.learner) for one in (folder, teacher))
    kl, whole = _plain_forward_kl(own, theirs, groups, 8)
    (0.5 * kl).backward()
    numbers = trainer.step(assemble(groups), VERSION + 1).numbers
    assert numbers["actor/teacher_loss"] == pytest.approx(float(kl.detach()), rel=1e-5)
    assert float(kl.detach()) < float(whole.detach())
    torch.testing.assert_close(gradients_of(trainer.model), gradients_of(own), rtol=1e-4, atol=1e-6)
    assert "distillation/reverse_kl" not in numbers  # it needs a pass of its own


def _teaching(teacher: Any, item: Trajectory, top_k: int, prompt: Any = None) -> Teaching:
    """What a teacher elsewhere would have told of a trajectory."""
    first = int(item.mask.argmax())
    ids = item.token_ids if prompt is None else np.concatenate([prompt, item.token_ids[first:]])
    at = np.flatnonzero(item.mask) + (0 if prompt is None else len(prompt) - first)
    tokens = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        logprobs = teacher(tokens[None], use_cache=False).logits[0].log_softmax(-1)[at - 1]
    top = logprobs.topk(top_k, -1)
    return Teaching(
        prompt=prompt,
        logprobs=logprobs.gather(1, tokens[at, None])[:, 0].numpy(),
        top_ids=top.indices.int().numpy(),
        top_logprobs=top.values.numpy(),
    )


@pytest.mark.parametrize("loss", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("with_context", [False, True])
def test_what_a_teacher_told_before_is_learnt_as_if_it_were_asked_now(
    folder: Path, teacher: Path, loss: str, with_context: bool
) -> None:
    keys: dict[str, Any] = {"teacher_loss": loss, "reward_coef": 0.0}
    if with_context:
        keys["teacher_context"] = "solution"
    if loss == "forward_kl":
        keys["teacher_top_k"] = 4
    theirs = load_model(_config(teacher).model, _config(teacher).learner)
    prompt = np.array([9, 8, 7, 9, 8, 7], np.int32) if with_context else None
    told = [
        group.model_copy(
            update={
                "trajectories": [
                    item.model_copy(update={"teaching": _teaching(theirs, item, 4, prompt)})
                    for item in group.trajectories
                ]
            }
        )
        for group in _groups()
    ]
    sent = [Group.from_bytes(group.to_bytes()) for group in told]
    asked, numbers = _moved(_config(folder, teacher="job:teacher", **keys), sent)
    loaded_here, wanted = _moved(_config(folder, teacher=str(teacher), **keys), sent)
    name = "actor/teacher_loss" if loss == "forward_kl" else "distillation/reverse_kl"
    assert numbers[name] == pytest.approx(wanted[name], rel=1e-4)
    assert abs(wanted[name]) > 1e-3
    for key, tensor in asked.items():
        torch.testing.assert_close(tensor, loaded_here[key], rtol=1e-3, atol=1e-5)


def test_the_policy_teaches_itself_by_what_it_reads_beside_its_prompt(folder: Path) -> None:
    config = _config(folder, teacher="self", teacher_context="solution", reward_coef=0.0)
    prompt = np.array([9, 8, 7, 9], np.int32)
    groups = [
        group.model_copy(
            update={
                "trajectories": [
                    item.model_copy(update={"teaching": Teaching(prompt=prompt)})
                    for item in group.trajectories
                ]
            }
        )
        for group in _groups()
    ]
    own = load_model(config.model, config.learner)
    gaps = []
    for item in (one for group in groups for one in group.sampled):
        logprobs = _teaching(own, item, 1, prompt).logprobs
        plain = torch.cat(plain_logprobs(own, [item], 1.0)[0]).detach().numpy()
        gaps.append(logprobs - plain)
    _, numbers = _moved(config, groups)
    mean = float(np.concatenate(gaps).mean())
    assert numbers["distillation/reverse_kl"] == pytest.approx(-mean, abs=1e-5)


def test_groups_without_what_a_teacher_needs_are_refused(folder: Path) -> None:
    asked = _trainer(_config(folder, teacher="job:teacher"))
    with pytest.raises(DataError, match="no log-probs of its teacher, which generators ask"):
        asked.check_readable(_groups()[0])
    own = _trainer(_config(folder, teacher="self", teacher_context="solution"))
    with pytest.raises(DataError, match=r"no prompt for its teacher \(algorithm.teacher_context\)"):
        own.check_readable(_groups()[0])
    math_only = _trainer(_config(folder, teacher={"math": "job:teacher"}))
    math_only.check_readable(_groups(("other",))[0])


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"teacher": "self"}, "teacher=self scores each token as the policy does"),
        ({"teacher": "job:"}, "job: names no job"),
        ({"teacher": "https://host/v1"}, "names no model: write https://HOST/v1"),
        ({"teacher": "https://me:secret@host/v1?model=m"}, "without a password"),
        ({"teacher": "m", "teacher_top_k": 4}, "teacher_top_k has no effect while teacher_loss"),
        ({"teacher_loss": "forward_kl"}, "teacher_loss has no effect while teacher is None"),
        (
            {"teacher": "m", "teacher_loss": "forward_kl", "teacher_normalise": True},
            "teacher_normalise has no effect while teacher_loss is 'forward_kl'",
        ),
    ],
)
def test_names_and_keys_of_teachers_that_cannot_be_are_refused(
    folder: Path, algorithm: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _config(folder, **algorithm)
