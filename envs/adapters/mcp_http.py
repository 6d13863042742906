"""The channel to MCP servers over streamable HTTP.

Each request is a POST, answered with JSON or a stream of events. A stream whose events have ids may
end before the answer, by the server's wish or with its connection; a GET with the last id continues
it, and the request is not sent again. A session that the server has ended begins anew and repeats
the refused request if no state can be lost: before its first call of a tool, or where it is shared.

A client of httpx looks at all its connections for each request, so each request in flight has a
client of its own, which later requests to the same origin use again (`HttpClients`).
"""

import asyncio
import contextlib
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from http.cookiejar import DefaultCookiePolicy
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from ...schemas.wire.foreign import shown
from .. import user_http
from .mcp_channels import (
    MAX_MESSAGE_BYTES,
    Budget,
    CallRefused,
    GameServer,
    McpServerError,
    answer_to,
    answered,
    begin_farewell,
    printable,
    read_messages,
    refused,
    too_long,
    variable,
    who,
)

_CONNECT_S = 10.0
_KEEP_S = 4.0
"""Connections are not used again after it: common servers close theirs after 5 s."""
_MAX_IDLE = 256
_FINISH_S = 1.0
_RETRY_S = 1.0
_MIN_RETRY_S = 0.05
_MAX_RETRY_S = 3600.0
_MAX_FRUITLESS = 5
_SESSION_ID = re.compile(r"[\x21-\x7e]{1,1024}")
_EVENT_ID = re.compile(rb"[\x20-\x7e]{0,1024}")
_NEEDS_KEY = frozenset({401, 403})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NO_CONTENT = frozenset({202, 204})
_OF_SESSION = ("Mcp-Session-Id", "MCP-Protocol-Version")


class HttpClients:
    """The HTTP clients of an event loop; each is used by one request at a time."""

    def __init__(self) -> None:
        self._verify = httpx.create_ssl_context()
        self._idle: defaultdict[tuple[str, str], list[httpx.AsyncClient]] = defaultdict(list)

    def take(self, url: str) -> httpx.AsyncClient:
        """Return a client for one request, without cookies."""
        if idle := self._idle[_origin(url)]:
            return idle.pop()
        client = user_http.http_client(
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_keepalive_connections=1, keepalive_expiry=_KEEP_S),
            verify=self._verify,
        )
        client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        return client

    def give_back(self, url: str, client: httpx.AsyncClient) -> None:
        """Keep a client, whose request is over, for the next one to the same origin."""
        idle = self._idle[_origin(url)]
        if len(idle) < _MAX_IDLE:
            idle.append(client)
        else:
            begin_farewell(client.aclose())

    async def aclose(self) -> None:
        """Close the connections of all clients that are not in use."""
        while self._idle:
            _, clients = self._idle.popitem()
            for client in clients:
                await client.aclose()


class SessionExpired(McpServerError):
    """A server has ended the session of a request, and has not run the request."""


