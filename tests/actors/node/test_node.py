"""A node does what the last sync wants, and says what is there: files, games, models."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tinkermq.actors.gpus import Gpus, find_gpus
from tinkermq.actors.node.checks import (
    FileChecks,
    ModelChecks,
    check_files_now,
)
from tinkermq.actors.node.children import programs
from tinkermq.actors.node.machine import check_slots, default_name, default_slots, lock_name
from tinkermq.actors.node.node import Node
from tinkermq.actors.policy.model_folder import check_model_is_here
from tinkermq.actors.scheduler.submission.checks import Reader
from tinkermq.actors.storage.access import MODELS_VARIABLE
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.client.rpc import Service, call
from tinkermq.broker.feed import follow
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jetstream.streams import create_shared
from tinkermq.broker.nats_server import NatsServer
from tinkermq.envs.sandbox.shown import code_folders
from tinkermq.schemas.metric import LogLines
from tinkermq.schemas.node import (
    LookQuestion,
    ModelQuestion,
    NodeStatus,
    NodeSync,
    RemoveRun,
    WantedActor,
)
from tinkermq.schemas.wire.errors import (
    ConfigError,
    FencedError,
    MessageError,
    ModelError,
    StateError,
)
from tinkermq.schemas.wire.message import Empty
from tinkermq.schemas.wire.subjects import BUCKET_NODES, JobScope, node, token

from tests.support.hollow_model import hollow_model
from tests.support.hub import served_hub
from tests.support.nvml import Nvml
from tests.support.waiting import AFTER_PATIENCE_S, PATIENCE_S, until

pytestmark = pytest.mark.full

SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
HANGS = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"


class Client:
    """A scheduler's side of one node."""

    def __init__(self, broker: Broker, scope: JobScope, run_dir: Path) -> None:
        self.broker = broker
        self.scope = scope
        self.run_dir = run_dir
        self.texts: dict[str, str] = {}
        self.stopping = asyncio.Event()

    def command(self, wanted: WantedActor) -> list[str]:
        return [sys.executable, "-S", "-c", self.texts.get(wanted.name, SLEEPS)]

    def wanted(self, name: str, **changes: Any) -> WantedActor:
        fields = {"user": self.scope.user, "job": self.scope.job, "role": "generator"}
        return WantedActor.model_validate(
            {**fields, "name": name, "run_dir": str(self.run_dir), **changes}
        )

    async def sync(self, *wanted: WantedActor, epoch: int = 1, kill: bool = False) -> NodeStatus:
        request = NodeSync(
            scheduler="test",
            epoch=epoch,
            actors=list(wanted),
            kill=[self.scope.key] if kill else [],
        )
        return await call(
            self.broker,
            node("box", "sync"),
            request,
            NodeStatus,
            timeout_s=PATIENCE_S,
            waiting_for="the node",
        )

    async def until(
        self, *wanted: WantedActor, that: Callable[[NodeStatus], bool], **more: Any
    ) -> NodeStatus:
        async with asyncio.timeout(PATIENCE_S):
            while not that(status := await self.sync(*wanted, **more)):
                await asyncio.sleep(0.03)
        return status


def states(status: NodeStatus) -> dict[str, str]:
    return {actor.name: actor.state for actor in status.actors}


def all_run(status: NodeStatus) -> bool:
    return {actor.state for actor in status.actors} == {"running"}


@pytest.fixture
async def client(broker: Broker, scope: JobScope, tmp_path: Path) -> AsyncIterator[Client]:
    """A running node `box` and the scheduler's side of it."""
    side = Client(broker, scope, tmp_path)
    async with running_node(side):
        yield side


@contextlib.asynccontextmanager
async def running_node(side: Client, gpus: Gpus | None = None) -> AsyncIterator[None]:
    broker, start = side.broker, programs(side.command)
    box = Node(broker, "box", 4, gpus=gpus, start=start, stop_deadline_s=AFTER_PATIENCE_S)
    service = await Service.start(broker, name="tinkermq-node", description="a node")
    run = asyncio.create_task(box.run(service, side.stopping))
    bucket = Bucket(broker, BUCKET_NODES, NodeStatus)
    async with asyncio.timeout(PATIENCE_S):
        while await bucket.get("box") is None:
            await asyncio.sleep(0.01)
    yield
    side.stopping.set()
    await asyncio.wait_for(run, PATIENCE_S)
    await service.stop(0)
    assert await bucket.get("box") is None


