"""Functions of the user's own: they train what the library's do, and wrong ones are told."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tinkermq.actors.learner.curriculum import Curriculum, CurriculumConfig, keeps_of
from tinkermq.actors.learner.custom_check import check_function
from tinkermq.actors.learner.data_order import DataOrder
from tinkermq.actors.training.batch import assemble
from tinkermq.actors.training.functions.calls import OwnFunctions
from tinkermq.actors.training.functions.wire import CurriculumInputs, FilterInputs, Kind
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


def _trained(folder: Path, own: OwnFunctions, **algorithm: Any) -> dict[str, torch.Tensor]:
    config = JobConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "env": {"game": "none"},
            "learner": {"lr": 0.1, "eps": 1.0, "grad_clip": 1e9},
            "rollout": {"max_prompt_tokens": 16, "max_turn_tokens": 16, "max_response_tokens": 48},
            "algorithm": algorithm,
        }
    )
    for name, target in algorithm.items():
        if name.startswith("own_"):
            own.load(cast("Kind", name.removeprefix("own_")), target)
    model = load_model(config.model, config.learner)
    trainer = Trainer(model, config, total_steps=10, functions=own)
    rng = np.random.default_rng(0)
    groups = [random_group(rng, number, version=3) for number in range(3)]
    trainer.step(assemble(groups), 4)
    return trainer.weights()


@pytest.fixture(scope="module")
def own() -> Iterator[OwnFunctions]:
    """A process of functions, which takes seconds to start."""
    with closing(OwnFunctions({"loss": f"{EXAMPLES}:clipped"})) as functions:
        yield functions


def test_own_functions_train_what_the_same_ones_of_the_library_do(
    folder: Path, own: OwnFunctions
) -> None:
    library = _trained(folder, own, advantage="dr_grpo", loss="reinforce", correction="tis")
    once = _trained(
        folder,
        own,
        own_advantage=f"{HERE}:own_dr_grpo",
        own_loss=f"{HERE}:own_reinforce",
        own_correction=f"{HERE}:own_tis",
    )
    assert all(torch.allclose(one, once[name], atol=1e-6) for name, one in library.items())
    again = _trained(
        folder,
        own,
        own_advantage=f"{HERE}:own_dr_grpo",
        own_loss=f"{HERE}:own_reinforce",
        own_correction=f"{HERE}:own_tis",
    )
    assert all(torch.equal(one, again[name]) for name, one in once.items())


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
    folder: Path, kind: str, name: str, words: str, own: OwnFunctions
) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        _trained(folder, own, **{f"own_{kind}": f"{HERE}:{name}"})
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


def raises_no_exception(group: Any) -> Any:
    """Raise what the group names."""
    raise FOREIGN[group.data_source]


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
def test_whatever_a_function_raises_is_told_as_its_own(name: str, own: OwnFunctions) -> None:
    function = own.load("filter", f"{HERE}:raises_no_exception")
    nothing = np.zeros(0)
    inputs = FilterInputs(nothing, nothing.astype(int), nothing.astype(bool), [], name, None)
    with pytest.raises(ConfigError, match=f"raised {name}") as raised:
        function.decision(inputs)
    assert f"algorithm.own_filter={HERE}:raises_no_exception" in raised.value.message
    assert "(test_own_functions.py, line" in raised.value.message


def test_an_answer_that_raises_as_it_is_read_is_told(own: OwnFunctions) -> None:
    function = own.load("curriculum", f"{HERE}:strange_weights")
    with pytest.raises(ConfigError, match="raised NoException: no array"):
        function.weights(CurriculumInputs(np.zeros(2), np.zeros(2)))


@pytest.mark.parametrize("name", ["waits", "yields"])
def test_a_function_that_answers_later_is_refused_as_it_is_loaded(
    name: str, own: OwnFunctions
) -> None:
    with pytest.raises(ConfigError, match="is async or a generator") as raised:
        own.load("loss", f"{HERE}:{name}")
    assert f"algorithm.own_loss={HERE}:{name}" in raised.value.message


def test_a_module_that_raises_no_exception_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising = (
        "raise KeyboardInterrupt",
        "raise SystemExit",
        "class B(BaseException): ...\nraise B",
    )
    for number, source in enumerate(raising):
        (tmp_path / f"raising_{number}.py").write_text(source)
    (tmp_path / "sound.py").write_text("def loss(inputs): ...")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with closing(OwnFunctions({"loss": "sound:loss"})) as functions:
        for number in range(len(raising)):
            with pytest.raises(ConfigError, match="cannot be imported: ") as raised:
                functions.load("loss", f"raising_{number}:loss")
            assert f"raised at raising_{number}.py, line" in raised.value.hint


def test_a_module_that_is_not_there_is_told(folder: Path, own: OwnFunctions) -> None:
    with pytest.raises(ConfigError, match="cannot be imported: ModuleNotFoundError"):
        _trained(folder, own, own_loss="nowhere_at_all:loss")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("loss", "clipped"),
        *(
            pytest.param(*example, marks=pytest.mark.full)
            for example in (
                ("advantage", "best_of_group"),
                ("correction", "square_root"),
                ("mask", "certain"),
                ("filter", "neither_hopeless_nor_easy"),
                ("curriculum", "hardest"),
            )
        ),
    ],
)
def test_the_examples_pass_the_check(kind: Kind, name: str) -> None:
    results = list(run_checks(check_function(kind, f"{EXAMPLES}:{name}")))
    assert [one.detail for one in results if not one.ok] == []
    assert len(results) >= 3


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("upside_down", "it rewards"),
        *(
            pytest.param(*wrong, marks=pytest.mark.full)
            for wrong in (
                ("at_random", "the same twice"),
                ("over_the_batch", "micro-batches"),
                ("no_gradient", "it keeps a finite gradient"),
                ("scalar", "one finite value for each token"),
            )
        ),
    ],
)
def test_the_check_finds_what_is_wrong(name: str, question: str) -> None:
    results = run_checks(check_function("loss", f"{HERE}:{name}"))
    assert question in [one.name for one in results if not one.ok]


def test_a_mask_of_ones_own_drops_what_it_does_not_keep(folder: Path, own: OwnFunctions) -> None:
    whole = _trained(folder, own, correction="tis", correction_masks=[{"of": "ratio", "low": 1e-9}])
    kept = _trained(folder, own, own_mask=f"{HERE}:every_second")
    assert any(not torch.equal(one, kept[name]) for name, one in whole.items())
    with pytest.raises(ConfigError, match="returned marks that are neither 0 nor 1"):
        _trained(folder, own, own_mask=f"{HERE}:half_marks")


def _group(*rewards: float) -> Group:
    episodes = [make_trajectory([1], [([11, 12], [])], [reward]) for reward in rewards]
    return make_group(episodes)


def test_a_filter_of_ones_own_says_which_groups_are_trained(own: OwnFunctions) -> None:
    keeps = keeps_of(own.load("filter", f"{EXAMPLES}:neither_hopeless_nor_easy"))
    assert keeps is not None
    assert [keeps(_group(*one)) for one in ((0, 0), (1, 0), (1, 1))] == [False, True, False]
    assert keeps_of(None) is None
    unsure = keeps_of(own.load("filter", f"{HERE}:says_maybe"))
    assert unsure is not None
    with pytest.raises(ConfigError, match="returned 'maybe' in place of True"):
        unsure(_group(1, 0))
    nothing = keeps_of(own.load("filter", f"{HERE}:none_of_them"))
    assert nothing is not None
    group = _group(1, 0)
    assert not any(nothing(group) for _ in range(4096))
    with pytest.raises(ConfigError, match="has left out the last 4097 groups"):
        nothing(group)


def test_a_curriculum_of_ones_own_weighs_the_tasks(own: OwnFunctions) -> None:
    settings = CurriculumConfig(3, 0.0, 0.5, own.load("curriculum", f"{EXAMPLES}:hardest").weights)
    state = LearnerState(success=[(0, 8.0, 8.0), (1, 8.0, 8.0), (2, 8.0, 0.0)])
    order = Curriculum(DataOrder(0, 3), settings, state)
    assert {order.choose(index, 1).item for index in range(50)} == {2}
    inputs = CurriculumInputs(np.zeros(3), np.zeros(3))
    for name, words in (("too_few", r"of shape \[1\] for 3 tasks"), ("below_zero", "negative")):
        with pytest.raises(ConfigError, match=words):
            own.load("curriculum", f"{HERE}:{name}").weights(inputs)


@pytest.mark.full
def test_a_function_is_found_by_the_name_under_which_a_package_has_registered_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    entry = f"[tinkermq.algorithms]\nmy-clip = {EXAMPLES}:clipped\n"
    (package / "entry_points.txt").write_text(entry)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert all(result.ok for result in run_checks(check_function("loss", "my-clip")))
    (told,) = run_checks(check_function("loss", "your-clip"))
    assert "is registered by no package here" in told.detail
    assert "my-clip" in told.hint
