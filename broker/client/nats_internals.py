"""Private parts of nats-py that we use, each with its reason; no other module uses any.

These upstream changes would remove them:

- `CarefulClient`, method by method: a client that closes the socket of a refused attempt, retries
  after a refused reconnect, discards a partial message with its connection, accepts a PONG after
  its flush timed out, refuses a `tls://` server which does not encrypt, and continues reading after
  any subject or headers.
- `parser.MSG_RE`, `parser.HMSG_RE`: a parser that separates words as the server does.
- `server_info`: a public property, as `max_payload` is one.
- `connect_command`: a client that logs in again without connecting anew.
- `reconnection`, `end_connecting`: a `close` that waits for the task which reconnects, and a
  `connect` that can be cancelled at any time.
- `reply_of`: a public `Request.reply`.
- `MicroEndpoint`, `subscriptions`: `add_endpoint` that returns the endpoint, with bounds on pending
  messages, counters for handlers that run in tasks of their own, and a `stop` that does not wait
  for the server.
"""

import asyncio
import contextlib
import copy
import re
from collections.abc import Mapping
from typing import Any, cast

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.micro.request import Request
from nats.micro.service import Service
from nats.protocol import parser

from ...schemas.wire.foreign import ends_this_task

_WORD = rb"([^ \t\r\n]+)[ \t]+"
parser.MSG_RE = re.compile(rb"\AMSG[ \t]+" + _WORD + _WORD + rb"(" + _WORD + rb")?(\d+)\r\n")
parser.HMSG_RE = re.compile(
    rb"\AHMSG[ \t]+" + _WORD + _WORD + rb"(" + _WORD + rb")?(\d+)[ \t]+(\d+)\r\n"
)
_CANCEL_S = 0.05
_MAX_PENDING, _MAX_PENDING_BYTES = 16_384, 64 << 20


class CarefulClient(Client):
    """nats-py's client, but it leaves no socket of a refused attempt open, sends no secret in clear
    text to a `tls://` URL, retries after a refused reconnect, and keeps reading after a late PONG.
    """

    async def _select_next_server(self) -> None:
        self._drop_socket()
        await super()._select_next_server()

    async def _process_err(self, err_msg: str) -> None:
        """Treat a refusal as a lost connection: the auth service may not be back yet.

        `ErrorCallbacks` ends a refusal that lasts.
        """
        if "authorization violation" not in err_msg.lower():
            await super()._process_err(err_msg)
            return
        error = nats.errors.AuthorizationError()
        await self._error_cb(error)
        await self._process_op_err(error)

    async def _process_connect_init(self) -> None:
        """Reset the parser: it may hold half a message of the previous connection."""
        self._ps.reset()
        await super()._process_connect_init()

    async def _process_pong(self) -> None:
        """Accept the answer to a ping, also after its flush has timed out."""
        pongs = cast("list[asyncio.Future[Any]]", cast("Any", self)._pongs)
        if pongs and pongs[0].done():
            pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _flusher(self) -> None:
        with contextlib.suppress(TypeError):  # as in `close`; the reader notices the loss
            await super()._flusher()

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        """Read headers; malformed ones would end the reading, and with it a service."""
        try:
            return await cast("Any", super())._process_headers(headers)
        except (IndexError, ValueError):
            return {}

    def _build_message(
        self,
        sid: int,
        subject: bytes,
        reply: bytes,
        data: bytes,
        headers: dict[str, str] | None,
    ) -> Msg:
        """Make a message, also for subjects that are not UTF-8."""
        return super()._build_message(sid, _utf_8(subject), _utf_8(reply), data, headers)

    async def close(self) -> None:
        """Close for good, with the socket below TLS."""
        try:
            await super().close()
        except (ConnectionError, RuntimeError, TypeError, asyncio.CancelledError) as error:
            if ends_this_task(error):
                raise
            # the server closed first: nothing is left to send, and nats-py has cancelled what its
            # own flush waited for; close the rest. For lines written to a lost connection uvloop
            # raises RuntimeError, and asyncio of Python 3.12 and 3.13 TypeError (CPython 136234)
            self._pending, self._pending_data_size = [], 0
            self._status = Client.DISCONNECTED
            await super().close()
        self._drop_socket()

    def _drop_socket(self) -> None:
        """Close the connection, and under TLS the underlying socket, which nats-py leaves open."""
        if self._transport is None:
            return
        self._transport.close()
        below = getattr(self._transport, "_bare_io_writer", None)
        if below is not None:
            below.transport.abort()

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        await super()._process_info(info, initial_connection)
        server = self._current_server
        demanded = server is not None and server.uri.scheme == "tls"
        if initial_connection and demanded and not info.get("tls_required"):
            raise nats.errors.Error("the server does not encrypt, as its tls:// URL demands")