async def test_missing_actors_are_started_and_asking_again_changes_nothing(
    client: Client,
) -> None:
    both = (client.wanted("a"), client.wanted("b"))
    first = await client.until(*both, that=all_run)
    assert first.slots == 4
    again = await client.sync(*both)
    assert {one.name: one.pid for one in again.actors} == {
        one.name: one.pid for one in first.actors
    }


async def test_an_actor_on_a_gpu_that_the_node_has_no_more_fails_and_the_others_run(
    broker: Broker, scope: JobScope, tmp_path: Path
) -> None:
    """A node whose GPU is lost is started again without it, before anybody misses it."""
    side = Client(broker, scope, tmp_path)
    async with running_node(side, find_gpus("0,1", Nvml)):
        both = side.wanted("a", devices=[2], slots=1), side.wanted("b", devices=[1], slots=1)
        status = await side.until(
            *both, that=lambda now: states(now) == {"a": "failed", "b": "running"}
        )
    assert "slot 2 of node box was given to it, and the node has 2 GPUs" in status.actors[0].error


async def test_actors_no_longer_wanted_are_stopped_and_forgotten(client: Client) -> None:
    first = await client.until(client.wanted("a"), client.wanted("b"), that=all_run)
    left = await client.until(client.wanted("b"), that=lambda now: set(states(now)) == {"b"})
    assert left.actors[0].pid == next(one.pid for one in first.actors if one.name == "b")


async def test_an_actor_that_is_done_is_not_started_again(client: Client) -> None:
    client.texts["a"] = "print('done')"
    status = await client.until(client.wanted("a"), that=lambda now: states(now) == {"a": "exited"})
    assert (status.actors[0].slots, status.actors[0].exit_code) == (0, 0)
    await asyncio.sleep(0.1)
    assert states(await client.sync(client.wanted("a"))) == {"a": "exited"}


async def test_a_higher_attempt_starts_it_again(client: Client) -> None:
    client.texts["a"] = "raise SystemExit(2)"
    await client.until(client.wanted("a"), that=lambda now: states(now) == {"a": "failed"})
    client.texts["a"] = SLEEPS
    status = await client.until(client.wanted("a", attempt=2), that=all_run)
    assert status.actors[0].attempt == 2


async def test_a_higher_attempt_ends_a_running_one_first(client: Client) -> None:
    first = await client.until(client.wanted("a"), that=all_run)
    second = await client.until(
        client.wanted("a", attempt=2),
        that=lambda now: all_run(now) and now.actors[0].attempt == 2,
    )
    assert first.actors[0].pid != second.actors[0].pid


async def test_an_actor_that_is_wanted_again_while_it_drains_starts_anew(client: Client) -> None:
    first = await client.until(client.wanted("a"), that=all_run)
    await client.sync()
    second = await client.until(
        client.wanted("a"),
        that=lambda now: all_run(now) and now.actors[0].pid != first.actors[0].pid,
    )
    assert states(second) == {"a": "running"}


async def test_the_end_of_an_actor_that_the_node_stopped_is_not_the_actors_own(
    client: Client, tmp_path: Path
) -> None:
    up = tmp_path / "up"
    client.texts["a"] = HANGS.replace("print(", f"open({str(up)!r}, 'w'); print(")
    await client.until(client.wanted("a"), that=all_run)
    await until(up.exists, "the actor to ignore SIGTERM")
    await client.sync()
    status = await client.sync(client.wanted("a"))
    assert states(status) == {"a": "restarting"}
    assert status.actors[0].slots == 1
    await client.until(that=lambda now: not now.actors, kill=True)


async def test_a_killed_job_does_not_wait_for_draining(client: Client) -> None:
    client.texts["a"] = HANGS
    await client.until(client.wanted("a"), that=all_run)
    async with asyncio.timeout(PATIENCE_S):
        await client.until(that=lambda now: not now.actors, kill=True)


async def test_a_scheduler_that_was_replaced_is_refused(client: Client) -> None:
    await client.sync(client.wanted("a"), epoch=5)
    with pytest.raises(FencedError, match="has been replaced"):
        await client.sync(epoch=4)
    assert set(states(await client.sync(client.wanted("a"), epoch=5))) == {"a"}


async def test_lines_of_actors_are_published_for_clients(client: Client) -> None:
    client.texts["a"] = "print('one'); print('two')"
    await client.sync(client.wanted("a", attempt=3))
    lines: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        async for told in follow(client.broker, client.scope, kinds={"log"}):
            assert isinstance(told, LogLines)
            assert (told.actor, told.attempt) == ("a", 3)
            lines += told.lines
            if len(lines) >= 2:
                break
    assert lines == ["one", "two"]


