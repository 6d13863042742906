"""Values of YAML are read by the type of their key, in files and in `key=value` alike."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from tinkermq.schemas.config.job import JobConfig
from tinkermq.schemas.config.load_config import (
    apply_override,
    core_value,
    load_config,
    parse_yaml,
    read_yaml,
    write_yaml,
)
from tinkermq.schemas.machines import MachinesConfig
from tinkermq.schemas.wire.errors import ConfigError

LEAST = "model: {path: m}\nenv: {game: bandit}\n"


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
    (tmp_path / "job.yaml").write_text(f"{LEAST}name: {name}\ntags: [{name}]\n")
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
    ("key", "text"),
    [
        ("training.num_steps", "12:30:00"),
        ("training.num_steps", "four"),
        ("training.num_steps", "true"),
        ("training.num_steps", "1.5"),
        ("training.num_steps", "2024-11-25"),
        ("training.batch_size", "null"),
        ("learner.lr", "1e"),
        ("learner.lr", "yes"),
        ("model.trust_remote_code", "maybe"),
        ("model.trust_remote_code", "2"),
    ],
)
def test_what_a_key_cannot_be_is_refused_by_its_name(key: str, text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, ["model.path=m", "env.game=bandit", f"{key}={text}"])
    assert raised.value.message.startswith(f"{key}=")


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
        LEAST.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + LEAST.encode(),
        b"---\n" + LEAST.encode() + b"...\n",
        b"# only\n\n" + LEAST.encode(),
        b"%YAML 1.1\n---\n" + LEAST.encode(),
    ],
    ids=["windows", "byte order mark", "document", "comment", "directive"],
)
def test_a_file_may_come_from_any_editor(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.yaml").write_bytes(content)
    assert read_yaml(tmp_path / "job.yaml") == {"model": {"path": "m"}, "env": {"game": "bandit"}}


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
        (b"? [a, b]\n: 1\n", "no text"),
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


@pytest.mark.parametrize("word", ["no", "off", "Yes", "ON"])
def test_a_template_is_given_no_word_for_a_boolean(word: str) -> None:
    with pytest.raises(ConfigError, match="which a template takes for true"):
        load_config(
            None, ["model.path=m", "env.game=bandit", f"model.template_kwargs.thinking={word}"]
        )
