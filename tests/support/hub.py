"""A hub of models on this machine."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
}
"""A model of 8 B weights whose name is not known."""


class _Hub(BaseHTTPRequestHandler):
    """Knows one model, one that is gated, and no other."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        name = "/".join(self.path.split("/")[1:3])
        status, code = {
            "lab/here": (200, ""),
            "lab/gated": (403, "GatedRepo"),
        }.get(name, (404, "RepoNotFound"))
        body = json.dumps(_CONFIG).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("ETag", '"abc"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return body

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@contextmanager
def served_hub() -> Iterator[dict[str, str]]:
    """Serve it; yield the environment of a process that asks there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
    finally:
        server.shutdown()
        server.server_close()