async def test_a_second_node_of_the_same_name_is_refused(client: Client, broker: Broker) -> None:
    service = await Service.start(broker, name="tinkermq-node", description="another node")
    with pytest.raises(StateError, match="a node named 'box' runs already on host"):
        await Node(broker, "box", 4).run(service, asyncio.Event())
    await service.stop(0)


async def test_a_node_that_drains_starts_nothing_more(client: Client, tmp_path: Path) -> None:
    client.texts["a"] = (
        "import os, pathlib, signal, time\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "def wait(*_):\n"
        "    (here / 'asked').touch()\n"
        "    while not (here / 'go').exists(): time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, wait)\n"
        "(here / 'up').touch()\n"
        "time.sleep(600)"
    )
    await client.until(client.wanted("a"), that=all_run)
    await until((tmp_path / "up").exists, "the actor to be up")
    client.stopping.set()
    await until((tmp_path / "asked").exists, "the actor to be asked to end")
    status = await client.sync(client.wanted("a"), client.wanted("b"))
    assert states(status) == {"a": "restarting"}
    (tmp_path / "go").touch()


def test_a_name_is_locked_on_one_machine_for_one_broker() -> None:
    url = "nats://127.0.0.1:1"
    with (
        lock_name("locked", url),
        pytest.raises(StateError, match="runs already on this machine"),
        lock_name("locked", url),
    ):
        pass
    with lock_name("locked", url), lock_name("locked", "nats://127.0.0.1:2"):
        pass


def test_a_machine_has_a_name_and_at_least_two_slots() -> None:
    assert token(default_name(), what="node") == default_name()
    assert default_slots() >= 2


@pytest.mark.parametrize("slots", [0, -1])
async def test_a_node_that_has_nothing_to_give_is_refused_at_its_start(
    broker: Broker, slots: int
) -> None:
    command = ("-m", "tinkermq.actors.node", "--nats", broker.url, "--slots", str(slots))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 2
    assert f"--slots {slots} leaves a node without anything to give away" in said.decode()


def test_a_node_gives_away_gpus_or_cpu_shares() -> None:
    check_slots(None, None)
    check_slots(4, None)
    check_slots(None, "0,1")
    with pytest.raises(ConfigError, match="one or the other"):
        check_slots(4, "0,1")


async def test_a_wanted_actor_whose_name_is_a_path_is_refused_and_the_node_goes_on(
    client: Client,
) -> None:
    for wrong in ({"name": "../../escaped"}, {"user": "A b"}, {"job": "*"}):
        strange = client.wanted("a").model_copy(update=wrong)
        with pytest.raises(MessageError):
            await client.sync(strange)
    await client.until(client.wanted("a"), that=all_run)


async def test_the_folder_of_a_deleted_job_is_removed_unless_the_job_still_runs(
    client: Client,
) -> None:
    folder = client.run_dir / "runs" / "mine"
    await client.until(client.wanted("a", run_dir=str(folder)), that=all_run)
    request = RemoveRun(user=client.scope.user, job=client.scope.job, run_dir=str(folder))

    async def remove() -> None:
        subject = node("box", "remove")
        await call(
            client.broker, subject, request, Empty, timeout_s=PATIENCE_S, waiting_for="the node"
        )

    with pytest.raises(StateError, match="still has actors"):
        await remove()
    (folder / "checkpoints").mkdir(parents=True)
    await client.until(that=lambda status: not status.actors, kill=True)
    await remove()
    await remove()
    assert [path.name for path in folder.parent.iterdir()] == []


async def test_a_node_tells_that_the_broker_came_back_empty(tmp_path: Path) -> None:
    """And not that it was only away."""
    folder = tmp_path / "nats"
    with NatsServer(folder) as server:
        async with await connect(server.url, name="node") as broker:
            await create_shared(broker)
            side = Client(broker, JobScope("ada", "j1"), tmp_path)
            box = Node(broker, "box", 4, start=programs(side.command))
            async with await Service.start(broker, name="n", description="a node") as service:
                run = asyncio.create_task(box.run(service, side.stopping))
                await until(lambda: box.store_seen, "a first look")
                is_back = asyncio.Event()
                broker.on_reconnect(is_back.set)  # after the node, which has to look again
                server.restart()
                await asyncio.wait_for(is_back.wait(), PATIENCE_S)
                await until(lambda: box.store_seen, "another look")
                assert box.status().store_lost is None
                server.stop()
                await asyncio.to_thread(shutil.rmtree, folder / "jetstream")
                server.start()
                await create_shared(broker)
                await until(lambda: box.status().store_lost is not None, "the loss to be told")
                side.stopping.set()
                await asyncio.wait_for(run, PATIENCE_S)


