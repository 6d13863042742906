"""A secret reaches the one process that it is for, and stands nowhere else."""

import contextlib
import hashlib
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tinkermq.broker.client.rpc import call
from tinkermq.broker.credentials import Seal, close_seal
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.clients import AsyncSchedulerClient
from tinkermq.clients.pool import Pool
from tinkermq.schemas.job import (
    NOTIFY_URL,
    TEACHER_KEY,
    WANDB_KEY,
    JobRecord,
    JobSecrets,
    OpenedSecrets,
    OpenRequest,
    SealedSecrets,
    SealingKey,
    SecretsRequest,
    StopRequest,
)
from tinkermq.schemas.wire.errors import AuthError
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import BUCKET_SECRETS, rpc

from tests.actors.scheduler.conftest import Stack
from tests.support.secrets_on_disk import files_with
from tests.support.waiting import PATIENCE_S, eventually, until

pytestmark = pytest.mark.full

SECRET = "5ec2e7" * 6 + "-of-the-tracker"


def found_in_processes(secret: str) -> list[str]:
    lines: list[str] = []
    for process in Path("/proc").iterdir():
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if secret.encode() in line:
            lines.append(str(process))
    return lines


async def shown(stack: Stack, job: JobRecord, actor: str) -> str:
    """Return the hash of the secret that an actor has, by its own word."""
    stack.do(job, actor, "show")
    path = Path(job.run_dir) / f"{actor}.shown"

    async def text() -> str:
        return path.read_text() if path.exists() else ""

    told = await eventually(text, f"{actor} to show its secret")
    path.unlink()
    return told


async def is_kept(stack: Stack, job: JobRecord) -> bool:
    bucket = Bucket(stack.broker, BUCKET_SECRETS, SealedSecrets)
    return await bucket.get(f"{job.user}.{job.job}") is not None


async def test_the_key_of_a_tracker_reaches_the_learner_alone(stack: Stack, tmp_path: Path) -> None:
    await stack.scheduler()
    await stack.node_process()
    await stack.until_nodes(1)
    pool = Pool(stack.broker)
    job = await pool.submit(stack.request().config, secrets={WANDB_KEY: SECRET})
    job = await stack.until(job, "RUNNING")
    assert job.secrets == [WANDB_KEY]
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    assert await shown(stack, job, "learner") == digest
    assert await shown(stack, job, "generator-0") == "nothing"
    stack.do(job, "learner", "crash")  # a process that is started again needs it, too
    await stack.until(job, lambda now: now.actors[0].restarts == 1)
    assert await shown(stack, job, "learner") == digest
    assert await is_kept(stack, job)
    assert not found_in_processes(SECRET)
    assert not files_with(SECRET, tmp_path)
    assert SECRET not in str(await stack.get(job))
    events = await stack.events(job)
    assert SECRET not in str(events)
    stack.do(job, "learner", "done")
    await stack.until(job, "COMPLETED")

    async def gone() -> bool:
        return not await is_kept(stack, job)

    await eventually(gone, "the secret to be removed")
    assert not files_with(SECRET, tmp_path)


async def test_a_key_in_a_configuration_is_sealed_and_stands_in_no_record(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WANDB_KEY, "that of the environment")
    await stack.scheduler()
    async with AsyncSchedulerClient(url=stack.broker.url) as client:
        told = await client.submit_job({"wandb_key": SECRET, "batch_size": 2})
    job = await Pool(stack.broker).find(told["job_id"])
    assert job.secrets == [WANDB_KEY]
    assert await is_kept(stack, job)
    assert SECRET not in str(job)


async def test_a_node_gets_nothing_for_a_process_that_is_not_the_jobs(stack: Stack) -> None:
    await stack.scheduler()
    await stack.node()
    await stack.until_nodes(1)
    pool = Pool(stack.broker)
    job = await pool.submit(
        stack.request().config,
        secrets={
            WANDB_KEY: SECRET,
            NOTIFY_URL: "json://127.0.0.1:9",
            TEACHER_KEY: "the key of an API",
        },
    )
    job = await stack.until(job, "RUNNING")

    async def opened(actor: str, attempt: int) -> dict[str, str]:
        request = OpenRequest(user="local", job=job.job, actor=actor, attempt=attempt)
        subject = rpc("node", "secrets", "open")
        reply = await call(
            stack.broker, subject, request, OpenedSecrets, timeout_s=PATIENCE_S, waiting_for="it"
        )
        return {str(name): value for name, value in reply.values.items()}

    assert await opened("learner", 1) == {WANDB_KEY: SECRET}
    assert await opened("generator-0", 1) == {TEACHER_KEY: "the key of an API"}
    assert await opened("nobody", 1) == {}
    with pytest.raises(AuthError, match="does not run attempt 2"):
        await opened("learner", 2)
    stack.do(job, "learner", "done")
    await stack.until(job, "COMPLETED")
    with pytest.raises(AuthError, match="does not run attempt 1"):
        await opened("learner", 1)


