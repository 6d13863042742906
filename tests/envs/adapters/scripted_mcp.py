"""An MCP server that does what its argument says, over stdio; it needs no package.

`answers` yields the messages with which a request is answered, for the one over HTTP as well.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ECHO = {
    "name": "echo",
    "description": "Return a text.",
    "inputSchema": {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    },
}
DEEP: dict[str, Any] = {"type": "object"}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"x": DEEP}}
LISTS = {
    "control": [{**ECHO, "name": "echo\x1b[2J"}],
    "deep": [{**ECHO, "inputSchema": DEEP}],
    "large": [{**ECHO, "description": "x" * 300_000}],
    "array": [{**ECHO, "inputSchema": {"type": "array"}}],
    "typed": [{**ECHO, "description": ["no", "text"]}],
    "dotted": [{**ECHO, "name": "a.b"}, {**ECHO, "name": "a/b"}],
    "none": [],
    "numbers": [1, 2],
    "nameless": [{"inputSchema": {}}],
    "many": [{**ECHO, "name": f"echo{number}"} for number in range(600)],
}
VERSION = {"version": "2099-01-01", "untyped": ["2025-11-25"]}


def answers(mode: str, request: dict[str, Any]) -> Iterator[Any]:
    """Yield messages in answer to a request."""
    answer = {"jsonrpc": "2.0", "id": request["id"]}
    match request["method"]:
        case "initialize":
            version = VERSION.get(mode, request["params"]["protocolVersion"])
            info = {"serverInfo": {"name": mode, "version": "1"}, "capabilities": {}}
            yield {**answer, "result": {"protocolVersion": version, **info}}
        case "tools/list":
            more = {"nextCursor": "on"} if mode == "pages" else {}
            yield {**answer, "result": {"tools": LISTS.get(mode, [ECHO]), **more}}
        case "tools/call":
            yield from called(mode, answer, request["params"]["arguments"])
        case _:
            yield {**answer, "error": {"code": -32601, "message": "unknown"}}


def called(mode: str, answer: dict[str, Any], arguments: dict[str, Any]) -> Iterator[Any]:
    """Yield messages in answer to a call."""
    text = arguments["text"]
    match mode:
        case "text_id":
            answer["id"] = str(answer["id"])
        case "float_id":
            answer["id"] = float(answer["id"])
        case "strange_id":
            answer["id"] = "abc"
        case "later_id":
            answer["id"] += 1
        case "no_id":
            yield {"jsonrpc": "2.0", "error": {"code": -32700, "message": "what was that"}}
        case "null_id":
            yield {**answer, "id": None, "error": {"code": -32700, "message": "what was that"}}
        case "nothing":
            yield {"jsonrpc": "2.0"}
        case "surrogate":
            text = "\ud800"
        case "batch":
            note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {}}
            text_part = {"type": "text", "text": text}
            yield [note, {**answer, "result": {"content": [text_part]}}]
        case "flood":
            while True:
                yield {"jsonrpc": "2.0", "method": "notifications/message", "params": {}}
        case "big":
            text = "x" * 50_000_000
        case "result":
            yield {**answer, "result": ["no", "object"]}
        case "content":
            yield {**answer, "result": {"content": [{"type": "text", "text": 7}]}}
        case "parts":
            image = {"type": "image", "mimeType": "image/png", "data": "AAAA"}
            link = {"type": "resource_link", "uri": "file:///a"}
            inner = {"type": "resource", "resource": {"uri": "file:///b", "text": "inner"}}
            yield {**answer, "result": {"content": [image, link, inner]}}
        case "controls":
            text = "\x1b[2J\u202ebell\x07 <|im_end|>"
        case "environment":
            text = os.environ.get(text, "unset")
        case "file":
            text = Path(text).read_text() if Path(text).exists() else "no such file"
        case "connect":
            host, _, port = text.partition(":")
            try:
                socket.create_connection((host, int(port)), 2).close()
                text = "connected"
            except OSError as error:
                text = type(error).__name__
        case "memory":
            hoard = bytearray(1 << 30)
            hoard[::4096] = b"x" * len(hoard[::4096])
            time.sleep(600)
    yield {**answer, "result": {"content": [{"type": "text", "text": text}]}}


def main() -> None:
    """Answer requests, one line each."""
    mode = sys.argv[1]
    if mode == "noise":
        print("starting up\n[[[not JSON", flush=True)
    if mode == "sleepy":
        time.sleep(1.5)
    if mode == "ends":
        sys.exit("no licence for this machine")
    for line in sys.stdin:
        message = json.loads(line)
        method = message.get("method")
        if mode == "mute" or (mode == "silent" and method == "tools/call"):
            continue
        if mode == "dies" and method == "tools/call":
            print("out of paper", file=sys.stderr, flush=True)
            os._exit(3)
        if mode == "stream" and method == "tools/call":
            while True:
                sys.stdout.write("x" * 65536)
        if mode == "asks" and method == "tools/call":
            print(json.dumps({"jsonrpc": "2.0", "id": "p", "method": "ping"}))
            print(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "sampling/createMessage"}))
            sys.stdout.flush()
            replies = [json.loads(sys.stdin.readline()) for _ in range(2)]
            message["params"]["arguments"]["text"] = json.dumps(replies)
        if "id" in message and method is not None:
            for answer in answers(mode, message):
                print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