class HttpChannel:
    """One session over HTTP."""

    def __init__(self, server: GameServer, clients: HttpClients) -> None:
        """Raises ConfigError for a key that is not set."""
        self._name = who(server)
        self._is_shared = server.shared
        self._clients = clients
        self._url = server.url
        self._headers = {
            **server.headers,
            "Accept": "application/json, text/event-stream",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
        }
        if server.key_variable:
            self._headers["Authorization"] = f"Bearer {variable(server, server.key_variable)}"
        self._is_open = True
        self._last_id = 0
        self._opening: list[Mapping[str, Any]] = []
        self._has_called = False
        self._renewing, self._parting = asyncio.Lock(), asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._is_open

    def use_protocol(self, version: str) -> None:
        """Send the version with each request from now on."""
        self._headers["MCP-Protocol-Version"] = version

    async def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer's message; McpServerError, CallRefused."""
        self._last_id = max(self._last_id, message["id"])
        if message["method"] == "initialize":
            self._opening = [message]
        session = self._headers.get("Mcp-Session-Id")
        try:
            return await self._requested(message)
        except SessionExpired:
            if self._has_called and not self._is_shared:
                raise
            await self._renew(session)
            return await self._requested(message)
        finally:
            self._has_called |= message["method"] == "tools/call"

    async def notify(self, message: dict[str, Any]) -> None:
        """Send a notification, or the answer to a request of the server."""
        if message.get("method") == "notifications/initialized":
            self._opening.append(message)
        await self._send(message)

    def close(self) -> None:
        """End the session, and report this to a server that has named one."""
        if not self._is_open:
            return
        self._is_open = False
        if "Mcp-Session-Id" in self._headers:
            begin_farewell(self._part("DELETE"))

    def cancel(self, note: dict[str, Any]) -> None:
        """Send the notification that a request is cancelled, also if `close` follows."""
        begin_farewell(self._part("POST", json.dumps(note).encode()))

    async def _part(self, method: str, body: bytes | None = None) -> None:
        """Send what a server hears last, in order; it need not succeed."""
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, TimeoutError, CallRefused):
            async with asyncio.timeout(_CONNECT_S), self._parting:
                reply = await self._reply(method, self._headers, body)
                async with contextlib.aclosing(reply):
                    await self._body(reply)

    async def _renew(self, session: str | None) -> None:
        """Begin a new session in place of one that has ended, unless another request has."""
        async with self._renewing:
            if self._headers.get("Mcp-Session-Id") != session:
                return
            begun, *notes = self._opening
            answer = await self._requested(begun)
            result = answer.get("result")
            version = self._headers.get("MCP-Protocol-Version")
            fields = cast("dict[str, Any]", result) if isinstance(result, dict) else {}
            if fields.get("protocolVersion") != version:
                raise McpServerError(
                    f"{self._name} ended its session, and began another with {shown(answer)}",
                    hint=f"it spoke MCP {version} before",
                )
            for note in notes:
                await self._send(note)

    async def _requested(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, which is sent once."""
        stream = _EventStream(self._name)
        async with self._posted(message) as reply:
            if message["method"] == "initialize":
                self._keep_session(reply)
            if reply.kind == "application/json" and reply.status not in _NO_CONTENT:
                return self._answer_in_body(await self._body(reply), message)
            if reply.kind != "text/event-stream":
                raise self._no_answer(reply, message)
            answer = await self._answer_in(stream, reply, message)
            if answer is not None:
                reply.finish()
        while answer is None:
            answer = await self._continued(stream, message)
        return answer

    async def _send(self, message: Mapping[str, Any]) -> None:
        async with self._posted(message) as reply:
            await self._body(reply)

    # -- replies -----------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _posted(self, message: Mapping[str, Any]) -> AsyncIterator["_Reply"]:
        """Post a message; a redirect within the server's origin is followed once."""
        if not self._is_open:
            raise McpServerError(f"the session with {self._name} is closed")
        is_first = message.get("method") == "initialize"
        headers = {
            name: value
            for name, value in self._headers.items()
            if not (is_first and name in _OF_SESSION)
        }
        body = json.dumps(message).encode()
        with self._blaming():
            reply = await self._reply("POST", headers, body)
            if self._moved(reply):
                await reply.aclose()
                reply = await self._reply("POST", headers, body)
            async with contextlib.aclosing(reply):
                await self._check(reply, message)
                yield reply

    async def _reply(
        self, method: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> "_Reply":
        """Send a request and return the reply's head; its body is not read yet."""
        url = self._url
        client = self._clients.take(url)
        try:
            request = client.build_request(method, url, headers={**headers}, content=body)
            response = await client.send(request, stream=True)
        except BaseException:
            self._clients.give_back(url, client)
            raise
        return _Reply(response, lambda: self._clients.give_back(url, client))

    def _moved(self, reply: "_Reply") -> bool:
        """Follow a redirect within the same origin."""
        if reply.status not in (307, 308):
            return False
        target = str(httpx.URL(self._url).join(reply.header("Location")))
        if _origin(target) != _origin(self._url):
            return False
        self._url = target
        return True

    async def _check(self, reply: "_Reply", message: Mapping[str, Any]) -> None:
        """Raise the error of a reply by its status."""
        if reply.status < 300:
            if reply.header("Content-Encoding", "identity") != "identity":
                raise McpServerError(f"{self._name} compresses, though asked not to")
            return
        if reply.status in _REDIRECTS:
            raise McpServerError(
                f"{self._name} redirects to {shown(reply.header('Location'))}",
                hint="redirects to other places are not followed: give the url itself",
            )
        if reply.status in _NEEDS_KEY:
            raise McpServerError(
                f"{self._name} refused with status {reply.status}: it needs a key, or another one",
                hint="key_variable of the server names the variable with it, or set its headers",
            )
        body = await self._body(reply)
        if reply.status == 404 and reply.had_session:
            raise SessionExpired(
                f"{self._name} has ended the session (status 404), and with it what the "
                "episode's calls have done",
                hint="raise the time after which the server ends idle sessions, or set shared if "
                "it has no state",
            )
        if reply.kind == "application/json":
            for candidate in read_messages(body, self._name):
                if "error" in candidate and candidate.get("id") == message.get("id", candidate):
                    raise refused(candidate["error"], self._name)
        raise McpServerError(
            f"{self._name} answered with status {reply.status}: {_shown_body(body)}",
            hint="see its url, which is often /mcp, and its log",
        )

    def _keep_session(self, reply: "_Reply") -> None:
        session = reply.header("Mcp-Session-Id", "")
        if not session:
            self._headers.pop("Mcp-Session-Id", None)
        elif _SESSION_ID.fullmatch(session):
            self._headers["Mcp-Session-Id"] = session
        else:
            raise McpServerError(f"{self._name} named its session {shown(session)}", hint="see it")

    async def _body(self, reply: "_Reply") -> bytes:
        body = bytearray()
        async for chunk in reply.chunks:
            body += chunk
            if len(body) > MAX_MESSAGE_BYTES:
                raise too_long(self._name)
        return bytes(body)

    def _answer_in_body(self, body: bytes, message: Mapping[str, Any]) -> dict[str, Any]:
        for candidate in read_messages(body, self._name):
            if "method" not in candidate and self._is_answer(candidate, message):
                return candidate
        raise McpServerError(
            f"{self._name} answered {message['method']} with {_shown_body(body)}",
            hint="its answers must be as MCP defines them",
        )

    def _is_answer(self, candidate: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
        return answered(candidate, self._last_id, self._name) in (None, message["id"])

    def _no_answer(self, reply: "_Reply", message: Mapping[str, Any]) -> McpServerError:
        if reply.status in _NO_CONTENT:
            return McpServerError(
                f"{self._name} accepted {message['method']} with status {reply.status}, which "
                "announces no answer",
                hint="it must answer a request with JSON or a stream of events",
            )
        return McpServerError(
            f"{self._name} answered {shown(reply.kind)} to {message['method']}",
            hint="url must be the endpoint of MCP over streamable HTTP, often /mcp",
        )

    # -- streams -----------------------------------------------------------------------------------

    async def _answer_in(
        self, stream: "_EventStream", reply: "_Reply", message: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Return the answer among the events of a stream; None if it can be continued."""
        stream.begin()
        try:
            async for chunk in reply.chunks:
                for data in stream.feed(chunk):
                    for candidate in read_messages(data, self._name):
                        if "method" not in candidate:
                            if self._is_answer(candidate, message):
                                return candidate
                        elif "id" in candidate:
                            await self._send(answer_to(candidate))
        except httpx.TransportError:
            if not stream.last_event:
                raise
        if not stream.last_event:
            raise McpServerError(
                f"{self._name} ended its stream without an answer to {message['method']}",
                hint="see the server's log",
            )
        return None

    async def _continued(
        self, stream: "_EventStream", message: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Continue a stream behind its last event; return the answer, or None as before."""
        await asyncio.sleep(stream.retry_s)
        problem = "it sends nothing"
        with self._blaming():
            try:
                headers = {**self._headers, "Last-Event-ID": stream.last_event.decode()}
                reply = await self._reply("GET", headers)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                async with contextlib.aclosing(reply):
                    if reply.status == 200 and reply.kind == "text/event-stream":
                        answer = await self._answer_in(stream, reply, message)
                        if answer is not None or stream.has_begun:
                            return answer
                    elif reply.status < 500:
                        raise self._not_continued(f"status {reply.status} {reply.kind}", message)
                    else:
                        problem = f"status {reply.status}"
        stream.num_fruitless += 1
        if stream.num_fruitless >= _MAX_FRUITLESS:
            raise self._not_continued(problem, message)
        return None

    def _not_continued(self, problem: str, message: Mapping[str, Any]) -> McpServerError:
        return McpServerError(
            f"{self._name} ended its stream without an answer to {message['method']}, and does "
            f"not continue it: {printable(problem)}",
            hint="its events have ids, so GET with Last-Event-ID must bring those that follow",
        )

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise McpServerError(
                f"{self._name} cannot be reached: {type(error).__name__}: {printable(str(error))}",
                hint="see whether it runs, and its url",
            ) from error


class _Reply:
    """A reply; `give_back` is called once its connection is free, or closed."""

    def __init__(self, response: httpx.Response, give_back: Callable[[], None]) -> None:
        self._response: httpx.Response | None = response
        self._headers = response.headers
        self._give_back = give_back
        self.status = response.status_code
        self.kind = self.header("Content-Type").partition(";")[0].strip().lower()
        """The media type; empty without one."""
        self.had_session = "Mcp-Session-Id" in response.request.headers
        """Whether the request named a session."""
        self.chunks = response.aiter_raw()
        """The body."""

    def header(self, name: str, default: str = "") -> str:
        """Return a header's value."""
        return self._headers.get(name, default)

    async def aclose(self) -> None:
        """Close it, and its connection unless the body was read to its end."""
        response, self._response = self._response, None
        if response is not None:
            await self._close(response)

    def finish(self) -> None:
        """Read the rest in a task, for a limited time, so that its connection can be used again."""
        assert self._response is not None
        begin_farewell(self._read_rest(self._response))
        self._response = None

    async def _read_rest(self, response: httpx.Response) -> None:
        try:
            with contextlib.suppress(httpx.HTTPError, TimeoutError):
                async with asyncio.timeout(_FINISH_S):
                    async for _ in self.chunks:
                        pass
        finally:
            await self._close(response)

    async def _close(self, response: httpx.Response) -> None:
        try:
            with contextlib.suppress(httpx.HTTPError):
                await response.aclose()
        finally:
            self._give_back()


class _EventStream:
    """The server-sent events in answer to one request, over one connection after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._budget = Budget(name)
        self.last_event = b""
        """The id of the last event; empty: it cannot be continued."""
        self.retry_s = _RETRY_S
        """The wait before it is continued."""
        self.num_fruitless = 0
        """Attempts to continue it, one after the other, that brought nothing."""
        self.begin()

    def begin(self) -> None:
        """Expect the first byte of a connection; half an event of the last one is dropped."""
        self._rest, self._data = bytearray(), bytearray()
        self._event, self._id = b"", self.last_event
        self._may_have_newline = False
        self.has_begun = False
        """Whether this connection brought an event."""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each message that a chunk completes."""
        self._budget.take(num_bytes=len(chunk))
        if self._may_have_newline:
            chunk = chunk.removeprefix(b"\n")
        self._may_have_newline = chunk.endswith(b"\r")
        self._rest += chunk
        if len(self._rest) + len(self._data) > MAX_MESSAGE_BYTES:
            raise too_long(self._name)
        if b"\n" not in chunk and b"\r" not in chunk:
            return
        *lines, last = self._rest.splitlines(keepends=True)
        ends = last.endswith((b"\n", b"\r"))
        self._rest = bytearray() if ends else last
        for line in (*lines, last) if ends else lines:
            if text := line.rstrip(b"\r\n"):
                self._take_field(bytes(text))
            else:
                yield from self._take_event()

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data += value + b"\n"
        elif name == b"event":
            self._event = value
        elif name == b"id" and _EVENT_ID.fullmatch(value):
            self._id = value
        elif name == b"retry" and value.isdigit():
            self.retry_s = min(max(float(value) / 1000, _MIN_RETRY_S), _MAX_RETRY_S)

    def _take_event(self) -> Iterator[bytes]:
        self.has_begun |= bool(self._data) or self._id != self.last_event
        if self.has_begun:
            self.num_fruitless = 0
        self.last_event = self._id
        data, event = bytes(self._data), self._event
        self._data, self._event = bytearray(), b""
        if data:
            self._budget.take(messages=1)
            if event in (b"", b"message") and data.strip():
                yield data


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _shown_body(body: bytes) -> str:
    return printable(user_http.shown_body(body.decode(errors="replace"))) or "nothing"
