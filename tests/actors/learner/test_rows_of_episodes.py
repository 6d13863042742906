"""An episode counts once, in however many rows it stands."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tinkermq.actors.learner.group_metrics import group_numbers
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group, Trajectory
from tinkermq.schemas.task import Task

from tests.support.groups import make_group, make_trajectory
from tests.support.models import gradients_of

torch.set_num_threads(1)


def calls_of(rng: np.random.Generator, num_calls: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the prompt's and the generated tokens of each call of an episode."""
    return [
        (rng.integers(1, 200, rng.integers(2, 5)), rng.integers(1, 200, rng.integers(1, 5)))
        for _ in range(num_calls)
    ]


def row(
    calls: list[tuple[np.ndarray, np.ndarray]], trained: list[int], reward: float, **more: Any
) -> Trajectory:
    """Return the row up to the last of the trained calls."""
    ids, mask, ends = [], [], []
    for number, (given, said) in enumerate(calls[: trained[-1] + 1]):
        ids += [*given, *said]
        mask += [0] * len(given) + [int(number in trained)] * len(said)
        if number in trained:
            ends.append(len(ids) - 1)
    flags = np.array(mask, np.uint8)
    rewards = np.zeros(len(ends), np.float32)
    rewards[-1] = reward
    return Trajectory(
        token_ids=np.array(ids, np.int32),
        mask=flags,
        logprobs=np.where(flags, -1.0, 0.0).astype(np.float32),
        versions=np.where(flags, 0, -1).astype(np.int32),
        turn_ends=np.array(ends, np.int32),
        rewards=rewards,
        **more,
    )


def groups_of(*, split: bool) -> list[Group]:
    """Return two groups of three episodes; with `split`, each call stands in a row of its own."""
    rng = np.random.default_rng(3)
    groups: list[Group] = []
    for task in range(2):
        rows: list[Trajectory] = []
        for episode in range(3):
            calls, reward = calls_of(rng, 1 + (task + episode) % 3), float(rng.normal())
            everything = list(range(len(calls)))
            if not split:
                rows.append(row(calls, everything, reward))
                continue
            rows.append(row(calls, everything[-1:], reward, episode=episode, kind="main"))
            rows += [row(calls, [n], 0.0, episode=episode) for n in everything[:-1]]
        made = Task(task=task, seed=task, group_size=3)
        groups.append(Group(task=made, trajectories=rows, source="test"))
    return groups


@pytest.mark.parametrize(
    ("advantage", "loss_agg"),
    [
        ("grpo", "token-mean"),
        ("grpo", "seq-mean-token-mean"),
        ("rloo", "seq-mean-token-sum"),
        ("dr_grpo", "seq-mean-token-sum-norm"),
        ("opo", "seq-mean-token-mean"),
        ("reinforce_pp_baseline", "token-mean"),
    ],
)
def test_a_step_is_the_same_with_each_call_in_a_row_of_its_own(
    folder: Path, advantage: str, loss_agg: str
) -> None:
    config = JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "algorithm": {"advantage": advantage, "loss_agg": loss_agg, "loss": "cispo"},
            "learner": {"lr": 0.1, "eps": 1.0, "microbatch_tokens": 24, "max_row_tokens": 24},
            "rollout": {"max_prompt_tokens": 8, "max_turn_tokens": 8, "max_response_tokens": 16},
        }
    )
    trained: list[tuple[dict[str, float], torch.Tensor]] = []
    for split in (False, True):
        model = load_model(config.model, config.learner)
        report = Trainer(model, config, total_steps=10).step(assemble(groups_of(split=split)), 1)
        trained.append((report.numbers, gradients_of(model)))
    (numbers, gradient), (again, split_gradient) = trained
    assert gradient.abs().max() > 0
    assert torch.allclose(gradient, split_gradient, rtol=1e-4, atol=1e-7)
    assert numbers["actor/grad_norm"] == pytest.approx(again["actor/grad_norm"], rel=1e-5)
    assert numbers["critic/rewards/mean"] == pytest.approx(again["critic/rewards/mean"])


