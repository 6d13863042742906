"""Tasks of verifiers whose calls of the model are intercepted: run by verifiers itself."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tinkermq.envs.adapters.verifiers_program import main

TASKS = Path(__file__).parent


class Model(http.server.BaseHTTPRequestHandler):
    """Says the last word backwards, by OpenAI's Chat Completions, streamed or not."""

    asked: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        body = json.loads(self.rfile.read(length))
        self.asked.append((self.headers["authorization"], body))
        said = body["messages"][-1]["content"].removeprefix("Reverse ")[::-1]
        head = {"id": "x", "created": 1, "model": "policy"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if body.get("stream"):
            delta = {"role": "assistant", "content": said}
            chunk = {**head, "object": "chat.completion.chunk"}
            one = {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            end = {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
            last = {**chunk, "choices": [], "usage": usage}
            told = "".join(f"data: {json.dumps(part)}\n\n" for part in (one, end, last))
            kind, sent = "text/event-stream", f"{told}data: [DONE]\n\n".encode()
        else:
            message = {"role": "assistant", "content": said}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            kind, sent = "application/json", json.dumps(whole).encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.mark.extras
def test_a_task_is_run_by_verifiers_against_the_model_of_the_episode(tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    reward, task = tmp_path / "reward.json", tmp_path / "task.json"
    task.write_text('{"number": 1}')
    variables = {
        **os.environ,
        "OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1",
        "OPENAI_API_KEY": "of-the-episode",
        "OPENAI_MODEL": "policy",
        "TINKERMQ_REWARD": str(reward),
        "TINKERMQ_TASK": str(task),
        "PYTHONPATH": str(TASKS),
    }
    harness = json.dumps({"agent": {"harness": {"id": "null"}}})
    words = ["tinkermq.envs.adapters.verifiers_program", "word-tasks", "--env-config", harness]
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words], env=variables, capture_output=True, timeout=300
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(reward.read_text()) == {"reward": 1.0, "info": {"right": 1.0, "length": 5.0}}
    (asked,) = Model.asked
    assert asked[0] == "Bearer of-the-episode"
    assert asked[1]["messages"][-1] == {"role": "user", "content": "Reverse river"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--config", "{"], "--config is not JSON"),
        (["--env-config", "[1]"], "--env-config='[1]' is not an object"),
    ],
)
def test_a_configuration_that_is_none_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["word-tasks", *words]) == 1
    assert told in capsys.readouterr().err