# A node says whether files and a game are there, which runs nothing of the game, and plays it.


async def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    there, gone = tmp_path / "rows.jsonl", tmp_path / "gone.jsonl"
    there.write_text("{}\n")
    question = LookQuestion(files=[str(there), str(gone), str(tmp_path)])
    [result] = (await FileChecks().answer(question)).results
    assert (result.name, result.ok, result.code) == ("data", False, "data")
    assert result.detail == f"there is no file {gone}, {tmp_path}"


def test_a_game_is_found_by_its_name_or_its_package() -> None:
    [known] = check_files_now(LookQuestion(game="bandit")).results
    assert known.detail.startswith("tinkermq.envs.games.bandit:BanditGame: its package is there")
    [unknown] = check_files_now(LookQuestion(game="bandti")).results
    assert (unknown.ok, "did you mean bandit?" in unknown.hint) == (False, True)
    [missing] = check_files_now(LookQuestion(game="no_such_package.games:Game")).results
    assert missing.detail.startswith("there is no module 'no_such_package'")


def test_no_code_of_a_game_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "harmful_game").mkdir()
    for name in ("__init__", "game"):
        (tmp_path / "harmful_game" / f"{name}.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    target = "harmful_game.game:Game"
    [found] = check_files_now(LookQuestion(game=target)).results
    assert found.ok
    assert found.detail.startswith(f"{target}: ")


def test_code_that_its_sandbox_would_not_show_is_refused_before_a_run_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package beside the node, one on a user's path, and one that a link brings in."""
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    for folder in (shown, hidden):
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)
    (hidden / "alone_game.py").touch()
    (hidden / "linked_game").mkdir()
    (shown / "linked_game").symlink_to(hidden / "linked_game")
    (shown / "seen_game").mkdir()
    for name in ("alone_game", "linked_game"):
        for question in (LookQuestion(game=f"{name}:G"), LookQuestion(functions=[f"{name}:f"])):
            [result] = check_files_now(question, [shown]).results
            assert (result.ok, result.code) == (False, "game")
            assert f"{hidden / name}" in result.detail
            assert "TINKERMQ_GAME_FOLDERS" in result.hint
            assert check_files_now(question).results[0].ok  # a pool without users
    assert check_files_now(LookQuestion(game="seen_game:G"), [shown]).results[0].ok
    assert check_files_now(LookQuestion(game="bandit"), code_folders()).results[0].ok


# -- Whether a node can have a model: folders, names of the hub, a hub that does not answer --------


