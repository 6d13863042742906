"""The documentation is true: pages match the code, links and commands exist, guides' code runs."""

import ast
import asyncio
import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cyclopts import App, CycloptsError
from PIL import Image, ImageSequence
from tinkermq.broker.jetstream.streams import job_streams
from tinkermq.clients.cli.app import build_app
from tinkermq.schemas.config.job import JobConfig, LimitsConfig
from tinkermq.schemas.config.load_config import all_keys, parse_config
from tinkermq.schemas.secret import JobSecrets
from tinkermq.schemas.wire.subjects import JobScope

from docs.generate import message_modules, pages
from docs.recordings import MAX_FILE_BYTES
from docs.topics import STORES, TOPICS
from docs.typed_config import TARGET, typed_config
from tests.support.pages import Block, blocks, prose, save, succeed
from tests.support.stack import Stack

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FIRST_GAME = ROOT / "docs" / "tutorials" / "1-first-game.md"
DEPLOYED = sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file())
PORTS = {4222, 6222, 8222, 8780}
"""NATS for clients, between servers, for monitoring; and the gateway."""
ADDRESS = re.compile(r"(?:localhost|nats|example\.org|\d+(?:\.\d+){3}):(\d{2,5})\b")


# -- generated pages -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pages())
def test_the_committed_page_is_what_the_schemas_say(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == pages()[name], "run `make docs`"


def test_the_committed_types_of_the_configuration_are_what_the_schema_says() -> None:
    assert TARGET.read_text() == typed_config(), "run `make docs`"


def test_every_message_travels_on_a_subject_or_inside_another_or_is_extended() -> None:
    used = {topic.message for topic in TOPICS} | {topic.reply for topic in TOPICS}
    used |= {store.message for store in STORES} | {JobSecrets}  # which travels in a sealed box
    models = [model for _, found in message_modules() for model in found]
    used |= {base for model in models for base in model.__mro__[1:]}
    inner = "".join(
        str(field.annotation) for model in models for field in model.model_fields.values()
    )
    unused = [
        model.__name__
        for model in models
        if model not in used and f".{model.__name__}" not in inner
    ]
    assert unused == []


def test_the_table_of_stores_names_the_streams_that_are_made() -> None:
    prefix = {"stream": "", "bucket": "KV_", "objects": "OBJ_"}
    ours = {
        prefix[store.kind] + store.name.replace("<u>", "u").replace("<j>", "j")
        for store in STORES
        if "<j>" in store.name
    }
    made = job_streams(JobScope("u", "j"), LimitsConfig(), 1)
    assert ours == {str(config["name"]) for config in made}


def test_the_table_of_subjects_has_every_request_to_the_scheduler() -> None:
    tree = ast.parse((ROOT / "actors" / "scheduler" / "requests.py").read_text())
    served = {
        (node.elts[0].value, ast.unparse(node.elts[1]))
        for node in ast.walk(tree)
        if isinstance(node, ast.Tuple) and isinstance(node.elts[0], ast.Constant)
    }
    told = {
        (topic.subject.rsplit(".", 1)[1], topic.message.__name__)
        for topic in TOPICS
        if ".scheduler." in topic.subject
    }
    assert told == served


# -- links, commands, keys -------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken: list[str] = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"(https?|mailto):", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(target)
    assert not broken


def commands(*found: Path) -> Iterator[tuple[str, str]]:
    """Yield every command line in a shell block, and where it stands."""
    for block in blocks(*found):
        if block.language not in {"sh", "console", "bash"}:
            continue
        text = block.text.replace("\\\n", " ")
        for line in text.splitlines():
            if block.language == "console":
                if not line.startswith("$ "):
                    continue
                line = line.removeprefix("$ ")
            line = line.split(" #")[0].strip()
            if line and not line.startswith("#"):
                yield str(block), line


@pytest.fixture(scope="module")
def app() -> App:
    return build_app()


def check_command_line(app: App, line: str) -> None:
    """Let the command line's own parser judge `tinkermq …`; nothing is run."""
    tokens = shlex.split(line)
    tokens = tokens[tokens.index("tinkermq") + 1 :]
    if "|" in tokens:
        tokens = tokens[: tokens.index("|")]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        app.parse_args(tokens, print_error=False, exit_on_error=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_tinkermq_command_can_be_typed(app: App, page: Path) -> None:
    for where, line in commands(page):
        first = [word for word in line.split() if "=" not in word][:1]
        if first != ["tinkermq"]:
            continue
        try:
            check_command_line(app, line)
        except (CycloptsError, ValueError) as error:
            pytest.fail(f"{where}: {line}: {error}")


def test_every_command_of_tinkermq_is_told_somewhere() -> None:
    told = " ".join(page.read_text() for page in PAGES)
    app = build_app()
    names = [name for name in app if not name.startswith("-")]
    names = [
        f"{name} {inner}" if inner else name
        for name in names
        for inner in ([one for one in app[name] if not one.startswith("-")] or [""])
    ]
    assert not [name for name in names if f"tinkermq {name}" not in told]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_and_script_exists(page: Path) -> None:
    makefiles = ROOT / "Makefile", ROOT / "clients" / "new_game" / "common" / "Makefile.in"
    told = "".join(makefile.read_text() for makefile in makefiles)
    targets = set(re.findall(r"^([a-z-]+):", told, flags=re.MULTILINE))
    for where, line in commands(page):
        words = line.split()
        if words[0] == "make":
            assert set(words[1:]) <= targets, f"{where}: {line}"
        for word in words:
            if word.startswith(("examples/", "benchmarks/", "docs/")):
                assert (ROOT / word).exists(), f"{where}: {line}"
    for target in re.findall(r"`make ([\w-]+)`", prose(page)):
        assert target in targets


def test_a_service_has_the_same_port_everywhere() -> None:
    told = {
        path.name: set(map(int, ADDRESS.findall(path.read_text()))) for path in PAGES + DEPLOYED
    }
    assert {name: ports - PORTS for name, ports in told.items() if ports - PORTS} == {}
    assert set().union(*told.values()) == PORTS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_configuration_key_exists(page: Path) -> None:
    keys = {*all_keys(), *JobConfig.model_fields}
    keys |= {key.rpartition(".")[0] for key in keys}  # sections within sections
    sections = "|".join(key for key in JobConfig.model_fields if f"{key}." in " ".join(keys))
    named = re.findall(rf"`((?:{sections})\.[a-z_]+)\b[=:` ]", page.read_text())
    subjects = {"env.describe", "env.give", "env.reset", "env.step", "env.close", "weights.join"}
    assert not set(named) - keys - subjects


@pytest.mark.parametrize(
    "block",
    [block for block in blocks(*PAGES) if block.language == "yaml" and "model:" in block.text],
    ids=str,
)
def test_every_yaml_example_is_a_valid_configuration(block: Block) -> None:
    parse_config(yaml.safe_load(block.text))


@pytest.mark.parametrize(
    "block", [block for block in blocks(*PAGES) if block.language == "python"], ids=str
)
def test_every_python_example_imports_what_exists(block: Block) -> None:
    if "append" in block.info:
        return
    for node in ast.parse(block.text).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tinkermq"):
            exec(ast.unparse(node), {})


@pytest.mark.parametrize(
    "file", sorted((ROOT / "docs" / "images").glob("*.webp")), ids=lambda file: file.name
)
def test_a_moving_picture_plays_again_and_again_and_is_soon_loaded(file: Path) -> None:
    assert file.stat().st_size <= MAX_FILE_BYTES
    with Image.open(file) as picture:
        played_ms = 0
        for frame in ImageSequence.Iterator(picture):
            frame.load()
            played_ms += frame.info["duration"]
        assert 8_000 <= played_ms <= 15_000
        assert picture.info["loop"] == 0


# -- the guides' code against a real stack ---------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="session")
async def test_the_code_of_the_training_guide_trains(
    stack: Stack, tmp_path: Path, model: Path
) -> None:
    """Run what the guides show, with a tiny model and few steps in the place of large ones."""
    for block in [*blocks(FIRST_GAME), *blocks(ROOT / "docs" / "training.md")]:
        if block.title:
            block.text = block.text.replace("Qwen/Qwen2.5-0.5B-Instruct", str(model))
            save(block, tmp_path)
    for script, told in (("train.py", "0.0\n"), ("publish.py", "task 0\ntask 1\ntask 2\ntask 3\n")):
        code = (tmp_path / script).read_text()
        code = code.replace("nats://127.0.0.1:4222", stack.server.url)
        code = code.replace("num_steps=100, test_freq=20, save_freq=50", "num_steps=2")
        (tmp_path / script).write_text(code)
        said = await asyncio.to_thread(succeed, f"python {script}", tmp_path)
        assert said.endswith(told)
