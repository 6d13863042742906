"""Every command of the documentation can be typed: programs, options, files and addresses exist.

Those of the tutorials are run (`test_tutorials.py`); here all of them are read by what they call.
"""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cyclopts import App, CoercionError, CycloptsError, MissingArgumentError
from starlette.routing import Match
from tinkermq.actors.gateway.server import make_app
from tinkermq.actors.gateway.sessions import Sessions
from tinkermq.broker.jetstream.streams import job_streams
from tinkermq.clients.cli.app import build_app
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.wire.subjects import BUCKET_JOBS, JobScope

from tests.support.pages import (
    PAGES,
    ROOT,
    SHELLS,
    commands,
    of_language,
    prose,
    script,
    typed,
)
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.full

TRIED = ROOT / "tests" / "agents" / "programs"
BLOCKS = of_language(*SHELLS)
MAKEFILES = (ROOT / "Makefile", ROOT / "clients" / "new_game" / "common" / "Makefile.in")
OURS = {"tinkermq", "make", "python", "python3", "pip", "pytest", "curl", "nats"}
OTHERS = {
    *("export", "source", "cd", "for", "done", "printf", "cat", "head", "cut", "sed", "mkdir"),
    *(
        "git",
        "pyright",
        "ruff",
        "grep",
        "cp",
        "install",
        "chown",
        "chgrp",
        "chmod",
        "rsync",
        "openssl",
        "apt-get",
    ),
    *(
        "nats-server",
        "systemctl",
        "systemd-analyze",
        "systemd-sysusers",
        "systemd-tmpfiles",
        "docker",
        "kubectl",
        "sky",
        "dstack",
        "uv",
    ),
    *("emulator", "alfworld-download", "claude", "codex", "opencode", "node", "openenv"),
}
"""Programs that are not ours: what they take, these tests cannot know."""


def called(*names: str) -> Iterator[tuple[str, list[str]]]:
    """Yield where each call of a program stands, and its words."""
    for block in BLOCKS:
        for words in commands(block):
            if Path(words[0]).name in names:
                yield str(block), words


def told() -> Iterator[tuple[str, list[str]]]:
    """Yield each command between backticks in a text, where it stands and its words."""
    for page in PAGES:
        for line in re.findall(r"`((?:tinkermq|python|pip|make) [^`]+)`", prose(page)):
            yield page.name, next(typed(line.replace("\n", " ")))


def test_a_shell_can_read_every_block_and_its_programs_are_known() -> None:
    unknown: list[str] = []
    for block in BLOCKS:
        read = subprocess.run(["bash", "-n"], input=script(block), capture_output=True, text=True)
        assert read.returncode == 0, f"{block}: {read.stderr}"
        names = {Path(words[0]).name for words in commands(block) if not words[0].startswith("$")}
        unknown += [f"{block}: {name}" for name in sorted(names - OURS - OTHERS)]
    assert not unknown, "say what reads it: a test here, or OTHERS"


# -- tinkermq --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def app() -> App:
    return build_app()


def each(told: Iterable[tuple[str, list[str]]]) -> Iterator[tuple[str, list[str]]]:
    """Yield each command once, with one of the places where it stands."""
    return ((where, list(words)) for words, where in {tuple(w): at for at, w in told}.items())


