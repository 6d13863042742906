"""The configuration: order, rules, YAML values, and what each mistake is answered with."""

import math
import shlex
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tinkermq.envs.registry import GROUP
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.load_config import (
    all_keys,
    apply_override,
    check_keys,
    core_value,
    load_config,
    parse_config,
    parse_yaml,
    read_yaml,
    with_changes,
    with_overrides,
    write_yaml,
)
from tinkermq.schemas.config.rules import RULES, why_no_rows
from tinkermq.schemas.machines import MachinesConfig
from tinkermq.schemas.wire.errors import ConfigError

from tests.support.snapshots import assert_transcript

LEAST = ["model.path=m", "env.game=bandit"]


def test_defaults_then_file_then_overrides(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("model: {path: m}\nenv: {game: bandit}\nlearner: {lr: 1e-4, eps: 1e-6}\n")
    config = load_config(file, ["learner.lr=1e-5"])
    assert (config.learner.lr, config.learner.eps, config.learner.grad_clip) == (1e-5, 1e-6, 1.0)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"training": {"batch_size": "four"}}, r"training\.batch_size='four'"),
        ({"training": {"batch_size": 0}}, r"training\.batch_size=0: must be ≥ 1"),
        ({"algorithm": {"advantage": "nope"}}, r"algorithm\.advantage='nope': .*'grpo'"),
        ({"env": {"train_data": "rows.jsonl"}}, r"env\.train_data='rows.jsonl'"),
        ({"name": "No Name"}, r"name='No Name'"),
        ({"learner": {"fsdp": 1}}, r"learner\.fsdp\n +see `tinkermq config schema` for all keys"),
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
    with pytest.raises(ConfigError, match=r"the configuration file .* does not exist"):
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


def test_every_key_has_a_text() -> None:
    from pydantic import BaseModel
    from tinkermq.schemas.config.job import JobConfig
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


# -- What is refused: each rule of the table with an example of its own, and every other mistake ---

REFUSED = Path(__file__).with_name("refused.txt")


def refusal(line: str) -> str:
    """Return what is said of a configuration, beside a model and a game."""
    with pytest.raises(ConfigError) as raised:
        load_config(None, [*LEAST, *shlex.split(line)])
    return f"{raised.value.message}\n  {raised.value.hint}"


def test_each_mistake_is_refused_with_its_reason() -> None:
    assert_transcript(REFUSED, refusal)


def test_each_rule_refuses_its_example_and_nothing_else_does() -> None:
    of_rules = REFUSED.read_text().partition("\n# ")[0]
    examples = [line[2:] for line in of_rules.splitlines() if line.startswith("$ ")]
    for rule, example in zip(RULES, examples, strict=True):
        message, _, _ = refusal(example).partition("\n  ")
        assert message.startswith(rule.key.partition("{")[0])
        assert rule.because.partition("{")[0] in message
        assert "; " not in message, "another rule speaks, too"


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        ({"num_steps": 12}, {"num_epochs": 4}, (None, 4)),
        ({"num_epochs": 4}, {"num_steps": 12}, (12, None)),
        ({"num_steps": 12}, {"num_steps": None, "num_epochs": 4}, (None, 4)),
        ({"num_epochs": 4}, {"num_steps": None}, (None, 4)),
        ({"num_steps": 12}, {"batch_size": 3}, (12, None)),
    ],
)
def test_a_changed_length_of_a_run_takes_the_place_of_the_other(
    before: dict[str, Any], changes: dict[str, Any], after: tuple[int | None, int | None]
) -> None:
    values = {"model": {"path": "m"}, "env": {"game": "bandit"}, "training": before}
    training = parse_config(with_changes(values, {"training": changes})).training
    assert (training.num_steps, training.num_epochs) == after
    overrides = [f"training.{key}={'null' if n is None else n}" for key, n in changes.items()]
    training = parse_config(with_overrides(values, overrides)).training
    assert (training.num_steps, training.num_epochs) == after


# -- What an agent job implies, and what it cannot have --------------------------------------------


LEAST_AGENT = ["model.path=m", "env.game=agent", "agent.command=[run.sh]"]


