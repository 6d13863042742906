"""The documentation is true: pages match the code, links lead on, examples hold, guides run.

Its commands are those of `test_docs_commands.py`.
"""

import ast
import asyncio
import importlib.util
import json
import re
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from jsonschema import Draft202012Validator
from PIL import Image, ImageSequence
from tinkermq.broker.jetstream.streams import job_streams
from tinkermq.schemas.config.job import JobConfig, LimitsConfig
from tinkermq.schemas.config.load_config import all_keys, parse_config
from tinkermq.schemas.job import JobList, JobRequest, JobSecrets, ListRequest
from tinkermq.schemas.machines import machines_config
from tinkermq.schemas.wire.subjects import JobScope

from docs.generate import message_modules, pages
from docs.machine_files import SCHEMAS
from docs.recordings import MAX_FILE_BYTES
from docs.topics import STORES, TOPICS
from docs.typed_config import TARGET, typed_config
from tests.support.pages import (
    PAGES,
    ROOT,
    Block,
    blocks,
    of_language,
    prose,
    save,
    succeed,
)
from tests.support.stack import Job, Stack

FIRST_GAME = ROOT / "docs" / "tutorials" / "1-first-game.md"
DEPLOYED = sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file())
PORTS = {4222, 6222, 8222, 8780, 8000}
"""NATS for clients, between servers, for monitoring; the gateway; a game served to others."""
ADDRESS = re.compile(r"(?:localhost|nats|example\.org|\d+(?:\.\d+){3}):(\d{2,5})\b")


# -- generated pages -------------------------------------------------------------------------------


def test_the_committed_pages_are_what_the_schemas_say() -> None:
    generated = pages()
    committed = {name: (ROOT / "docs" / name).read_text() for name in generated}
    assert committed == generated, "run `make docs`"


def test_the_schemas_are_valid_and_the_asyncapi_file_refers_to_what_exists() -> None:
    folder = ROOT / "docs"
    schemas = json.loads((folder / SCHEMAS).read_text())
    Draft202012Validator.check_schema(schemas)
    document = json.loads((folder / "asyncapi.json").read_text())
    referred = re.findall(r'"\$ref": "([^"]*)"', json.dumps([document, schemas]))
    assert referred
    for target in referred:
        file, _, path = target.partition("#/")
        place = schemas if file or path.startswith("$defs/") else document
        for part in path.split("/"):
            place = place[part]
    channels = document["channels"]
    assert document["asyncapi"] == "3.0.0"
    assert set(document["operations"]) < set(channels)
    for channel in channels.values():
        named = set(re.findall(r"{(\w+)}", channel["address"] or ""))
        assert named == set(channel.get("parameters", {}))
    job = {"$ref": "#/$defs/JobRequest", "$defs": schemas["$defs"]}
    assert Draft202012Validator(job).is_valid(JobRequest(job="a").model_dump())
    assert not Draft202012Validator(job).is_valid({"job": 1})


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
    tree = ast.parse((ROOT / "actors" / "scheduler" / "scheduler.py").read_text())
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


# -- links, keys, examples -------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere() -> None:
    broken: list[str] = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if re.match(r"(https?|mailto):", target):
                continue
            path, _, anchor = target.partition("#")
            place = (page.parent / path).resolve() if path else page
            if not place.exists() or (anchor and anchor not in anchors(place)):
                broken.append(f"{page.name}: {target}")
    assert not broken


def test_a_service_has_the_same_port_everywhere() -> None:
    told = {
        path.name: set(map(int, ADDRESS.findall(path.read_text()))) for path in PAGES + DEPLOYED
    }
    assert {name: ports - PORTS for name, ports in told.items() if ports - PORTS} == {}
    assert set().union(*told.values()) == PORTS


def test_every_configuration_key_exists() -> None:
    keys = {*all_keys(), *JobConfig.model_fields}
    keys |= {key.rpartition(".")[0] for key in keys}  # sections within sections
    sections = "|".join(key for key in JobConfig.model_fields if f"{key}." in " ".join(keys))
    pattern = re.compile(rf"`((?:{sections})\.[a-z_]+)\b[=:` ]")
    pages_now = [page for page in PAGES if page.name != "CHANGELOG.md"]  # that names what is gone
    named = {key: page.name for page in pages_now for key in pattern.findall(page.read_text())}
    subjects = {"env.describe", "env.give", "env.reset", "env.step", "env.close", "weights.join"}
    assert {key: name for key, name in named.items() if key not in keys | subjects} == {}


