"""What each step of a run told, to the bit: for one's own evaluation, not for drawing."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ....broker.client.connection import Broker
from ....broker.jetstream.reader import StreamReader
from ....broker.jetstream.stored import get_last
from ....schemas.metric import Metric
from ....schemas.wire.errors import MessageError
from ....schemas.wire.subjects import JobScope
from .charts import finite_values, is_wanted


async def exact_lines(
    broker: Broker, scope: JobScope, names: Sequence[str], first: int, last: int | None
) -> AsyncGenerator[bytes, None]:
    """Yield a line of JSON for each metric message stored by now: step, time and values.

    `names` are names or patterns; none: all. What is not finite is left out. A step that was
    trained again after a resumption stands there twice; the later line counts.
    """
    newest = await get_last(broker, scope.stream_feed, scope.metric)
    if newest is None:
        return
    reader = StreamReader(broker, scope.stream_feed, [scope.metric])
    async with aclosing(reader.messages()) as stored:
        async for message in stored:
            line = _line(message.payload, names, first, last)
            if line:
                yield line
            if message.seq >= newest.seq:
                return


def _line(payload: bytes, names: Sequence[str], first: int, last: int | None) -> bytes:
    try:
        metric = Metric.from_bytes(payload)
    except MessageError:
        return b""
    if metric.step < first or (last is not None and metric.step > last):
        return b""
    values = {
        name: value for name, value in finite_values(metric).items() if is_wanted(name, names)
    }
    told = {"step": metric.step, "time": metric.time, "values": values}
    return json.dumps(told).encode() + b"\n" if values else b""
