"""The configuration: order, rules, YAML values, and what each mistake is answered with."""

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinkermq.envs.registry import GROUP
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.load_config import (
    all_keys,
    apply_override,
    check_keys,
    load_config,
    parse_config,
    parse_yaml,
)
from tinkermq.schemas.config.rules import RULES
from tinkermq.schemas.config.sections import Rule
from tinkermq.schemas.wire.errors import ConfigError

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
        (
            ["algorithm.kl_in=reward"],
            "kl_in has no effect while kl_coef is 0.0: remove it, or set kl_coef",
        ),
        (["lora.alpha=8"], "alpha has no effect while rank is 0"),
        (["self_play.pool_size=3"], "pool_size has no effect while past_share is 0"),
        (["algorithm.overlong_factor=2"], "overlong_factor has no effect while overlong_buffer"),
        (["weights.transport=file", "weights.chunk_bytes=65536"], "chunk_bytes has no effect"),
        (["weights.transport=nccl", "weights.differences=true"], "differences has no effect"),
        (
            ["weights.transport=nccl", "weights.full_snapshot_every=4"],
            "remove it, or set transport to",
        ),
        (["algorithm.turn_reward=reward"], "turn_reward has no effect while sample is 'episode'"),
        (["learner.min_lr_ratio=0.1"], "min_lr_ratio has no effect while schedule is 'constant'"),
        (["learner.lr=-1"], "learner.lr=-1"),
    ],
)
def test_a_value_without_effect_or_sense_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [*LEAST, *overrides])
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"training": {"batch_size": "four"}}, r"training\.batch_size='four'"),
        ({"training": {"batch_size": 0}}, r"training\.batch_size=0: .*greater than or equal to 1"),
        ({"algorithm": {"advantage": "nope"}}, r"algorithm\.advantage='nope': .*'grpo'"),
        ({"env": {"train_data": "rows.jsonl"}}, r"env\.train_data='rows.jsonl'"),
        ({"name": "No Name"}, r"name='No Name'"),
        ({"trainig": {"num_steps": 3}}, r"trainig\.num_steps\n.*did you mean training\.num_steps"),
        ({"weights": {"folder": "x"}}, ""),
        ({"critic": {"path": "x"}}, ""),
        ({"env": {"num_val": 3}}, ""),
        ({}, ""),
    ],
)
def test_a_configuration_that_is_not_complete_has_no_wrong_values(
    values: dict[str, Any], told: str
) -> None:
    if not told:
        check_keys(values)  # what lacks, or does not fit yet, may still come
        return
    with pytest.raises(ConfigError, match=told):
        check_keys(values)


def test_a_missing_file_and_a_broken_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "broken.yaml").write_text("model: {path")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "broken.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(["a0: &a0 1", *(f"a{n}: &a{n} {{x: *a{n - 1}}}" for n in range(1, 60))]),
        "a: &a [*a]",
        f"a: &a {'x' * 30_000}\nb: [{'*a,' * 10_000}]",
        "a: &a {b: 1}\nc:\n  <<: *a",
        "model: &m {path: x}\nenv: *m",
    ],
    ids=["doubling", "itself", "a long text", "merged", "one"],
)
def test_an_alias_is_refused_whatever_it_stands_for(text: str) -> None:
    with pytest.raises(ConfigError, match="uses the alias") as raised:
        parse_yaml(text, "it")
    assert raised.value.hint == "write out what it stands for"
    with pytest.raises(ConfigError, match="uses the alias"):
        load_config(None, [*LEAST, f"env.kwargs={{{text.splitlines()[-1]}, z: &z 1, y: *z}}"])


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "- " * 100_000, "!!x " * 9])
def test_yaml_that_nests_too_deep_is_refused_and_ends_no_process(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_yaml(text, "it")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("kwargs", "told"),
    [
        ({b"key": 1}, "cannot be a key"),
        ({1: 1}, "cannot be a key"),
        ({"a": b"bytes"}, r"env\.kwargs\.a cannot be a bytes"),
        ({"a": np.zeros(3, np.float32)}, r"env\.kwargs\.a cannot be a ndarray"),
        ({"a": {1, 2}}, "cannot be a set"),
        ({"a": nested(900)}, "50 levels"),
        ({"a": [0] * 200_000}, "100,000 values"),
    ],
)
def test_a_configuration_holds_what_json_can_say_and_no_more(kwargs: Any, told: str) -> None:
    values = {"model": {"path": "m"}, "env": {"game": "bandit", "kwargs": kwargs}}
    with pytest.raises(ConfigError, match=told):
        parse_config(values)
    with pytest.raises(ConfigError, match=told):
        check_keys({"env": {"kwargs": kwargs}})


