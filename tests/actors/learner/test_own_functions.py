"""Functions of the user's own: they train what the library's do, and wrong ones are told."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tinkermq.actors.learner.curriculum import (
    Curriculum,
    CurriculumConfig,
    CurriculumInputs,
    CustomCurriculum,
    keeps_of,
)
from tinkermq.actors.learner.custom_check import check_function
from tinkermq.actors.learner.data_order import DataOrder
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.custom import Kind, custom_function
from tinkermq.actors.training.model import load_model
from tinkermq.actors.training.state import LearnerState
from tinkermq.actors.training.step import Trainer
from tinkermq.schemas.checks import run_checks
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.wire.errors import ConfigError

from tests.support.groups import make_group, make_trajectory, random_group

torch.set_num_threads(1)
HERE = "tests.actors.learner.test_own_functions"
EXAMPLES = "examples.own_algorithms"


def scalar(inputs: Any) -> torch.Tensor:
    """One value for all tokens."""
    return inputs.logprobs_N.mean()


def not_a_number(inputs: Any) -> torch.Tensor:
    """NaN for one token."""
    values = torch.zeros(len(inputs.seq_N))
    values[0] = torch.nan
    return values


def no_gradient(inputs: Any) -> torch.Tensor:
    """A loss that learns nothing."""
    return -inputs.logprobs_N.detach() * inputs.advantages_N


def raises(inputs: Any) -> torch.Tensor:
    """A mistake."""
    return inputs.nothing_of_the_kind


def negative(inputs: Any) -> torch.Tensor:
    """Weights under 0."""
    return -torch.ones(len(inputs.seq_N))


def at_random(inputs: Any) -> torch.Tensor:
    """Another loss with each call."""
    return -inputs.logprobs_N * inputs.advantages_N * torch.rand(1)


def upside_down(inputs: Any) -> torch.Tensor:
    """The sign is forgotten."""
    return inputs.logprobs_N * inputs.advantages_N


def over_the_batch(inputs: Any) -> torch.Tensor:
    """Whitened over whatever stands in the micro-batch."""
    advantages = inputs.advantages_N
    return -inputs.logprobs_N * (advantages - advantages.mean()) / advantages.std()


def own_reinforce(inputs: Any) -> torch.Tensor:
    """The library's reinforce, written again."""
    return -inputs.logprobs_N * inputs.advantages_N


def own_tis(inputs: Any) -> torch.Tensor:
    """The library's tis, written again."""
    return (inputs.old_logprobs_N - inputs.behaviour_logprobs_N).exp().clamp(max=2.0)


def own_dr_grpo(inputs: Any) -> torch.Tensor:
    """The library's dr_grpo, written again."""
    sums = torch.zeros(int(inputs.group_S.max()) + 1).index_add(0, inputs.group_S, inputs.rewards_S)
    means = sums / torch.bincount(inputs.group_S)
    return (inputs.rewards_S - means[inputs.group_S])[inputs.seq_N]


def half_marks(inputs: Any) -> torch.Tensor:
    """Marks that are neither 0 nor 1."""
    return torch.full((len(inputs.seq_N),), 0.5)


def every_second(inputs: Any) -> torch.Tensor:
    """Every second token."""
    return torch.arange(len(inputs.seq_N)) % 2 == 0


def says_maybe(group: Any) -> Any:
    """No answer."""
    del group
    return "maybe"


def none_of_them(group: Any) -> bool:
    """Leave out everything."""
    del group
    return False


def too_few(tasks: Any) -> Any:
    """One weight for all tasks."""
    del tasks
    return [1.0]


def below_zero(tasks: Any) -> Any:
    """Weights under 0."""
    return tasks.rates_I - 1


def _trained(folder: Path, **algorithm: Any) -> dict[str, torch.Tensor]:
    config = JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "learner": {"lr": 0.1, "eps": 1.0, "grad_clip": 1e9},
            "rollout": {"max_prompt_tokens": 16, "max_turn_tokens": 16, "max_response_tokens": 48},
            "algorithm": algorithm,
        }
    )
    trainer = Trainer(load_model(config.model, config.learner), config, total_steps=10)
    rng = np.random.default_rng(0)
    groups = [random_group(rng, number, version=3) for number in range(3)]
    trainer.step(assemble(groups), 4)
    return trainer.weights()


