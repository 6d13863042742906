"""A scripted model behind the three APIs that writes down what programs send."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tinkermq.schemas.model_apis.answers import AnswerHead, Usage
from tinkermq.schemas.model_apis.canonical import Piece, ReplyReader
from tinkermq.schemas.model_apis.chat import CHAT
from tinkermq.schemas.model_apis.messages import MESSAGES
from tinkermq.schemas.model_apis.request import ModelRequest
from tinkermq.schemas.model_apis.responses import RESPONSES

from tests.agents.scripts import Script

APIS = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}
HEADERS = ("idempotency-key", "x-stainless-retry-count", "anthropic-beta", "anthropic-version")
_STEP = 7
"""Characters of a piece of a stream."""


class Recording:
    """Answers, and keeps each request with its answer."""

    def __init__(self, script: Script) -> None:
        self.lines: list[dict[str, Any]] = []
        self._script = script
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, headers: Any, body: Any) -> tuple[ModelRequest, str]:
        """Return the answer to a call in the words of its API."""
        path = path.partition("?")[0]
        request = APIS[path].read(body)
        line = {
            "method": method,
            "path": path,
            "headers": {name: headers[name] for name in HEADERS if name in headers},
            "body": body,
        }
        with self._lock:
            number = len(self.lines)
            said = _cut(self._script.say(request.messages, request.tools, number), request.stop)
            self.lines.append({**line, "answer": said})
        usage = Usage(prompt=len(json.dumps(body)) * 5 // 8, generated=len(said))
        return request, worded(path, request, usage, f"c{number:05}", said)


def _cut(text: str, stops: Sequence[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def worded(path: str, request: ModelRequest, usage: Usage, name: str, said: str) -> str:
    """Return an answer as its API words it, streamed or whole."""
    reader = ReplyReader(name, calls=bool(request.tools))
    pieces: list[Piece] = []
    for at in range(0, len(said), _STEP):
        pieces += reader.push(said[at : at + _STEP])
    pieces += reader.finish()
    answer = APIS[path].answer(AnswerHead(name, 1_700_000_000, request.model), request)
    events = [*answer.start(usage), *answer.push(pieces), *answer.finish("stop")]
    if not request.stream:
        return json.dumps(answer.whole(usage))
    return "".join([*events, *answer.end(usage)])


@contextmanager
def recording(script: Script) -> Iterator[tuple[str, Recording]]:
    """Serve a scripted model on this machine; yield its URL and what it records."""
    kept = Recording(script)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            request, told = kept.answer("POST", self.path, self.headers, json.loads(sent))
            self._send(told, "text/event-stream" if request.stream else "application/json")

        def do_GET(self) -> None:
            models = [{"id": "policy", "object": "model", "created": 1, "owned_by": "tinkermq"}]
            self._send(json.dumps({"object": "list", "data": models}), "application/json")

        def _send(self, text: str, kind: str) -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", kept
        finally:
            server.shutdown()
            thread.join()