def test_a_sealed_text_opens_for_its_user_and_its_pool_only() -> None:
    ours, other = Seal(b"1" * 32), Seal(b"2" * 32)
    sealed = close_seal(ours.public, JobSecrets(user="ada", values={WANDB_KEY: SECRET}))
    assert SECRET.encode() not in sealed
    assert ours.open(sealed, "ada").values == {WANDB_KEY: SECRET}
    for seal, user, text in (
        (ours, "eve", sealed),
        (other, "ada", sealed),
        (ours, "ada", sealed[:-1]),
        (ours, "ada", b""),
    ):
        with pytest.raises(AuthError, match="not sealed to this pool's key") as error:
            seal.open(text, user)
        assert SECRET not in str(error.value)


# -- notifications ---------------------------------------------------------------------------------


class Letterbox:
    """An HTTP server that keeps what is posted to it."""

    def __init__(self) -> None:
        self.letters: list[dict[str, str]] = []
        letters = self.letters

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                letters.append(json.loads(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"json://127.0.0.1:{self.server.server_address[1]}/{SECRET}"


@pytest.fixture
def letterbox() -> Iterator[Letterbox]:
    box = Letterbox()
    thread = threading.Thread(target=box.server.serve_forever, daemon=True)
    thread.start()
    yield box
    box.server.shutdown()
    box.server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("do", "said"),
    [("fail", "has failed"), ("done", "has finished")],
)
async def test_the_end_of_a_run_is_told_while_its_client_sleeps(
    stack: Stack, letterbox: Letterbox, tmp_path: Path, do: str, said: str
) -> None:
    await stack.scheduler_process()
    await stack.node()
    await stack.until_nodes(1)
    pool = Pool(stack.broker)
    job = await stack.until(await stack.submit(), "RUNNING")
    assert (await pool.hand_over(job.job, {NOTIFY_URL: letterbox.url})).secrets == [NOTIFY_URL]
    stack.do(job, "learner", do)
    await until(lambda: bool(letterbox.letters), "the notification")
    assert letterbox.letters[0]["title"] == f"{job.name} {said}"

    async def gone() -> bool:
        return not await is_kept(stack, job)

    await eventually(gone, "the URL to be removed")
    assert len(letterbox.letters) == 1
    assert not files_with(SECRET, tmp_path)
    assert not found_in_processes(SECRET)


class SlowServer:
    """Answers one request byte by byte, without an end, until it is released."""

    def __init__(self) -> None:
        self.is_asked, self.is_over, self._released = (threading.Event() for _ in range(3))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"json://127.0.0.1:{self._listening.getsockname()[1]}/{SECRET}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def release(self) -> None:
        self._released.set()
        self._thread.join()

    def _serve(self) -> None:
        with self._listening, self._listening.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            self.is_asked.set()
            with contextlib.suppress(OSError):
                while not self._released.wait(0.05):
                    connection.sendall(b"x")
            self.is_over.set()


@pytest.fixture
def slow_server() -> Iterator[SlowServer]:
    server = SlowServer()
    yield server
    server.release()


async def sealed_for(stack: Stack, user: str, **values: str) -> bytes:
    key = await stack.ask_for("key", Empty(), SealingKey)
    return close_seal(key.public, JobSecrets.model_validate({"user": user, "values": values}))


async def stopped_job(stack: Stack, user: str, url: str) -> JobRecord:
    """Submit a job that tells its end to a URL, and stop it."""
    sealed = await sealed_for(stack, user, TINKERMQ_NOTIFY_URL=url)
    request = stack.request().model_copy(update={"sealed": sealed})
    job = await stack.ask("submit", request, user)
    await stack.ask("stop", StopRequest(job=job.job), user)
    return job


async def test_a_service_that_answers_for_ever_holds_up_no_other_user_and_ends_with_the_scheduler(
    stack: Stack, letterbox: Letterbox, slow_server: SlowServer
) -> None:
    scheduler = await stack.scheduler()
    await stopped_job(stack, "eve", slow_server.url)
    await until(slow_server.is_asked.is_set, "the first notification to be sent")
    job = await stopped_job(stack, "local", letterbox.url)
    await until(lambda: bool(letterbox.letters), "the notification of another user")
    assert letterbox.letters[0]["title"] == f"{job.name} was stopped"
    assert not slow_server.is_over.is_set()
    await scheduler.drain()
    await until(slow_server.is_over.is_set, "what sends to the slow service to end")


async def test_secrets_for_the_next_attempt_outlast_the_notification_of_the_last_one(
    stack: Stack, letterbox: Letterbox, slow_server: SlowServer
) -> None:
    await stack.scheduler()
    job = await stopped_job(stack, "eve", slow_server.url)
    await until(slow_server.is_asked.is_set, "the notification to be sent")
    sealed = await sealed_for(stack, "eve", WANDB_API_KEY=SECRET)
    await stack.ask("secrets", SecretsRequest(job=job.job, sealed=sealed), "eve")
    slow_server.release()
    await stopped_job(stack, "eve", letterbox.url)
    await until(lambda: bool(letterbox.letters), "the next notification of that user")
    assert await is_kept(stack, job)
