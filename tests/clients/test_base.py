"""A client's connection: one for all threads of a process, and one for each event loop."""

import asyncio
import subprocess
import sys

from tinkermq.broker.client.connection import connect
from tinkermq.broker.jetstream.streams import create_shared
from tinkermq.broker.nats_server import NatsServer

from tests.support.waiting import PATIENCE_S

_CONNECTED = """
import json, sys, threading, urllib.request
from tinkermq.clients import SchedulerClient

url, monitor = sys.argv[1:]
client = SchedulerClient(url)
threads = [threading.Thread(target=client.list_jobs) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
with urllib.request.urlopen(f"{monitor}/connz") as reply:
    print(json.load(reply)["num_connections"])
"""

_FORKED = """
import os, sys
from tinkermq.clients import SchedulerClient

with SchedulerClient(sys.argv[1]) as client:
    assert client.list_jobs() == []
    child = os.fork()
    assert client.list_jobs() == []
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

_LOOPS = """
import asyncio, sys
from tinkermq.clients import AsyncSchedulerClient

client = AsyncSchedulerClient(sys.argv[1])
for _ in range(2):
    assert asyncio.run(client.list_jobs()) == []
"""

_CALLED_BACK = """
import concurrent.futures, sys, threading
from tinkermq.clients import SchedulerClient

client, asked = SchedulerClient(sys.argv[1]), concurrent.futures.Future()
main = threading.get_ident()

def call_back(_):
    try:
        asked.set_result(client.list_jobs())
    except Exception as error:
        if threading.get_ident() != main:
            asked.set_exception(error)

while not asked.done():  # a future that is done already calls back at once, in this thread
    client.submit_job_future({"nonsense": 1}).add_done_callback(call_back)
    concurrent.futures.wait([asked], 0.1)
print(asked.exception())
"""


def _make_buckets(server: NatsServer) -> None:
    async def work() -> None:
        async with await connect(server.url, name="test") as broker:
            await create_shared(broker)

    asyncio.run(work())


def _run(program: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_threads_that_share_a_client_share_its_connection(own_server: NatsServer) -> None:
    _make_buckets(own_server)
    assert _run(_CONNECTED, own_server.url, own_server.monitor_url).split() == ["1"]


def test_a_client_goes_on_in_the_child_of_a_fork_and_in_its_parent(own_server: NatsServer) -> None:
    _make_buckets(own_server)
    _run(_FORKED, own_server.url)


def test_an_async_client_opens_a_connection_in_each_event_loop(own_server: NatsServer) -> None:
    _make_buckets(own_server)
    _run(_LOOPS, own_server.url)


def test_a_callback_that_would_wait_for_itself_is_told_so(own_server: NatsServer) -> None:
    assert "would wait for each other" in _run(_CALLED_BACK, own_server.url)