def parse(app: App, words: list[str]) -> None:
    """Let the command line's own parser judge `tinkermq …`; nothing is run."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        app.parse_args(words[1:], print_error=False, exit_on_error=False)


def test_every_tinkermq_command_can_be_typed(app: App) -> None:
    told = list(called("tinkermq"))
    told += [
        (where, shlex.split(word))
        for where, words in called("nats")
        for word in words
        if word.startswith("tinkermq ")
    ]
    wrong: list[str] = []
    for where, words in each(told):
        try:
            parse(app, words)
        except (CycloptsError, ValueError) as error:
            wrong.append(f"{where}: {shlex.join(words)}: {error}")
    assert not wrong


def test_every_tinkermq_command_that_a_text_names_has_its_options(app: App) -> None:
    """A text may leave out what a command is for (`tinkermq replay`), or say N for a number."""
    wrong: list[str] = []
    for where, words in each(told()):
        if words[0] != "tinkermq" or where == "CHANGELOG.md":
            continue
        try:
            parse(app, words)
        except (MissingArgumentError, CoercionError):
            continue
        except (CycloptsError, ValueError) as error:
            wrong.append(f"{where}: {shlex.join(words)}: {error}")
    assert not wrong


def test_every_command_of_tinkermq_is_told_somewhere(app: App) -> None:
    text = " ".join(page.read_text() for page in PAGES)
    names = [name for name in app if not name.startswith("-")]
    names = [
        f"{name} {inner}" if inner else name
        for name in names
        for inner in ([one for one in app[name] if not one.startswith("-")] or [""])
    ]
    assert not [name for name in names if f"tinkermq {name}" not in text]


# -- make, python, pip -----------------------------------------------------------------------------


def test_every_make_target_exists() -> None:
    rules = "".join(makefile.read_text() for makefile in MAKEFILES)
    targets = set(re.findall(r"^([a-z-]+):", rules, flags=re.MULTILINE))
    asked = [*called("make"), *((where, words) for where, words in told() if words[0] == "make")]
    wrong = [
        f"{where}: {shlex.join(words)}"
        for where, words in asked
        if not {word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)} <= targets
    ]
    assert not wrong


def test_every_file_of_ours_that_a_command_names_exists() -> None:
    folders = ("examples/", "benchmarks/", "docs/", "deploy/", "tests/")
    lacking = [
        f"{block}: {word}"
        for block in BLOCKS
        for words in commands(block)
        for word in words
        if word.startswith(folders) and not list(ROOT.glob(re.sub(r"\$\w+", "*", word)))
    ]
    assert not lacking


def programs() -> dict[str, set[str]]:
    """Return each module (`-m name`) and each script of ours, with the options it is given."""
    titles = {block.title for block in of_language("python")}
    found: defaultdict[str, set[str]] = defaultdict(set)
    python = ((where, words) for where, words in told() if words[0] == "python")
    for _, words in [*called("python", "python3"), *python]:
        name = words[2] if words[1] == "-m" else words[1]
        needs_others = ("tinker_cookbook.", "examples/agents/")
        is_others = name in {"build", "twine", "venv", "nltk.downloader"} or name.startswith(
            needs_others
        )
        if name in titles or is_others or (TRIED / name).is_file():
            continue  # what a page lets one write, what others have made, what their SDKs run
        options = {word.partition("=")[0] for word in words[2:] if word.startswith("--")}
        found[name] |= options
    return found


def test_every_python_program_has_the_options_that_a_page_gives_it() -> None:
    """All of them are asked for `--help` in one process: what they import is imported once."""
    asked = programs()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.helps", *asked],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    helps: dict[str, str] = json.loads(done.stdout)
    lacking = [
        f"{name} {option}"
        for name, options in asked.items()
        for option in options
        if option not in helps[name]
    ]
    assert not lacking


def test_every_extra_that_a_page_installs_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    named = re.findall(
        r"(?:tinkermq|['\"]\.)\[([a-z,-]+)\]", " ".join(page.read_text() for page in PAGES)
    )
    assert named
    assert {extra for some in named for extra in some.split(",")} <= extras


# -- curl, nats ------------------------------------------------------------------------------------


def test_every_address_that_curl_asks_is_one_of_the_gateway() -> None:
    routes = make_app(Sessions("nats://127.0.0.1:1", with_keys=False), local_only=True).routes
    for where, words in called("curl"):
        (url,) = (word for word in words if word.startswith("http"))
        method = "POST" if "-d" in words else "GET"
        scope = {"type": "http", "path": urlsplit(url).path, "method": method, "root_path": ""}
        assert any(route.matches(scope)[0] is Match.FULL for route in routes), f"{where}: {url}"


def test_every_stream_and_bucket_that_nats_is_asked_for_is_one_of_a_job() -> None:
    made = {str(one["name"]) for one in job_streams(JobScope("local", "job"), LimitsConfig(), 1)}
    named = {word for _, words in called("nats") for word in words if word.startswith("tmq-")}
    assert {name.replace("JOB", "job") for name in named} <= made | {BUCKET_JOBS}