def test_an_episode_of_several_rows_can_be_trained_by_what_an_agent_job_may_have() -> None:
    assert why_no_rows(load_config(None, LEAST_AGENT)) is None
    assert why_no_rows(load_config(None, [*LEAST_AGENT, "algorithm.advantage=gae"])) is None
    assert why_no_rows(load_config(None, ["model.path=m", "env.game=bandit"])) is None


def test_a_games_job_is_told_why_it_cannot_train_such_episodes() -> None:
    config = load_config(None, ["model.path=m", "env.game=bandit", "algorithm.advantage=gae"])
    assert (why_no_rows(config) or "").startswith(
        "algorithm.advantage=gae follows rewards from turn to"
    )


def test_a_generator_begins_no_more_episodes_of_programs_than_have_a_place() -> None:
    def at_once(agent: dict[str, Any], **sections: Any) -> int:
        tree = {"model": {"path": "m"}, "agent": {"per_host": 6, **agent}, **sections}
        return JobConfig.model_validate(tree).episodes_at_once

    command = {"command": ["run.sh"]}
    assert at_once({"client": True}) == 6
    assert at_once(command, env={"hosts": 4}) == 24
    assert at_once(command, env={"hosts": 4}, generator={"count": 3}) == 8
    assert at_once(command, env={"hosts": 4}, generator={"max_episodes": 10}) == 10


def test_what_is_trained_is_a_word_or_a_pattern() -> None:
    assert load_config(None, LEAST_AGENT).agent.train == "all"
    for known in ("all", "main", "/a|b/", "not /Write a title/"):
        assert load_config(None, [*LEAST_AGENT, f"agent.train={known}"]).agent.train == known


# -- What the configuration of an SFT job implies, and what it refuses -----------------------------


Job = dict[str, dict[str, object]]
SFT: Job = {"model": {"path": "m"}, "sft": {"data": ["chats.jsonl"]}}


def test_conversations_are_all_that_an_sft_job_must_name() -> None:
    config = parse_config(SFT)
    assert (config.algorithm.loss, config.algorithm.correction) == ("sft", "none")
    assert (config.env.game, config.env.hosts, config.env.num_val) == ("", 0, 0)
    assert (config.rollout.group_size, config.training.staleness_policy) == (1, "train")
    assert parse_config(config.model_dump(exclude_unset=True)) == config
    with_game = parse_config({**SFT, "env": {"game": "bandit", "num_val": 8}})
    assert with_game.env.num_val == 8


def test_an_sft_section_without_conversations_needs_a_game() -> None:
    with pytest.raises(ConfigError, match="env is missing"):
        parse_config({**SFT, "sft": {}})


# -- Values of YAML are read by the type of their key, in files and in `key=value` alike -----------


LEAST_YAML = "model: {path: m}\nenv: {game: bandit}\n"


def both(key: str, text: str) -> Any:
    """Read a value in a file and as an argument; they must be the same."""
    names = key.split(".")
    lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate(names)]
    in_file: Any = parse_yaml("\n".join(lines) + f" {text}", "it")
    given: Any = {}
    apply_override(given, f"{key}={text}")
    for name in names:
        in_file, given = in_file[name], given[name]
    assert repr(in_file) == repr(given)
    return in_file


@pytest.mark.parametrize(
    "text",
    [
        *("2024-11-25", "007", "yes", "no", "on", "off", "true", "1.10", "1e5", "1e-3", "0o17"),
        *("0x1f", "1_000", "12:30:00", ".inf", "3.0", "+5", "2024-11-25T10:00:00Z", "nan", "y"),
        *("v1.10", "1.2.3", "00", "-1", "=", "a-b_c", "'quoted'", '"007"', "'yes'", "<<", "10e"),
    ],
)
def test_a_text_key_gets_the_text_as_it_is_written(text: str) -> None:
    wanted = text.strip("'\"")
    assert both("notes", text) == wanted
    assert both("model.path", text) == wanted
    assert both("env.train_data", f"[{text}]") == [wanted]
    assert both("agent.environment", f"{{KEY: {text}}}") == {"KEY": wanted}


