"""The whole stack with authentication: `init`, `up`, users with their keys, and a job of each."""

import asyncio
import json
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tinkermq.actors.node.sandbox import FOLDERS_VARIABLE
from tinkermq.actors.storage.access import MODELS_VARIABLE, ROOTS_VARIABLE
from tinkermq.actors.weights.store import WeightStore
from tinkermq.broker.client.connection import Broker, connect
from tinkermq.broker.feed import read_metrics, read_traces
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.clients.base import JobAddress
from tinkermq.clients.home import Home
from tinkermq.clients.hosting.environments import GameEnvironment
from tinkermq.clients.pool import Pool
from tinkermq.envs.games.bandit import BanditGame
from tinkermq.schemas.job import FINAL_STATES, JobRecord
from tinkermq.schemas.wire.errors import BrokerError, NotFoundError
from tinkermq.schemas.wire.subjects import JobScope

from tests.clients.command import Outcome, tinkermq, tinkermq_here
from tests.support.configs import REPOSITORY, UNHURRIED, small_job
from tests.support.games import Snoop
from tests.support.secrets_on_disk import files_with
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.full

AGENT = """
import glob, http.client, json, os, socket, sys
from urllib.parse import urlsplit

url = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.netloc)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "A or B?"}]})
connection.request("POST", url.path + "/chat/completions", body, headers)
assert connection.getresponse().status == 200
found = glob.glob(sys.argv[1]) + [name for name in os.environ if "API_KEY" in name][2:]
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[2]))).close()
    found.append("the broker")
except OSError:
    pass
print(found)
open(os.environ["TINKERMQ_REWARD"], "w").write(str(len(found)))
"""


