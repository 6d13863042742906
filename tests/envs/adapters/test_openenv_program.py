"""Harness environments of OpenEnv, whose agents call the model of the episode.

Here a server elsewhere speaks OpenEnv's wire; `test_openenv_package.py` has the real package.
"""

import contextlib
import http.server
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tinkermq.envs.adapters.openenv_program import main
from websockets.sync.server import ServerConnection, serve

Answer = Callable[[dict[str, Any]], Any]


class Model(http.server.BaseHTTPRequestHandler):
    """Says the last word backwards, by OpenAI's Chat Completions."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said = body["messages"][-1]["content"]
        self.asked.append((self.headers["authorization"], said))
        message = {"role": "assistant", "content": said[::-1]}
        sent = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Harness:
    """An environment whose agent asks the model that a reset has named, once for each step."""

    def __init__(self) -> None:
        self.reset: dict[str, Any] = {}
        self.heard: list[str] = []
        self.num_steps = 0

    def __call__(self, message: dict[str, Any]) -> Any:
        data = message["data"]
        self.heard.append(message["type"])
        if message["type"] == "reset":
            self.reset = data
            return observation(None, done=False)
        self.num_steps += 1
        said = self.ask(data["message"])
        return observation(0.5, done=self.num_steps == 2, response=said)

    def ask(self, text: str) -> str:
        body = {"model": self.reset["model"], "messages": [{"role": "user", "content": text}]}
        request = urllib.request.Request(
            f"{self.reset['base_url']}/chat/completions",
            json.dumps(body).encode(),
            {"authorization": f"Bearer {self.reset['api_key']}"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.loads(answer.read())["choices"][0]["message"]["content"]


def observation(reward: float | None, *, done: bool, **metadata: Any) -> Any:
    data = {"observation": {}, "reward": reward, "done": done, "metadata": metadata}
    return {"type": "observation", "data": data}


@contextlib.contextmanager
def environment(answer: Answer) -> Iterator[str]:
    """Serve an environment; yield its URL."""

    def play(connection: ServerConnection) -> None:
        for message in connection:
            connection.send(json.dumps(answer(json.loads(message))))

    with serve(play, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The variables of an episode with three user messages, and where its reward goes."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    task = tmp_path / "task.json"
    turns = [{"role": "user", "content": text} for text in ("river", "stone", "never said")]
    task.write_text(json.dumps({"prompt": [{"role": "system", "content": "s"}, *turns]}))
    variables = {
        "OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1",
        "OPENAI_API_KEY": "of-the-episode",
        "OPENAI_MODEL": "policy",
        "TINKERMQ_EPISODE": "e1",
        "TINKERMQ_SEED": "7",
        "TINKERMQ_TASK": str(task),
        "TINKERMQ_REWARD": str(tmp_path / "reward.json"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    Model.asked.clear()
    yield tmp_path / "reward.json"
    server.shutdown()
    server.server_close()


def test_the_agent_of_a_server_asks_the_model_of_the_episode(reward: Path) -> None:
    harness = Harness()
    with environment(harness) as url:
        assert main([url]) == 0
    assert json.loads(reward.read_text()) == {"reward": 1.0, "info": {"turns": 2, "done": 1.0}}
    assert Model.asked == [("Bearer of-the-episode", "river"), ("Bearer of-the-episode", "stone")]
    assert harness.heard == ["reset", "step", "step"]
    assert (harness.reset["seed"], harness.reset["episode_id"]) == (7, "e1")


def test_a_reset_says_what_the_environment_takes(reward: Path) -> None:
    seen: list[dict[str, Any]] = []

    def answer(message: dict[str, Any]) -> Any:
        seen.append(message["data"])
        return observation(1, done=True)

    given = {"llm": {"key": "{api_key}", "urls": ["{openai_base_url}/chat"]}, "size": 3}
    with environment(answer) as url:
        assert main([url, "--reset", json.dumps(given)]) == 0
    assert seen[0]["llm"]["key"] == "of-the-episode"
    assert seen[0]["llm"]["urls"][0].endswith("/v1/chat")
    assert (seen[0]["size"], "api_key" in seen[0]) == (3, False)


def error_of_capacity(_: dict[str, Any]) -> Any:
    data = {"message": "Server at capacity: 1/1", "code": "CAPACITY_REACHED"}
    return {"type": "error", "data": data}


def crashed(message: dict[str, Any]) -> Any:
    if message["type"] == "reset":
        return observation(None, done=False)
    return observation(0.0, done=True, error="harness process is not running")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (error_of_capacity, "answered reset with 'Server at capacity: 1/1'"),
        (crashed, "agent failed in turn 1: harness process is not running"),
        (lambda _: [1], "answered reset with [1]"),
        (lambda _: {"type": "observation", "data": {"reward": 1.0}}, "done: is missing"),
    ],
)
def test_an_episode_that_an_environment_could_not_run_is_a_crash(
    reward: Path, capsys: pytest.CaptureFixture[str], answer: Answer, told: str
) -> None:
    with environment(answer) as url:
        assert main([url]) == 1
    assert told in capsys.readouterr().err
    assert not reward.exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer"),
        (["ftp://nowhere"], "ftp://nowhere does not answer"),
        (["http://127.0.0.1:9", "--reset", "{"], "--reset is not JSON"),
        (["http://127.0.0.1:9", "--reset", "[1]"], "--reset='[1]' is not an object"),
        (["my_env:make"], "the package openenv is not installed where the game runs"),
    ],
)
def test_what_cannot_be_run_is_said(
    reward: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(words) == 1
    assert told in capsys.readouterr().err


def test_a_task_without_a_prompt_is_refused(
    reward: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task.json").write_text("{}")
    assert main(["http://127.0.0.1:9"]) == 1
    assert "the task has no prompt" in capsys.readouterr().err