@pytest.mark.parametrize(
    "name", ["2024-11-25", "007", "yes", "1e5", "0o17", "no", "on", "1_000", "true", "12"]
)
def test_a_run_has_the_name_that_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "job.yaml").write_text(f"{LEAST_YAML}name: {name}\ntags: [{name}]\n")
    in_file = load_config(tmp_path / "job.yaml")
    given = load_config(None, ["model.path=m", "env.game=bandit", f"name={name}", f"tags=[{name}]"])
    assert (in_file.name, in_file.tags) == (given.name, given.tags) == (name, [name])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("learner.lr", "1e-5", 1e-5),
        ("learner.lr", "1E-5", 1e-5),
        ("learner.lr", ".5", 0.5),
        ("learner.lr", "1", 1.0),
        ("learner.lr", "'1e-5'", 1e-5),
        ("learner.lr", '"0.1"', 0.1),
        ("learner.betas", "[0.9, 1e-1]", (0.9, 0.1)),
        ("learner.betas", "['.9', .95]", (0.9, 0.95)),
        ("training.num_steps", "1_000", 1000),
        ("training.num_steps", "1e3", 1000),
        ("training.num_steps", "0x10", 16),
        ("training.num_steps", "0o17", 15),
        ("training.num_steps", "017", 17),
        ("training.num_steps", "'7'", 7),
        ("training.max_staleness", "3", 3),
        ("training.max_staleness", "auto", "auto"),
        ("algorithm.gamma", "null", None),
        ("algorithm.gamma", "~", None),
        ("algorithm.kl_coef", "1", 1.0),
        ("model.trust_remote_code", "yes", True),
        ("model.trust_remote_code", "Off", False),
        ("model.trust_remote_code", "TRUE", True),
        ("model.trust_remote_code", "'false'", False),
        ("model.tokenizer", "null", None),
        ("model.tokenizer", "'null'", "null"),
        ("lora.targets", "all-linear", "all-linear"),
        ("lora.targets", "[q_proj, 1]", ["q_proj", "1"]),
    ],
)
def test_other_keys_get_their_type_from_whatever_says_it(key: str, text: str, value: Any) -> None:
    given: dict[str, Any] = {"model": {"path": "m"}, "env": {"game": "g"}, "lora": {"rank": 4}}
    section, name = key.split(".")
    given.setdefault(section, {})[name] = both(key, text)
    read = getattr(JobConfig.model_validate({"model": {"path": "m"}, **given}), section)
    found = getattr(read, name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("[1e-3]", [1e-3]),
        ("{a: [1e-3, 2]}", {"a": [1e-3, 2]}),
        ("007", 7),
        ("1.10", 1.1),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("1e5", 1e5),
        ("+12", 12),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("null", None),
        ("~", None),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("on", "on"),
        ("2024-11-25", "2024-11-25"),
        ("12:30:00", "12:30:00"),
        ("'007'", "007"),
        ('"1e-3"', "1e-3"),
        ("'true'", "true"),
        ("!!str 007", "007"),
        ("{1: a, yes: b, null: c}", {"1": "a", "yes": "b", "null": "c"}),
    ],
)
def test_in_a_free_map_the_core_schema_says_what_a_value_is(text: str, value: Any) -> None:
    found = both("env.kwargs.x", text)
    assert (found, type(found)) == (value, type(value))
    assert both("evaluation.reset_kwargs.x", text) == value
    given: dict[str, Any] = {}
    apply_override(given, f"x={text}", None)
    assert given == {"x": value}


def test_values_of_python_and_json_keep_their_types() -> None:
    values = {"a": "1e-3", "b": "007", "c": 1.5, "d": ["1e5"]}
    config = JobConfig.model_validate(
        {"model": {"path": "m"}, "env": {"game": "g", "kwargs": values}}
    )
    assert config.env.kwargs == values


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("notes=run #3", "run #3"),
        ("notes=a: b", "a: b"),
        ("notes=[draft] x", "[draft] x"),
        ("notes={", "{"),
        ("notes=*bold*", "*bold*"),
        ("notes=it's", "it's"),
        ("notes='a' and 'b'", "'a' and 'b'"),
        ('notes="two words"', "two words"),
        ("notes=100%", "100%"),
        ("notes=@you", "@you"),
        ("notes=a=b", "a=b"),
        ("notes=", ""),
        ("notes=broker:", "broker:"),
    ],
)
def test_a_text_on_the_command_line_needs_no_quotes(argument: str, value: str) -> None:
    given: dict[str, Any] = {}
    apply_override(given, argument)
    assert given == {"notes": value}


