"""Whether a node can have a model: folders, names of the hub, a hub that does not answer."""

import asyncio
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tinkermq.actors.node.preflight import ModelChecks
from tinkermq.actors.policy.model_folder import check_model_is_here
from tinkermq.actors.scheduler.submission.submission import Reader
from tinkermq.actors.storage.access import MODELS_VARIABLE
from tinkermq.schemas.node import ModelQuestion
from tinkermq.schemas.wire.errors import ModelError

from tests.support.hollow_model import hollow_model
from tests.support.waiting import PATIENCE_S

_ASK = """
import sys
from tinkermq.actors.policy.model_folder import check_model_is_here
from tinkermq.schemas.wire.errors import ModelError
try:
    check_model_is_here(sys.argv[1])
    print("there")
except ModelError as error:
    print(error.message, "|", error.hint)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


class Hub(BaseHTTPRequestHandler):
    """Knows one model, one that is gated, and no other."""

    def do_HEAD(self) -> None:
        name = "/".join(self.path.split("/")[1:3])
        status, code = {
            "lab/here": (200, ""),
            "lab/gated": (403, "GatedRepo"),
        }.get(name, (404, "RepoNotFound"))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("ETag", '"abc"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", "2")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def ask(model: str, tmp_path: Path, **environment: str) -> str:
    """Ask in a process of its own, since the hub's settings are read once."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK, model],
        env={**os.environ, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout


def test_hub_offline_mode_and_folders_are_told_apart(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
    assert ask("lab/here", tmp_path, **hub) == "there\n"
    assert "the hub has no such model" in ask("nowhere/model", tmp_path, **hub)
    assert "gated on the hub" in ask("lab/gated", tmp_path, **hub)
    assert "offline mode" in ask("lab/here", tmp_path, **hub, HF_HUB_OFFLINE="1")
    server.shutdown()
    server.server_close()
    assert "the hub cannot be reached" in ask("lab/here", tmp_path, **hub)
    assert "there is no model folder" in ask(str(tmp_path / "gone"), tmp_path, **hub)


async def test_a_node_answers_with_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    lookout = ModelChecks()
    there = await lookout.answer(ModelQuestion(model=hollow_model()))
    assert (there.known, there.missing) == (True, "")
    (tmp_path / "config.json").write_text("{}")
    answer = await lookout.answer(ModelQuestion(model=str(tmp_path)))
    assert "model.safetensors is missing" in answer.missing
    assert "safetensors" in answer.hint


async def test_more_questions_than_a_node_looks_into_are_left_open(tmp_path: Path) -> None:
    lookout = ModelChecks()
    asked = [ModelQuestion(model=str(tmp_path / str(number))) for number in range(40)]
    answers = await asyncio.gather(*map(lookout.answer, asked))
    assert {one.known for one in answers} == {True, False}
    assert (await lookout.answer(asked[0])).known


def test_an_adapter_is_here_if_its_base_is(tmp_path: Path) -> None:
    base = '{"base_model_name_or_path": "%s", "peft_type": "LORA", "r": 8}'
    (tmp_path / "adapter_config.json").write_text(base % (tmp_path / "gone"))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ModelError, match="there is no model folder"):
        check_model_is_here(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(base % hollow_model())
    check_model_is_here(str(tmp_path))


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder with whatever may lie where somebody looks for a model."""
    for name in ("empty", "half", "adapter", "locked", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("secret")
    (tmp_path / "half/config.json").write_text("{}")
    (tmp_path / "adapter/adapter_config.json").write_text('{"base_model_name_or_path": "/secret"}')
    (tmp_path / "broken/adapter_config.json").write_text("{")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "odd\udcff").mkdir()
    (tmp_path / "locked").chmod(0)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *(
            "nothing",
            "empty",
            "half",
            "file",
            "adapter",
            "broken",
            "locked",
            "locked/inner",
            "link",
        ),
        *("dangling", "loop", "file/inner", "empty/../file", "x" * 300, "y/" * 2200, "a\0b"),
    ],
)
async def test_whoever_may_not_know_is_told_the_same_of_everything_but_models(
    places: Path, name: str
) -> None:
    path = f"{places}/{name}"[:4096]
    answer = await ModelChecks().answer(ModelQuestion(model=path, alike=True))
    nowhere = f"{places}/nowhere"
    other = await ModelChecks().answer(ModelQuestion(model=nowhere, alike=True))
    assert (answer.known, answer.hint) == (other.known, other.hint) == (True, other.hint)
    assert answer.missing.replace(path, "PATH") == other.missing.replace(nowhere, "PATH")


async def test_whoever_may_not_know_is_still_told_of_models() -> None:
    answer = await ModelChecks().answer(ModelQuestion(model=hollow_model(), alike=True))
    assert (answer.known, answer.missing) == (True, "")


def test_users_may_know_of_their_runs_and_of_the_operators_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path / "models"))
    (tmp_path / "runs/ada").mkdir(parents=True)
    (tmp_path / "runs/ada/link").symlink_to(tmp_path / "secrets")
    ada = Reader("ada", [tmp_path / "runs"])
    known = {name: ada.may_know(f"{tmp_path}/{name}") for name in _PLACES}
    assert known == _PLACES
    assert Reader("root", []).may_know(f"{tmp_path}/secrets")


_PLACES = {
    "models/m": True,
    "runs/ada/r/checkpoints/step_000001": True,
    "runs/ada/link": False,
    "runs/bob/r": False,
    "runs": False,
    "secrets": False,
    "models/../secrets": False,
    "": False,
}