def test_a_greedy_episode_of_several_rows_is_one_baseline() -> None:
    [group] = groups_of(split=True)[:1]
    extra = groups_of(split=True)[1].trajectories[2:5]
    greedy = [item.model_copy(update={"greedy": True, "episode": 3}) for item in extra]
    greedy[1] = greedy[1].model_copy(update={"rewards": np.array([0.25], np.float32)})
    task = group.task.model_copy(update={"greedy_baseline": True})
    rows = [*group.trajectories, *greedy]
    batch = assemble([group.model_copy(update={"task": task, "trajectories": rows})])
    assert batch.baseline_E is not None
    assert batch.baseline_E.tolist() == pytest.approx([greedy[0].reward + 0.25] * 3)


def test_the_numbers_of_a_step_count_episodes() -> None:
    whole, split = (group_numbers(groups_of(split=split), 1, 99, 0.0) for split in (False, True))
    for name in ("rollout/episodes", "critic/score/mean", "num_turns/max", "game/success_rate"):
        assert whole[name] == pytest.approx(split[name])
    assert whole["rollout/generated_tokens"] == split["rollout/generated_tokens"]


def test_the_numbers_of_agents_episodes_tell_their_trees() -> None:
    ids = [[1, 2, 3, 9], [1, 2, 3, 4, 9], [1, 5, 9, 9, 9]]
    figures = [{"calls": 3, "branch_edited": 1.0, "note": "x"}, None, {"calls": 1}]
    rows = [
        make_trajectory(
            one[:-1],
            [(one[-1:], [])],
            [1.0],
            kind="edited" if place == 1 else "main",
            episode=place // 2,
            info={} if figures[place] is None else {"agent": figures[place], "outcome": "done"},
        )
        for place, one in enumerate(ids)
    ]
    numbers = group_numbers([make_group(rows)], 1, 99, 0.0)
    assert {name: n for name, n in numbers.items() if name.startswith("agent/")} == {
        "agent/calls": 2.0,
        "agent/branch_edited": 0.5,
        "agent/outcome_done": 1.0,
        "agent/rows_per_episode": 1.5,
        "agent/row_share/edited": pytest.approx(1 / 3),
        "agent/row_share/main": pytest.approx(2 / 3),
        "agent/shared_token_share": pytest.approx(4 / 14),
    }
    assert not [
        name for name in group_numbers(groups_of(split=False), 1, 99, 0.0) if "agent/" in name
    ]
    odd = rows[2].model_copy(update={"info": {"agent": [1]}})
    assert "agent/calls" in group_numbers([make_group([*rows[:2], odd])], 1, 99, 0.0)


def test_the_share_that_forms_of_answers_took_out_is_told_where_some_were_demanded() -> None:
    def numbers_of(*figures: dict[str, Any]) -> dict[str, float]:
        rows = [
            make_trajectory([1, 2], [([7, 8, 9], [])], [1.0], kind="main", episode=place, info=info)
            for place, info in enumerate({"agent": told} for told in figures)
        ]
        return group_numbers([make_group(rows)], 1, 99, 0.0)

    assert "rollout/masked_share" not in numbers_of({"calls": 1}, {"calls": 1})
    both = numbers_of({"calls": 1, "masked_tokens": 1.5}, {"calls": 1})
    assert both["rollout/masked_share"] == pytest.approx(1.5 / 6)


def test_a_step_tells_how_far_log_probs_differ_by_kind_of_row(folder: Path) -> None:
    config = JobConfig.model_validate({"model": {"path": str(folder)}, "env": {"game": "none"}})
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=10)
    report = trainer.step(assemble(groups_of(split=True)), 1)
    assert report.numbers["agent/abs_log_ratio/main"] > 0
    assert [name for name in report.numbers if "agent/" in name] == ["agent/abs_log_ratio/main"]
    report = trainer.step(assemble(groups_of(split=False)), 2)
    assert not [name for name in report.numbers if "agent/" in name]


def test_a_group_with_an_episode_less_or_in_pieces_is_refused() -> None:
    group = groups_of(split=True)[1]
    assert [len(rows) for rows in group.episodes] == [2, 3, 1]
    for rows, told in (
        (group.trajectories[:5], "has 3 episodes, this has 2"),
        ([*group.trajectories[1:], group.trajectories[0]], "stand apart"),
    ):
        with pytest.raises(ValidationError, match=told):
            Group(task=group.task, trajectories=rows, source="test")