@pytest.mark.parametrize("block", of_language("yaml"), ids=str)
def test_every_yaml_example_is_a_valid_configuration(block: Block, tmp_path: Path) -> None:
    values = yaml.safe_load(block.text)
    if block.page.name == "opentinker.md" or set(values) == {"scrape_configs"}:
        return  # the first is read by a test of its own, the other by Prometheus
    if "kind" in values:
        file = tmp_path / "machines.yaml"
        file.write_text(block.text)
        machines_config(str(file))
    elif "model" in values:
        parse_config(values)
    else:  # a part, of which a model and who plays make a whole
        data = {"game": "tictactoe", "train_data": ["data/train.parquet"]}
        player = {} if "agent" in values else {"env": data}
        parse_config({"model": {"path": "models/tiny"}, **player, **values})


@pytest.mark.parametrize("block", of_language("python"), ids=str)
def test_every_python_example_compiles_and_imports_what_exists(block: Block) -> None:
    tree = ast.parse(dedent(block.text))
    compile(tree, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        else:
            named = [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        if any(name.split(".")[0] == "tinkermq" for name in named):
            exec(ast.unparse(node), {})


def test_every_name_and_file_of_the_code_that_a_page_names_exists() -> None:
    rooms = "schemas|broker|envs|actors|clients"
    dotted = re.compile(rf"\btinkermq\.(?:{rooms})(?:\.[A-Za-z_][A-Za-z0-9_]*)+")
    file = re.compile(rf"`((?:{rooms}|tests|examples|benchmarks|deploy)/[A-Za-z0-9_/.-]*)`")
    pages_now = [page for page in PAGES if page.name != "CHANGELOG.md"]  # that names what is gone
    texts = {page.name: page.read_text() for page in pages_now}
    named = {name: page for page, text in texts.items() for name in dotted.findall(text)}
    files = {name: page for page, text in texts.items() for name in file.findall(text)}
    assert {name: page for name, page in named.items() if not _exists(name)} == {}
    assert {name: page for name, page in files.items() if not (ROOT / name).exists()} == {}


def _exists(name: str) -> bool:
    """Return whether `package.module.name` is a module, or the name of one."""
    module, _, attribute = name.rpartition(".")
    if importlib.util.find_spec(module) is None:
        return False
    found = importlib.import_module(module)
    return hasattr(found, attribute) or importlib.util.find_spec(name) is not None


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


@pytest.mark.full
@pytest.mark.asyncio(loop_scope="session")
async def test_the_code_of_the_training_guide_trains(
    stack: Stack, tmp_path: Path, model: Path
) -> None:
    """Run what the guides show, with a tiny model and few steps in the place of large ones."""
    for block in [*blocks(FIRST_GAME), *blocks(ROOT / "docs" / "training.md")]:
        if block.title:
            block.text = block.text.replace("Qwen/Qwen2.5-0.5B-Instruct", str(model))
            save(block, tmp_path)
    told = {"train.py": r"0\.\d+\n\Z", "publish.py": r"task 0\ntask 1\ntask 2\ntask 3\n\Z"}
    for script, ending in told.items():
        code = (tmp_path / script).read_text()
        code = code.replace("nats://127.0.0.1:4222", stack.server.url)
        code = code.replace("num_steps=100, test_freq=20, save_freq=50", "num_steps=2")
        (tmp_path / script).write_text(code)
        said = await asyncio.to_thread(succeed, f"python {script}", tmp_path)
        assert re.search(ending, said), said
    records = (await stack.ask("list", ListRequest(all=True), JobList)).records
    published = max(records, key=lambda record: record.created)
    await Job(stack, published).until("COMPLETED")  # without the game on any node


def test_each_attack_in_the_page_on_security_has_its_test() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`((?:\w+/)*test_\w+\.py)`", page)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).is_file()] == []