_ASK = """
import sys
from tinkermq.actors.policy.model_folder import check_model_is_here
from tinkermq.schemas.wire.errors import ModelError
for model in sys.argv[1:]:
    try:
        check_model_is_here(model)
        print("there")
    except ModelError as error:
        print(error.message, "|", error.hint)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""


def ask(tmp_path: Path, *models: str, **environment: str) -> list[str]:
    """Ask for models in a process of its own, since the hub's settings are read once."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK, *models],
        env={**os.environ, "HF_HOME": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout.splitlines()


def test_hub_offline_mode_and_folders_are_told_apart(tmp_path: Path) -> None:
    with served_hub() as hub:
        here, nowhere, gated = ask(tmp_path, "lab/here", "nowhere/model", "lab/gated", **hub)
        assert here == "there"
        assert "the hub has no such model" in nowhere
        assert "gated on the hub" in gated
        assert "offline mode" in ask(tmp_path, "lab/here", **hub | {"HF_HUB_OFFLINE": "1"})[0]
    unreachable, gone = ask(tmp_path, "lab/here", str(tmp_path / "gone"), **hub)
    assert "the hub cannot be reached" in unreachable
    assert "there is no model folder" in gone


async def test_a_node_answers_with_what_is_missing_and_what_to_do(tmp_path: Path) -> None:
    lookout = ModelChecks()
    there = await lookout.answer(ModelQuestion(model=hollow_model()))
    assert [result.ok for result in there.results] == [True]
    (tmp_path / "config.json").write_text("{}")
    [result] = (await lookout.answer(ModelQuestion(model=str(tmp_path)))).results
    assert "model.safetensors is missing" in result.detail
    assert "safetensors" in result.hint


async def test_more_questions_than_a_node_looks_into_are_left_open(tmp_path: Path) -> None:
    lookout = ModelChecks()
    asked = [ModelQuestion(model=str(tmp_path / str(number))) for number in range(40)]
    answers = await asyncio.gather(*map(lookout.answer, asked))
    assert {one.done for one in answers} == {True, False}
    assert (await lookout.answer(asked[0])).done


async def test_models_on_a_disk_that_hangs_take_no_thread_from_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the weights does not return, as on such a disk."""
    shutil.copy(Path(hollow_model()) / "config.json", tmp_path)
    weights, answers_again = tmp_path / "model.safetensors", threading.Event()
    weights.touch()
    is_file = Path.is_file

    def look(path: Path, **options: bool) -> bool:
        if path == weights:
            answers_again.wait()
        return is_file(path, **options)

    monkeypatch.setattr(Path, "is_file", look)
    lookout = ModelChecks()
    question = ModelQuestion(model=str(tmp_path))
    asking = [asyncio.create_task(lookout.answer(question)) for _ in range(40)]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not any(one.done() for one in asking):
                await asyncio.sleep(0.01)
            await asyncio.to_thread(sorted, [2, 1])  # as what starts an actor does
            other = ModelQuestion(model=hollow_model(), user="bob")
            assert (await lookout.answer(other)).done, "another user's look is not held up"
    finally:
        answers_again.set()
        answers = await asyncio.gather(*asking)
    assert False in {one.done for one in answers}


def test_a_pipe_in_place_of_weights_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    shutil.copy(Path(hollow_model()) / "config.json", tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="is damaged or cut: it is not a file"):
        check_model_is_here(str(tmp_path))


def test_an_adapter_is_here_if_its_base_is(tmp_path: Path) -> None:
    base = '{"base_model_name_or_path": "%s", "peft_type": "LORA", "r": 8}'
    (tmp_path / "adapter_config.json").write_text(base % (tmp_path / "gone"))
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ModelError, match="there is no model folder"):
        check_model_is_here(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(base % hollow_model())
    check_model_is_here(str(tmp_path))


@pytest.fixture
def places(tmp_path: Path) -> Path:
    """A folder with whatever may lie where somebody looks for a model."""
    for name in ("empty", "half", "adapter", "locked", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("secret")
    (tmp_path / "half/config.json").write_text("{}")
    (tmp_path / "adapter/adapter_config.json").write_text('{"base_model_name_or_path": "/secret"}')
    (tmp_path / "broken/adapter_config.json").write_text("{")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "odd\udcff").mkdir()
    (tmp_path / "locked").chmod(0)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *(
            "nothing",
            "empty",
            "half",
            "file",
            "adapter",
            "broken",
            "locked",
            "locked/inner",
            "link",
        ),
        *("dangling", "loop", "file/inner", "empty/../file", "x" * 300, "y/" * 2200, "a\0b"),
    ],
)
async def test_whoever_may_not_know_is_told_the_same_of_everything_but_models(
    places: Path, name: str
) -> None:
    path = f"{places}/{name}"[:4096]
    [answer] = (await ModelChecks().answer(ModelQuestion(model=path, alike=True))).results
    nowhere = f"{places}/nowhere"
    [other] = (await ModelChecks().answer(ModelQuestion(model=nowhere, alike=True))).results
    detail = answer.detail.replace(path, "PATH")
    assert answer.model_copy(update={"detail": detail}) == other.model_copy(
        update={"detail": other.detail.replace(nowhere, "PATH")}
    )


async def test_whoever_may_not_know_is_still_told_of_models() -> None:
    answer = await ModelChecks().answer(ModelQuestion(model=hollow_model(), alike=True))
    assert [result.ok for result in answer.results] == [True]


def test_users_may_know_of_their_runs_and_of_the_operators_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODELS_VARIABLE, str(tmp_path / "models"))
    (tmp_path / "runs/ada").mkdir(parents=True)
    (tmp_path / "runs/ada/link").symlink_to(tmp_path / "secrets")
    ada = Reader("ada", [tmp_path / "runs/ada"], [tmp_path / "runs"])
    known = {name: ada.may_know(f"{tmp_path}/{name}") for name in _PLACES}
    assert known == _PLACES
    assert Reader("root", [], []).may_know(f"{tmp_path}/secrets")


_PLACES = {
    "models/m": True,
    "runs/ada/r/checkpoints/step_000001": True,
    "runs/ada/link": False,
    "runs/ben/ada/checkpoints/step_000001": False,
    "runs/bob/r": False,
    "runs": False,
    "secrets": False,
    "models/../secrets": False,
    "": False,
}