@pytest.mark.parametrize(
    "content",
    [
        LEAST_YAML.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + LEAST_YAML.encode(),
        b"---\n" + LEAST_YAML.encode() + b"...\n",
        b"# only\n\n" + LEAST_YAML.encode(),
        b"%YAML 1.1\n---\n" + LEAST_YAML.encode(),
    ],
    ids=["windows", "byte order mark", "document", "comment", "directive"],
)
def test_a_file_may_come_from_any_editor(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.yaml").write_bytes(content)
    assert read_yaml(tmp_path / "job.yaml") == {"model": {"path": "m"}, "env": {"game": "bandit"}}


def test_a_section_whose_keys_are_commented_out_has_its_defaults(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"{LEAST_YAML}training:\nlora: ~\nlearner:\n  # lr: 1\n")
    assert load_config(file) == load_config(None, LEAST)
    assert load_config(file, ["training.num_steps=7"]).training.num_steps == 7


@pytest.mark.parametrize("content", [b"", b"\n\n", b"# nothing\n", b"\xef\xbb\xbf", b"---\n", b"~"])
def test_an_empty_file_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.yaml").write_bytes(content)
    assert read_yaml(tmp_path / "job.yaml") == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"- a\n- b\n", "holds a list, not a map"),
        (b"just words\n", "holds a single value"),
        (b"a: 1\na: 2\n", "key 'a' twice, in lines 1 and 2"),
        (b"env:\n  game: x\n  kwargs: {b: 1, 'b': 2}\n", "key 'b' twice"),
        (b"model:\n  path: x\nmodel:\n  path: y\n", "key 'model' twice, in lines 1 and 3"),
        (b"model:\n\tpath: x\n", "not valid YAML"),
        (b"a: 1\n---\nb: 2\n", "more than one document"),
        (b"a: !!python/object:os.system 1\n", "the tag 'tag:yaml.org,2002:python/object"),
        (b"a: !mine 1\n", "the tag '!mine'"),
        (b"a: !!binary aGk=\n", "the tag"),
        (b"? [a, b]\n: 1\n", "not text"),
        (b"a: \xff\n", "is not UTF-8"),
        ("a: 1\n".encode("utf-16"), "is not UTF-8"),
        (b"a: \x00\n", "not valid YAML"),
        (b"<<: {a: 1}\n<<: {b: 1}\n", "key '<<' twice"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_with_the_reason(
    tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "job.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_yaml(tmp_path / "job.yaml")
    assert words in raised.value.message


def test_tabs_are_named_as_the_likely_reason() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_yaml("model:\n\tpath: x\n", "it")
    assert raised.value.hint == "indent with spaces: YAML takes no tabs there"


@pytest.mark.parametrize(
    "value",
    [
        *("1e-3", "007", "yes", "no", "null", "~", "", "1_000", "0o17", "0x1f", "2024-11-25", "on"),
        *("12:30", "true", "a: b", "# x", "- a", "'q'", "1.10", ".inf", "é", "a\nb", " lead", "!x"),
        *(1, 1.5, 1e-5, 1e300, True, False, None, [], {}, [1, "1", {"a": None}]),
    ],
)
def test_what_is_written_is_read_as_the_same_again(value: Any) -> None:
    text = write_yaml({"env": {"kwargs": {"x": value}}, "notes": str(value)})
    assert parse_yaml(text, "it") == {"env": {"kwargs": {"x": value}}, "notes": str(value)}
    assert yaml.safe_load(text)["env"]["kwargs"]["x"] == value  # and by YAML 1.1 alike


def test_other_files_are_read_by_the_types_of_their_keys(tmp_path: Path) -> None:
    (tmp_path / "machines.yaml").write_text("kind: slurm\npartition: 0123\nmost: 1_0\n")
    values = read_yaml(tmp_path / "machines.yaml", MachinesConfig)
    assert values == {"kind": "slurm", "partition": "0123", "most": 10}


def test_a_number_without_end_stays_a_text() -> None:
    assert core_value("9" * 100_000) == "9" * 100_000