@pytest.mark.parametrize(
    "values",
    [
        {"x" * 1_000_000: 1},
        {"seed": "x" * 1_000_000},
        {"env": "x" * 1_000_000},
        {"env": {"workers": "x" * 1_000_000}},
        {"env": {"x" * 1_000_000: 1}},
        {"env": {"train_data": [{"a": "y" * 1_000_000}] * 50}},
    ],
)
def test_what_is_said_of_a_wrong_value_is_short(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config({"model": {"path": "m"}, **values})
    assert len(str(raised.value)) < 5000


def test_an_override_that_is_not_yaml_is_named() -> None:
    with pytest.raises(ConfigError, match=r"override 'learner\.lr=\[1' is not valid YAML"):
        load_config(None, [*LEAST, "learner.lr=[1"])


def test_every_key_has_a_text() -> None:
    from pydantic import BaseModel
    from tinkermq.schemas.wire.field_docs import field_docs

    def check(model: type[BaseModel]) -> None:
        for name, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                check(inner)
            else:
                assert field_docs(model)[name], f"{model.__name__}.{name}"

    check(JobConfig)
    assert len(all_keys()) > 80


EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
GAMES = {entry.name for entry in entry_points(group=GROUP)}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_valid(example: Path) -> None:
    config = load_config(example)
    assert config.env.game in GAMES or config.agent.runs_programs
    assert config.env.game == example.stem or example.stem not in GAMES
    max_steps = config.env.kwargs.get("max_steps", 0)
    assert max_steps <= config.rollout.max_turns, "the game's own end would never come"


def test_every_game_has_an_example() -> None:
    assert {example.stem for example in EXAMPLES} >= GAMES


def test_an_override_may_end_with_a_colon() -> None:
    values: dict[str, object] = {}
    apply_override(values, "storage.url=broker:")
    assert values == {"storage": {"url": "broker:"}}


# -- Each rule of the configuration's table refuses an example of its own, and says why ------------

SFT_KEYS = ["sft.data=[chats.jsonl]"]
AGENT = ["env.game=agent", "agent.command=[run.sh]"]
BY_TURN = ["algorithm.advantage=gae", "algorithm.sample=turn"]
GDPO = ["algorithm.advantage=gdpo", "algorithm.reward_components={correct: 1}"]
REPLAY = ["algorithm.router_replay=true"]
REFUSED = [
    ["algorithm.loss=sft"],
    ["policies.low=m", *SFT_KEYS],
    ["self_play.past_share=0.5", *SFT_KEYS],
    ["algorithm.reference.path=m"],
    ["model.attn_implementation=flash_attention_2", "learner.dtype=float32"],
    ["policies.low=m", "lora.rank=4"],
    ["env.game=mcp"],
    ["algorithm.loss=gspo", "algorithm.own_loss=m:f"],
    ["algorithm.correction=icepop", "algorithm.own_correction=m:f"],
    [
        "algorithm.correction=decoupled",
        "algorithm.proximal=loglinear",
        "algorithm.correction_normalise=true",
    ],
    ["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"],
    [
        "algorithm.correction=decoupled",
        "algorithm.proximal=loglinear",
        "lora.rank=4",
        "lora.dropout=0.1",
    ],
    ["algorithm.advantage=maxrl", "algorithm.overlong_buffer=64"],
    ["algorithm.advantage=maxrl", "algorithm.length_coef=0.1"],
    ["algorithm.advantage=maxrl", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
    [*GDPO, "algorithm.overlong_buffer=64"],
    [*GDPO, "algorithm.length_coef=0.1"],
    [*GDPO, "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
    [*GDPO, "algorithm.filter_equal_rewards=true"],
    ["algorithm.advantage=passk", "rollout.group_size=1"],
    ["algorithm.sample=turn", "algorithm.advantage=remax"],
    ["algorithm.gamma=0.9"],
    ["algorithm.filter_equal_rewards=true", "rollout.group_size=1"],
    ["algorithm.length_coef=0.1", "rollout.group_size=1"],
    [*BY_TURN, "algorithm.turn_gamma=0.9"],
    [*BY_TURN, "algorithm.turn_lambda=0.9"],
    [
        "algorithm.advantage=gae",
        "algorithm.turn_lambda=0.9",
        "algorithm.gae_lambda_length=0.1",
    ],
    [*BY_TURN, "critic.bootstrap_cut=true"],
    ["critic.lr=1e-4"],
    ["algorithm.advantage=gae", "critic.warmup_steps=20", "training.num_steps=20"],
    ["algorithm.teacher=t", "algorithm.reward_coef=0", "algorithm.filter_equal_rewards=true"],
    ["algorithm.teacher=job:t", "rollout.temperature=0.7"],
    ["algorithm.teacher=job:t", "training.tasks=external", "training.num_steps=3"],
    [*AGENT, "algorithm.teacher=t", "algorithm.teacher_context=solution"],
    [
        "algorithm.teacher=self",
        "algorithm.teacher_context=solution",
        "algorithm.teacher_context_tokens=4096",
    ],
    [*REPLAY, "generator.engine=vllm", "generator.slots=2", "generator.tensor_parallel=2"],
    [*REPLAY, *AGENT],
    [*REPLAY, "policies.low=m"],
    [*REPLAY, "training.tasks=external", "training.num_steps=3"],
    [*REPLAY, "generator.segment_tokens=2"],
    [*REPLAY, "learner.compile=true"],
    ["rollout.max_turn_tokens=512", "rollout.max_response_tokens=256"],
    ["learner.max_row_tokens=4096", "learner.microbatch_tokens=2048"],
    ["learner.ranks=2"],
    ["learner.ranks=3", "learner.slots=3", "learner.replicas=2"],
    ["learner.ranks=2", "learner.slots=3"],
    ["learner.machines=2"],
    ["learner.context_parallel=2"],
    ["learner.ranks=3", "learner.slots=3", "learner.context_parallel=2"],
    ["learner.ranks=2", "learner.slots=2", "learner.context_parallel=2", "algorithm.loss=gspo"],
    ["learner.ranks=2", "learner.slots=2", "learner.context_parallel=2", "learner.compile=true"],
    ["learner.offload_activations=true", "learner.gradient_checkpointing=false"],
    ["learner.optimizer=muon", "learner.cpu_offload=true"],
    ["learner.optimizer=muon", "tinker.base=m"],
    ["placement=colocated", "learner.slots=2"],
    ["placement=colocated", "generator.slots=2"],
    ["placement=colocated", "generator.count=2"],
    ["placement=separate", "generator.sleep=always"],
    ["placement=colocated", "sft.data=[a.jsonl]", "env.num_val=0"],
    ["generator.sleep=always", "sft.data=[a.jsonl]", "env.game=bandit"],
    ["generator.engine=vllm", "generator.tensor_parallel=2"],
    [
        "evaluation.slots=1",
        "generator.engine=vllm",
        "generator.slots=2",
        "generator.tensor_parallel=2",
    ],
    ["generator.max_context=1024"],
    ["algorithm.overlong_buffer=4096"],
    ["learner.max_row_tokens=100"],
    ["rollout.group_size=4000", "rollout.oversample=97"],
    ["training.tasks=external"],
    ["training.tasks=external", "training.num_steps=3", "training.max_staleness=auto"],
    [
        "training.tasks=external",
        "training.num_steps=3",
        "training.curriculum=success_rate",
        "env.train_data=[x]",
    ],
    ["training.curriculum=success_rate"],
    ["training.curriculum=success_rate", "training.curriculum_tasks=3", "env.train_data=[x]"],
    ["rollout.oversample=2", *SFT_KEYS],
    ["rollout.oversample=2", "policies.low=m"],
    ["generator.segment_tokens=2", *SFT_KEYS],
    ["generator.segment_tokens=2", "self_play.past_share=0.5"],
    ["rollout.oversample=2", "algorithm.advantage=remax"],
    ["limits.segment_bytes=65536"],
    ["env.reward.source=function"],
    ["env.reward.source=endpoint"],
    ["env.reward.source=judge", "env.reward.url=http://x"],
    ["env.train_data=[harbor:a]"],
    [*AGENT, "env.train_data=[harbor:a]", "env.val_data=[b.jsonl]"],
    [*AGENT, "env.train_data=[harbor:a]", "agent.reward=[sh]"],
    [*AGENT, "env.train_data=[harbor:a]", "agent.image=b"],
    [*AGENT, "algorithm.loss=gspo"],
    [*AGENT, "algorithm.advantage=grpo_per_step"],
    [*AGENT, "algorithm.correction=mis"],
    [*AGENT, "algorithm.correction_masks=[{over: sequence_mean, high: 2}]"],
    [*AGENT, "algorithm.correction_level=sequence"],
    [*AGENT, "algorithm.sample=turn"],
    [*AGENT, "algorithm.overlong_buffer=64"],
    [*AGENT, "algorithm.length_coef=0.1"],
    ["algorithm.branch_credit=own"],
    [*AGENT, "algorithm.branch_credit=own", "algorithm.advantage=remax"],
    [*AGENT, "algorithm.branch_credit=both", "algorithm.advantage=gae"],
    [*AGENT, "algorithm.branch_credit=own", "algorithm.filter_equal_rewards=true"],
    [*AGENT, "policies.low=m"],
    [*AGENT, "self_play.past_share=0.5"],
    [*AGENT, "rollout.oversample=2"],
    [*AGENT, "generator.segment_tokens=2"],
    [*AGENT, "env.reward.source=function", "env.reward.function=package.module:score"],
]


@pytest.mark.parametrize(("rule", "example"), list(zip(RULES, REFUSED, strict=True)))
def test_each_rule_refuses_its_example_and_nothing_else_does(
    rule: Rule, example: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [*LEAST, *example])
    assert raised.value.message.startswith(rule.key.partition("{")[0])
    assert rule.because.partition("{")[0] in raised.value.message
    assert "; " not in raised.value.message, "another rule speaks, too"


def test_each_rule_that_is_broken_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [*LEAST, "learner.ranks=2", "training.tasks=external"])
    assert raised.value.message == (
        "learner.ranks (2) is over learner.slots (1); training.tasks=external needs "
        "training.num_steps"
    )