def _utf_8(text: bytes) -> bytes:
    return text.decode(errors="replace").encode()


def server_info(client: Client) -> Mapping[str, Any]:
    """Return the server's INFO, such as its cluster and the required login."""
    return cast("Any", client)._server_info


def connect_command(client: Client, info: Mapping[str, Any]) -> bytes:
    """Return a login with the client's credentials, for a server's `info`.

    It signs a number that the server draws for each connection.
    """
    other = copy.copy(cast("Any", client))
    other._server_info = info
    return other._connect_command()


def reconnection(client: Client) -> "asyncio.Task[None] | None":
    """Return the reconnecting task, which `close` does not wait for."""
    return cast("Any", client)._reconnection_task


async def end_connecting(task: "asyncio.Task[None] | None") -> None:
    """Cancel a connecting task until it ends: nats-py may lose a cancellation."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_S)


def reply_of(request: Request) -> str:
    """Return the reply subject; `respond` would also send the request's headers back."""
    return cast("Any", request)._msg.reply


class MicroEndpoint:
    """An endpoint of a micro service, whose handlers run in tasks of their own."""

    def __init__(self, service: Service) -> None:
        """Take the endpoint added last, since `add_endpoint` does not return it."""
        self._micro = cast("Any", service)._endpoints[-1]

    @property
    def subscription(self) -> Subscription:
        """The subscription for its requests."""
        return self._micro._subscription

    def count(self, duration_ns: int, error: str = "") -> None:
        """Add to the counters of `nats micro stats` for handlers that nats-py cannot observe."""
        self._micro._processing_time += duration_ns
        if error:
            self._micro._num_errors += 1
            self._micro._last_error = error

    def bound_pending(self) -> None:
        """Bound the pending requests: those behind a flood would wait too long."""
        subscription = self._micro._subscription
        subscription._pending_bytes_limit = _MAX_PENDING_BYTES
        subscription._pending_msgs_limit = subscription._pending_queue._maxsize = _MAX_PENDING


def subscriptions(service: Service) -> list[Subscription]:
    """Return all subscriptions of a service: its `stop` waits for a server that may be gone."""
    micro = cast("Any", service)
    own = [endpoint._subscription for endpoint in micro._endpoints]
    return [*own, *micro._subscriptions.values()]


# Headers of messages: their names, the server's statuses in them, and their format.

EXPECTED_SEQ = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_STREAM_SEQ = "Nats-Expected-Last-Sequence"
MESSAGE_ID = "Nats-Msg-Id"
"""A stream stores only the first of two messages with the same id, for some minutes."""
OPERATION = "KV-Operation"
TTL = "Nats-TTL"
WRITE_ID = "Tmq-Write"
"""A random id by which a writer recognises its own write after a lost answer."""
NO_STREAM = "Tmq-No-Stream"
"""Header by which the store proxy reports a missing stream."""
ERROR_CODE, ERROR_TEXT = "Nats-Service-Error-Code", "Nats-Service-Error"
RETRY_AFTER = "Retry-After"
STATUS, DESCRIPTION = "Status", "Description"
SEQUENCE = "Nats-Sequence"
_ACK = "$JS.ACK."
NO_RESPONDERS, END_OF_BATCH, NOT_FOUND, FORBIDDEN = "503", "204", "404", "403"


def header(message: Msg, name: str) -> str:
    """Return a header of a message, empty if it is absent."""
    return (message.headers or {}).get(name, "")


def status_of(message: Msg) -> str:
    """Return the status set by the server, empty for another sender's message.

    Senders may also set a header `Status` on a stored message; but then the message arrives with
    its sequence header, or with an acknowledgement subject.
    """
    is_stored = bool(header(message, SEQUENCE)) or message.reply.startswith(_ACK)
    return "" if message.data or is_stored else header(message, STATUS)


def parse_headers(block: bytes) -> tuple[str, dict[str, str]]:
    """Return the status, or empty, and the headers of a message in wire format."""
    first, *lines = block.decode(errors="replace").split("\r\n")
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    status = first.removeprefix("NATS/1.0").strip().split(" ", 1)[0]
    return status, {name.strip(): value.strip() for name, value in pairs}