def test_own_functions_train_what_the_same_ones_of_the_library_do(folder: Path) -> None:
    library = _trained(folder, advantage="dr_grpo", loss="reinforce", correction="tis")
    own = _trained(
        folder,
        own_advantage=f"{HERE}:own_dr_grpo",
        own_loss=f"{HERE}:own_reinforce",
        own_correction=f"{HERE}:own_tis",
    )
    assert all(torch.allclose(one, own[name], atol=1e-6) for name, one in library.items())
    again = _trained(
        folder,
        own_advantage=f"{HERE}:own_dr_grpo",
        own_loss=f"{HERE}:own_reinforce",
        own_correction=f"{HERE}:own_tis",
    )
    assert all(torch.equal(one, again[name]) for name, one in own.items())


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("loss", "scalar", r"losses of shape \[\] for \d+ tokens"),
        ("loss", "not_a_number", "1 losses of .* that are NaN"),
        ("loss", "no_gradient", "without a gradient"),
        ("loss", "raises", "raised AttributeError: .*test_own_functions.py, line"),
        ("loss", "there_is_none", "has no function 'there_is_none'"),
        ("advantage", "not_a_number", "1 advantages of"),
        ("correction", "negative", "returned a negative weight: -1"),
    ],
)
def test_a_wrong_function_ends_the_step_with_its_name_and_what_to_do(
    folder: Path, kind: str, name: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        _trained(folder, **{f"own_{kind}": f"{HERE}:{name}"})
    assert f"algorithm.own_{kind}={HERE}:{name}" in raised.value.message
    assert raised.value.hint


class NoException(BaseException):
    """What `except Exception` does not catch."""


class Unsayable(BaseException):
    """Raises as it is shown."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


FOREIGN = {
    "KeyboardInterrupt": KeyboardInterrupt(),
    "SystemExit": SystemExit(1),
    "NoException": NoException("mine"),
    "CancelledError": asyncio.CancelledError(),
    "Unsayable": Unsayable(),
    "BaseExceptionGroup": BaseExceptionGroup("g", [NoException("x")]),
    "StopIteration": StopIteration(),
    "ValueError": ValueError("cut \ud83d"),
}


def raises_no_exception(inputs: Any) -> Any:
    """Raise what the test has put there."""
    raise inputs


def strange_weights(inputs: Any) -> Any:
    """Return what raises as it is read."""

    class Strange:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise NoException("no array")

    return Strange()


async def waits(inputs: Any) -> torch.Tensor:
    """Be a coroutine."""
    return inputs.logprobs_N


def yields(inputs: Any) -> Any:
    """Be a generator."""
    yield inputs


@pytest.mark.parametrize("name", FOREIGN)
def test_whatever_a_function_raises_is_told_as_its_own(name: str) -> None:
    function = custom_function("filter", f"{HERE}:raises_no_exception")
    assert function is not None
    with pytest.raises(ConfigError, match=f"raised {name}") as raised:
        function.called(FOREIGN[name])
    assert f"algorithm.own_filter={HERE}:raises_no_exception" in raised.value.message
    assert "(test_own_functions.py, line" in raised.value.message


def test_an_answer_that_raises_as_it_is_read_is_told() -> None:
    function = custom_function("curriculum", f"{HERE}:strange_weights")
    assert function is not None
    inputs = CurriculumInputs(np.zeros(2), np.zeros(2))
    with pytest.raises(ConfigError, match="raised NoException: no array"):
        CustomCurriculum(function).weigh(inputs)


@pytest.mark.parametrize("name", ["waits", "yields"])
def test_a_function_that_answers_later_is_refused_as_it_is_loaded(name: str) -> None:
    with pytest.raises(ConfigError, match="is async or a generator") as raised:
        custom_function("loss", f"{HERE}:{name}")
    assert f"algorithm.own_loss={HERE}:{name}" in raised.value.message


@pytest.mark.parametrize(
    "source",
    ["raise KeyboardInterrupt", "raise SystemExit", "class B(BaseException): ...\nraise B"],
)
def test_a_module_that_raises_no_exception_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    name = f"own_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be imported: ") as raised:
        custom_function("loss", f"{name}:loss")
    assert f"raised at {name}.py, line" in raised.value.hint


def test_a_module_that_is_not_there_is_told(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be imported: ModuleNotFoundError"):
        _trained(folder, own_loss="nowhere_at_all:loss")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("advantage", "best_of_group"),
        ("loss", "clipped"),
        ("correction", "square_root"),
        ("mask", "certain"),
        ("filter", "neither_hopeless_nor_easy"),
        ("curriculum", "hardest"),
    ],
)
def test_the_examples_pass_the_check(kind: Kind, name: str) -> None:
    results = list(run_checks(check_function(kind, f"{EXAMPLES}:{name}")))
    assert [one.detail for one in results if not one.ok] == []
    assert len(results) >= 3


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("at_random", "the same twice"),
        ("upside_down", "it rewards"),
        ("over_the_batch", "micro-batches"),
        ("no_gradient", "it keeps a finite gradient"),
        ("scalar", "one finite value for each token"),
    ],
)
def test_the_check_finds_what_is_wrong(name: str, question: str) -> None:
    results = run_checks(check_function("loss", f"{HERE}:{name}"))
    assert question in [one.name for one in results if not one.ok]


def test_a_mask_of_ones_own_drops_what_it_does_not_keep(folder: Path) -> None:
    whole = _trained(folder, correction="tis", correction_masks=[{"of": "ratio", "low": 1e-9}])
    kept = _trained(folder, own_mask=f"{HERE}:every_second")
    assert any(not torch.equal(one, kept[name]) for name, one in whole.items())
    with pytest.raises(ConfigError, match="returned marks that are neither 0 nor 1"):
        _trained(folder, own_mask=f"{HERE}:half_marks")


def _group(*rewards: float) -> Group:
    episodes = [make_trajectory([1], [([11, 12], [])], [reward]) for reward in rewards]
    return make_group(episodes)


def test_a_filter_of_ones_own_says_which_groups_are_trained() -> None:
    keeps = keeps_of(f"{EXAMPLES}:neither_hopeless_nor_easy")
    assert keeps is not None
    assert [keeps(_group(*one)) for one in ((0, 0), (1, 0), (1, 1))] == [False, True, False]
    assert keeps_of(None) is None
    unsure = keeps_of(f"{HERE}:says_maybe")
    assert unsure is not None
    with pytest.raises(ConfigError, match="returned 'maybe' in place of True"):
        unsure(_group(1, 0))
    nothing = keeps_of(f"{HERE}:none_of_them")
    assert nothing is not None
    group = _group(1, 0)
    assert not any(nothing(group) for _ in range(4096))
    with pytest.raises(ConfigError, match="has left out the last 4097 groups"):
        nothing(group)


def test_a_curriculum_of_ones_own_weighs_the_tasks() -> None:
    own = custom_function("curriculum", f"{EXAMPLES}:hardest")
    assert own is not None
    settings = CurriculumConfig(3, 0.0, 0.5, CustomCurriculum(own).weigh)
    state = LearnerState(success=[(0, 8.0, 8.0), (1, 8.0, 8.0), (2, 8.0, 0.0)])
    order = Curriculum(DataOrder(0, 3), settings, state)
    assert {order.choose(index, 1).item for index in range(50)} == {2}
    inputs = CurriculumInputs(np.zeros(3), np.zeros(3))
    for name, words in (("too_few", r"of shape \[1\] for 3 tasks"), ("below_zero", "negative")):
        wrong = custom_function("curriculum", f"{HERE}:{name}")
        assert wrong is not None
        with pytest.raises(ConfigError, match=words):
            CustomCurriculum(wrong).weigh(inputs)


def test_a_function_is_found_by_the_name_under_which_a_package_has_registered_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    entry = f"[tinkermq.algorithms]\nmy-clip = {EXAMPLES}:clipped\n"
    (package / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert all(result.ok for result in run_checks(check_function("loss", "my-clip")))
    (told,) = run_checks(check_function("loss", "your-clip"))
    assert "is registered by no package here" in told.detail
    assert "my-clip" in told.hint
