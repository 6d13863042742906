"""Reading a stream from any sequence on, live, across restarts of the server.

The position is the reader's own: its consumer is ephemeral, acknowledges nothing, and is made
again from the last sequence that was yielded whenever the connection or the consumer is lost or a
delivery is missing. So a reader yields every stored message once and in order, and what is under
way is bounded in bytes.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import structlog
from nats.aio.msg import Msg
from nats.js.errors import APIError
from nats.js.errors import NotFoundError as NatsNotFound

from ..schemas.errors import BrokerError
from .connection import RETRY_PAUSE_S, Broker, ConnectionLost, NoResponders
from .pull import NS, ConsumerGone, PullInbox
from .stored import StoredMessage, missing

PULL_MESSAGES = 256
PULL_BYTES = 16 * 2**20
_EXPIRES_S = 20.0
_HEARTBEAT_S = 1.0
_SILENCE_S = 3.0
_INACTIVE_S = 30.0
_DEADLINE_S = 60.0

_log = structlog.get_logger()


class StreamReader:
    """Yields the messages of a stream in order, and then new ones as they are stored."""

    def __init__(
        self,
        broker: Broker,
        stream: str,
        subjects: list[str],
        *,
        from_seq: int | None = 1,
        description: str = "",
    ) -> None:
        """`from_seq` is the first sequence to yield; None starts behind the last one."""
        self._broker = broker
        self._stream = stream
        self._subjects = subjects
        self._next_seq = from_seq
        self._description = description or f"Reader {broker.name}"
        self._inbox = PullInbox(broker)
        self._consumer: str | None = None
        self._delivered = 0

    async def messages(self) -> AsyncGenerator[StoredMessage, None]:
        """Iterate for ever; leaving the loop (`aclose`) frees the consumer.

        Raises NotFoundError when the stream is gone, DeadlineError when the server stays away.
        """
        await self._inbox.open()
        try:
            while True:
                try:
                    async for message in self._pull():
                        yield message
                except (ConnectionLost, ConsumerGone, TimeoutError, NoResponders) as error:
                    _log.info("reader_renewed", stream=self._stream, reason=str(error))
                    self._consumer = None
                    await asyncio.sleep(RETRY_PAUSE_S)
        finally:
            await self._close()

    async def start(self) -> None:
        """Fix the position now, so that what is stored from here on is not missed."""
        await self._inbox.open()
        await self._make_consumer()

    async def _pull(self) -> AsyncGenerator[StoredMessage, None]:
        consumer = self._consumer or await self._make_consumer()
        request = {
            "batch": PULL_MESSAGES,
            "max_bytes": PULL_BYTES,
            "expires": int(_EXPIRES_S * NS),
            "idle_heartbeat": int(_HEARTBEAT_S * NS),
        }
        await self._inbox.ask(self._stream, consumer, request)
        for _ in range(PULL_MESSAGES):
            message = await self._inbox.next(_SILENCE_S)
            if message is None:
                return
            stored = self._in_order(message)
            self._next_seq = stored.seq + 1
            yield stored

    def _in_order(self, message: Msg) -> StoredMessage:
        """Read sequence and delivery number from the reply subject, and check that none is lost."""
        tokens = message.reply.split(".")
        # $JS.ACK.<stream>.<consumer>.<deliveries>.<stream seq>.<consumer seq>.<time>.<pending>
        seq, delivered = int(tokens[-4]), int(tokens[-3])
        if delivered != self._delivered + 1:
            raise ConsumerGone(f"delivery {self._delivered + 1} is missing, {delivered} came")
        self._delivered = delivered
        return StoredMessage(message.subject, seq, message.data, message.headers or {})

    async def _make_consumer(self) -> str:
        waiting_for = f"a consumer of {self._stream}"
        try:
            if self._next_seq is None:  # fixed now: a consumer made again must not skip any
                info = await self._ask(f"STREAM.INFO.{self._stream}", {}, waiting_for)
                self._next_seq = int(info["state"]["last_seq"]) + 1
            answer = await self._ask(
                f"CONSUMER.CREATE.{self._stream}",
                {"stream_name": self._stream, "config": self._config(self._next_seq)},
                waiting_for,
            )
        except NatsNotFound as error:
            raise missing(self._stream) from error
        except APIError as error:
            raise BrokerError(
                f"the server refuses a consumer of {self._stream}: {error.description}",
                hint="look at the stream with `nats stream info`",
            ) from error
        self._inbox.forget()
        self._delivered = 0
        self._consumer = str(answer["name"])
        return self._consumer

    def _config(self, seq: int) -> dict[str, Any]:
        subjects: dict[str, Any] = (
            {"filter_subject": self._subjects[0]}
            if len(self._subjects) == 1
            else {"filter_subjects": self._subjects}
        )
        return {
            "description": self._description,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": max(seq, 1),
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(_INACTIVE_S * NS),
            **subjects,
        }

    async def _ask(self, verb: str, request: dict[str, Any], waiting_for: str) -> dict[str, Any]:
        return await self._broker.retry(
            lambda: self._broker.api(verb, request),
            deadline_s=_DEADLINE_S,
            waiting_for=waiting_for,
        )

    async def _close(self) -> None:
        await self._inbox.close()
        if self._consumer is None or not self._broker.is_connected:
            return
        try:
            await self._broker.api(f"CONSUMER.DELETE.{self._stream}.{self._consumer}")
        except (BrokerError, TimeoutError, APIError) as error:
            # harmless: an unused consumer goes by itself
            _log.debug("consumer_left", stream=self._stream, error=str(error))