class Operator:
    """Runs the command line in the folder of one stack."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.agents = home / "agents"
        """What the operator lets hosted code see."""
        self.agents.mkdir(parents=True)
        self.keys: dict[str, str] = {}

    def run(self, *words: str, key: str = "", **env: str) -> Outcome:
        """Run one command as the user with this key.

        In this process, but for the stack's and for games, whose hostile ones fork the process.
        """
        given = {"TINKERMQ_HOME": str(self.home), **env}
        if key:
            given["TINKERMQ_API_KEY"] = self.keys[key]
        run = tinkermq if words[0] in ("up", "down", "env") else tinkermq_here
        return run(*words, env=given)

    def told(self, *words: str, key: str = "", **env: str) -> Any:
        """Run one command and return its JSON."""
        outcome = self.run(*words, "--json", key=key, **env)
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    @property
    def url(self) -> str:
        """The broker of the stack."""
        state = Home(self.home).read_running_stack()
        assert state is not None
        return state.url


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Operator]:
    """A stack with an admin and two users."""
    made = Operator(tmp_path_factory.mktemp("home"))
    told = made.told("init", "--admin", "root")
    made.keys["root"] = told["api_key"]
    try:
        words = ("up", "--port", "0", "--slots", "8", "--json")
        # games of the tests are found there, also by environment hosts in sandboxes
        roots = {ROOTS_VARIABLE: str(tmp_path_factory.getbasetemp())}
        given = {"WANDB_MODE": "offline", "PYTHONPATH": str(REPOSITORY), **roots}
        given[MODELS_VARIABLE] = str(model.parent)
        (made.agents / "agent.py").write_text(AGENT)
        given[FOLDERS_VARIABLE] = str(made.agents)
        up = made.run(*words, key="root", **given)
        assert up.code == 0, up.err
        services = {"broker", "auth", "scheduler", "node", "gateway"}
        assert set(json.loads(up.out)["children"]) == services
        for name in ("ada", "bob"):
            made.keys[name] = made.told("user", "add", name, key="root")["api_key"]
        yield made
    finally:
        assert made.run("down").code == 0


def test_init_writes_secrets_for_the_owner_only_and_not_twice(operator: Operator) -> None:
    folder = operator.home / "secrets"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    again = operator.run("init")
    assert again.code != 0
    assert "holds the secrets of a pool already" in again.err


def test_no_service_keeps_a_key_or_the_place_of_one_in_its_environment(operator: Operator) -> None:
    state = Home(operator.home).read_running_stack()
    assert state is not None
    secret = [operator.keys["root"].encode(), str(operator.home / "secrets").encode()]
    for name, pid in {"supervisor": state.pid, **state.children}.items():
        held = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"TINKERMQ_HOME" in held, name
        assert not [one for one in secret if one in held], name


def test_users_are_managed_on_the_command_line(operator: Operator) -> None:
    users = {one["user"]: one for one in operator.told("user", "list", key="root")}
    assert users["root"]["role"] == "admin"
    assert "key_hash" not in users["ada"]
    assert operator.told("user", "quota", "bob", "--slots", "4", key="root")["max_slots"] == 4
    deadline = time.monotonic() + PATIENCE_S  # the scheduler hears of a quota a moment later
    while "0 of 4 slots, 0 of 64 live runs" not in (shown := operator.run("ps", key="bob").err):
        assert time.monotonic() < deadline, shown
    denied = operator.run("user", "list", key="ada")
    assert denied.code != 0
    assert "may not do this" in denied.err
    told = operator.told("user", "add", "cleo", key="root")
    operator.keys["cleo"] = told["api_key"]
    assert operator.told("ps", key="cleo") == []
    old = operator.keys["cleo"]
    operator.keys["cleo"] = operator.told("user", "rotate", "cleo", key="cleo")["api_key"]
    assert operator.told("ps", key="cleo") == []
    assert operator.run("ps", TINKERMQ_API_KEY=old).code != 0
    assert operator.told("user", "revoke", "cleo", key="root")["revoked"]
    assert operator.run("ps", key="cleo").code != 0
    assert operator.run("ps").code != 0
    audit = operator.told("user", "audit", key="root")
    assert ("cleo", "users.revoke") in {(one["target"], one["what"]) for one in audit}


async def trained(pool: Pool, config: dict[str, Any]) -> JobRecord:
    """Submit a job and wait until it has ended."""
    record = await pool.submit(config)

    async def ended() -> JobRecord | None:
        now = await pool.find(record.job)
        return now if now.state in FINAL_STATES else None

    return await eventually(ended, f"{record.name} to end")


def processes_with(secret: str) -> list[str]:
    """Return the command lines on this machine that hold a secret."""
    lines: list[str] = []
    for process in Path("/proc").iterdir():
        try:
            line = (process / "cmdline").read_bytes().decode(errors="replace")
        except (OSError, ValueError):
            continue
        if secret in line:
            lines.append(line)
    return lines


async def test_programs_of_a_user_see_nothing_of_the_pool(
    operator: Operator, model: Path, tmp_path: Path
) -> None:
    port = urlsplit(operator.url).port
    config = {**small_job(model), "name": "run-agent", "output_dir": str(tmp_path / "runs")}
    config["rollout"] |= {"max_prompt_tokens": 128, "max_response_tokens": 128, "group_size": 2}
    config["training"] = {**config["training"], "num_steps": 1, "batch_size": 2}
    config["env"] = {"num_val": 0}
    words = ["{python}", "-S", "agent.py", str(tmp_path / "runs/*/*/*"), str(port)]
    config["agent"] = {"command": words, "files": str(operator.agents), "timeout_s": 60}
    broker = await connect(operator.url, name="bob", api_key=operator.keys["bob"])
    record = await trained(Pool(broker), config)
    assert record.state == "COMPLETED", record.reason
    metrics = await read_metrics(broker, JobScope("bob", record.job))
    assert {one.values["training_step_reward"] for one in metrics} == {0.0}
    config["agent"]["files"] = str(operator.home)
    refused = await trained(Pool(broker), {**config, "name": "run-refused"})
    assert refused.state == "FAILED"
    assert "agent programs of user 'bob' may not be shown" in refused.reason
    assert "times" not in refused.reason  # it was tried once
    await broker.close()


@pytest.mark.parametrize("own", [False, True], ids=["plain", "ranks and own loss"])
async def test_two_users_train_and_neither_reaches_the_others_job(
    operator: Operator, model: Path, tmp_path: Path, own: bool
) -> None:
    config = {**small_job(model), "output_dir": str(tmp_path / "runs")}
    config["training"] = {**config["training"], "num_steps": 3, "batch_size": 2}
    config["rollout"] = {**config["rollout"], "group_size": 2}
    records: dict[str, JobRecord] = {}
    brokers: dict[str, Broker] = {}
    for name in ("ada", "bob"):
        brokers[name] = await connect(operator.url, name=name, api_key=operator.keys[name])
        pattern = str(tmp_path / "runs" / "*" / "*" / "*")
        snoop = {
            "game": "tests.support.games:Snoop",
            "kwargs": {"pattern": pattern.replace("/", "|")},
        }
        settings = {**config, "name": f"run-{name}-{int(own)}", "env": {**config["env"], **snoop}}
        if own and name == "ada":  # two actors, one of which tells the other what to do
            settings["learner"] = {**config["learner"], "ranks": 2, "slots": 2}
        if own:  # functions of theirs, in sandboxes beside each rank
            settings["algorithm"] = {"own_loss": "tests.support.nosy_loss:nosy"}
        records[name] = await trained(Pool(brokers[name]), settings)
        assert records[name].state == "COMPLETED", records[name].reason
        assert Snoop(**snoop["kwargs"]).step("A").reward > 0
        assert not processes_with(operator.keys[name])
    for name, other in (("ada", "bob"), ("bob", "ada")):
        pool, record = Pool(brokers[name]), records[other]
        mine, theirs = JobScope(name, records[name].job), JobScope(other, record.job)
        listed = await pool.list_jobs(all=True)
        assert {one.user for one in listed} == {name}
        assert records[name].job in {one.job for one in listed}
        metrics = await read_metrics(brokers[name], mine)
        assert metrics[-1].step == 3
        # a game in the pool, which the owner wrote, read nothing of any run and did nothing else
        assert {one.values["training_step_reward"] for one in metrics} == {0.0}
        with pytest.raises(NotFoundError):
            await pool.find(record.job)
        for change in (pool.stop, pool.pause, pool.resume):
            with pytest.raises(NotFoundError):
                await change(record.job)
        assert [one.step for one in await read_traces(brokers[name], mine, 2)] == [2, 3]
        with pytest.raises(BrokerError):
            await read_metrics(brokers[name], theirs)
        with pytest.raises(BrokerError):
            await read_traces(brokers[name], theirs, 2)
        with pytest.raises(BrokerError):
            await RolloutLog(brokers[name], theirs).get(1)
        with pytest.raises(BrokerError):
            await WeightStore(brokers[name], theirs).latest()
        others = [one for node in await pool.nodes() for one in node.actors]
        assert not [one for one in others if one.user not in ("", name)]
    for broker in brokers.values():
        await broker.close()
    for record in records.values():
        assert not [text for text in ("tmq_", "tmqj.") if text in str(record.model_dump())]
    for name, shown in (("root", {"ada", "bob"}), ("ada", {"ada"})):
        listed = operator.told("ps", "--everyone", "--all", key=name)
        assert {row["user"] for row in listed} == shown
    run = records["ada"].name
    assert operator.run("logs", run, key="ada").code == 0
    assert operator.run("rollouts", run, key="ada").code == 0
    assert operator.run("logs", run, key="bob").code != 0
    attached = operator.run("attach", run, key="bob")
    assert (attached.code, f"there is no run '{run}'" in attached.err) == (2, True)
    for key in [*operator.keys.values(), "tmqj."]:
        assert not files_with(key, tmp_path / "runs", operator.home / "logs")


async def test_a_user_hosts_the_game_with_the_own_key(
    operator: Operator, model: Path, tmp_path: Path
) -> None:
    config = small_job(model, env={"hosts": 0}, training={"num_steps": 2})
    async with await connect(operator.url, name="ada", api_key=operator.keys["ada"]) as broker:
        pool = Pool(broker)
        settings = {**config, "output_dir": str(tmp_path), "name": "run-hosted"}
        record = await pool.submit(settings)
        game = GameEnvironment(BanditGame, settings, api_key=operator.keys["ada"])
        address = JobAddress(operator.url, JobScope("ada", record.job))
        await asyncio.to_thread(game.setup, address.server_url)
        try:

            async def ended() -> JobRecord | None:
                now = await pool.find(record.job)
                return now if now.state in FINAL_STATES else None

            done = await eventually(ended, "the job to end")
        finally:
            await asyncio.to_thread(game.cleanup)
    assert done.state == "COMPLETED", done.reason


def test_a_user_serves_follows_and_infers_and_another_reaches_none_of_it(
    operator: Operator, model: Path, tmp_path: Path
) -> None:
    config = {
        **small_job(model, env=UNHURRIED, training={"num_steps": 5000}),
        "output_dir": str(tmp_path / "runs"),
        "name": "live-run",
    }
    file = tmp_path / "job.json"
    file.write_text(json.dumps(config))
    operator.told("train", str(file), "-d", key="ada")
    served = operator.told("serve", "live-run", f"output_dir={tmp_path}", key="ada")
    assert served["state"] == "RUNNING"
    words = ("infer", served["name"], "--game", "bandit", "--max-samples", "4", "--json")
    played = operator.run(*words, key="ada")
    assert played.code == 0, played.err
    lines = [json.loads(line) for line in played.out.splitlines()]
    assert lines[-1]["summary"]["episodes"] == 4
    models = {line["result"]["model"] for line in lines if "result" in line}
    assert all(one.startswith("live-run@") for one in models)
    denied = operator.run(*words, key="bob")
    assert denied.code != 0
    assert "belongs" in denied.err or "no model folder and no run" in denied.err
    assert operator.run("stop", served["name"], "--now", key="ada").code == 0
    stopped = operator.told("stop", "live-run", "--now", key="root", TINKERMQ_AS="ada")
    assert stopped["stopped_by"] == "user root for ada"
    assert operator.run("delete", "live-run", "--yes", key="bob").code != 0
    words = ("delete", "live-run", "--yes")
    while (deleted := operator.run(*words, key="root", TINKERMQ_AS="ada")).code != 0:
        assert "only a run that has ended" in deleted.err, deleted.err
    assert not (tmp_path / "runs" / "ada" / "live-run").exists()
    audit = operator.told("user", "audit", key="root")
    noted = {(one["who"], one["what"], one["target"]) for one in audit}
    assert ("root", "jobs.stop", "ada/live-run") in noted
    assert ("root", "jobs.delete", "ada/live-run") in noted
    assert not {one for one in noted if one[0] == "ada" and one[1].startswith("jobs.")}


def holders(secret: str) -> set[str]:
    """Return the command lines of the processes that have a secret in their environment."""
    found: set[str] = set()
    for process in Path("/proc").iterdir():
        try:
            if secret.encode() in (process / "environ").read_bytes():
                found.add((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


async def test_the_key_of_a_tracker_reaches_the_learner_and_stands_nowhere(
    operator: Operator, model: Path, tmp_path: Path
) -> None:
    secret = secrets.token_hex(20)
    config = {
        **small_job(model, env=UNHURRIED, training={"num_steps": 5000}),
        "output_dir": str(tmp_path / "runs"),
        "logger_backends": ["jsonl", "wandb"],
        "name": "tracked",
    }
    file = tmp_path / "job.json"
    file.write_text(json.dumps(config))
    words = ("train", str(file), "-d", "--json")
    train = await asyncio.to_thread(operator.run, *words, key="ada", WANDB_API_KEY=secret)
    assert train.code == 0, train.err
    async with await connect(operator.url, name="ada", api_key=operator.keys["ada"]) as broker:
        pool = Pool(broker)

        async def trains() -> JobRecord | None:
            now = await pool.find("tracked")
            assert now.state not in FINAL_STATES, now.reason
            return now if now.version > 0 else None

        record = await eventually(trains, "the run to train")
        assert record.secrets == ["WANDB_API_KEY"]
        having = holders(secret)
        assert having
        assert not [line for line in having if "generator" in line or "scheduler" in line]
        assert not processes_with(secret)
        folder = Path(record.run_dir) / "wandb"
        await eventually(lambda: asyncio.to_thread(folder.is_dir), "the folder of wandb")
        await pool.stop(record.job, now=True)

        async def ended() -> bool:
            return (await pool.find("tracked")).state in FINAL_STATES and not holders(secret)

        await eventually(ended, "the run to end")
        assert secret not in str(await pool.find("tracked"))
    assert not files_with(secret, tmp_path, operator.home)


def test_a_broker_for_the_world_needs_authentication(tmp_path: Path) -> None:
    outcome = Operator(tmp_path / "home").run("up", "--host", "0.0.0.0", "--port", "0")
    assert outcome.code != 0
    assert "could be used by anyone" in outcome.err
