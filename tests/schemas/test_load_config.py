"""The configuration: its order, and what the user is told about each mistake."""

from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tinkermq.envs.registry import GROUP
from tinkermq.schemas.errors import ConfigError
from tinkermq.schemas.load_config import all_keys, load_config, parse_yaml

LEAST = ["model.path=m", "env.game=bandit"]


def test_defaults_then_file_then_overrides(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: {path: m}\nenv: {game: bandit}\nlearner: {lr: 1e-4, eps: 1e-6}\n")
    config = load_config(file, ["learner.lr=1e-5"])
    assert (config.learner.lr, config.learner.eps, config.learner.grad_clip) == (1e-5, 1e-6, 1.0)


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("learner.lrr=1", "unknown configuration key learner.lrr", "did you mean learner.lr?"),
        ("learnr.lr=1", "unknown configuration key learnr", "learner"),
        ("clip_high=0.3", "unknown configuration key clip_high", "algorithm.clip_high"),
        ("learner.lr", "has no '='", "learner.lr=1e-5"),
    ],
)
def test_an_unknown_key_names_the_closest_known_one(override: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [*LEAST, override])
    assert message in raised.value.message
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.loss=reinforce", "algorithm.clip_high=0.3"],
            "clip_high has no effect while loss is 'reinforce'",
        ),
        (["algorithm.kl_in=reward"], "kl_estimator and kl_in have no effect while kl_coef is 0"),
        (["weights.transport=file", "weights.chunk_bytes=65536"], "chunk_bytes has no effect"),
        (["weights.transport=nccl", "weights.differences=true"], "differences has no effect"),
        (["weights.transport=nccl", "weights.whole_every=4"], "whole_every has no effect"),
        (["algorithm.gamma=0.9"], "gamma has no effect while advantage is 'grpo'"),
        (["algorithm.turn_reward=reward"], "turn_reward has no effect while sample is 'episode'"),
        (["critic.lr=1e-4"], "critic.lr has no effect while algorithm.advantage is 'grpo'"),
        (
            ["algorithm.sample=turn", "algorithm.advantage=remax"],
            "sample=turn cannot be used with advantage=remax",
        ),
        (["learner.min_lr_ratio=0.1"], "min_lr_ratio has no effect while schedule is 'constant'"),
        (["learner.lr=-1"], "learner.lr=-1"),
        (["algorithm.overlong_buffer=4096"], "overlong_buffer (4096) is over rollout.max_turn_tok"),
        (["learner.row_tokens=100"], "raise learner.row_tokens"),
        (["training.tasks=external"], "needs training.num_steps"),
    ],
)
def test_a_value_without_effect_or_sense_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [*LEAST, *overrides])
    assert message in raised.value.message


def test_a_missing_file_and_a_broken_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("model: {path")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "broken.yaml")


def test_aliases_that_stand_for_more_than_memory_holds_are_refused() -> None:
    lines = [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 60)]
    with pytest.raises(ConfigError, match="more than 100,000 values"):
        parse_yaml("\n".join(["a0: &a0 1", *lines]), "it")
    with pytest.raises(ConfigError, match="more than 100,000 values"):
        parse_yaml("a: &a [*a]", "it")


def test_an_override_that_is_not_yaml_is_named() -> None:
    with pytest.raises(ConfigError, match=r"override 'learner\.lr=\[1' is not valid YAML"):
        load_config(None, [*LEAST, "learner.lr=[1"])


def test_every_key_has_a_text() -> None:
    from pydantic import BaseModel
    from tinkermq.schemas.config import JobConfig

    def check(model: type[BaseModel]) -> None:
        for name, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                check(inner)
            else:
                assert field.description, f"{model.__name__}.{name}"

    check(JobConfig)
    assert len(all_keys()) > 80


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
GAMES = {entry.name for entry in entry_points(group=GROUP)}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_valid(example: Path) -> None:
    config = load_config(example)
    assert config.env.game in GAMES
    assert config.env.game == example.stem or example.stem not in GAMES
    max_steps = config.env.kwargs.get("max_steps", 0)
    assert max_steps <= config.rollout.max_turns, "the game's own end would never come"


def test_every_game_has_an_example() -> None:
    assert {example.stem for example in EXAMPLES} >= GAMES
