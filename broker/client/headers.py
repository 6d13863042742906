"""Headers of messages: their names, the statuses that a server tells by them, and their form."""

from nats.aio.msg import Msg

EXPECTED_SEQ = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_STREAM_SEQ = "Nats-Expected-Last-Sequence"
MESSAGE_ID = "Nats-Msg-Id"
"""Of two messages with one id a stream keeps the first, for some minutes."""
OPERATION = "KV-Operation"
TTL = "Nats-TTL"
WRITE_ID = "Tmq-Write"
"""A random id, by which a writer whose answer was lost recognises its own write."""
NO_STREAM = "Tmq-No-Stream"
"""By which the store proxy says that a stream is not there."""
ERROR_CODE, ERROR_TEXT = "Nats-Service-Error-Code", "Nats-Service-Error"
RETRY_AFTER = "Retry-After"
STATUS, DESCRIPTION = "Status", "Description"
SEQUENCE = "Nats-Sequence"
_ACK = "$JS.ACK."
NO_RESPONDERS, END_OF_BATCH, NOT_FOUND, FORBIDDEN = "503", "204", "404", "403"


def header(message: Msg, name: str) -> str:
    """Return a header of a message, empty if it has none of that name."""
    return (message.headers or {}).get(name, "")


def status_of(message: Msg) -> str:
    """Return the status that the server itself tells, empty for a message of somebody else.

    Whoever stores a message may give it a header `Status`: out of a stream it comes with its
    sequence there, or with what acknowledges it.
    """
    is_stored = bool(header(message, SEQUENCE)) or message.reply.startswith(_ACK)
    return "" if message.data or is_stored else header(message, STATUS)


def parse_headers(block: bytes) -> tuple[str, dict[str, str]]:
    """Return the status, or empty, and the headers of a message as they stand on the wire."""
    first, *lines = block.decode(errors="replace").split("\r\n")
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    status = first.removeprefix("NATS/1.0").strip().split(" ", 1)[0]
    return status, {name.strip(): value.strip() for name, value in pairs}
