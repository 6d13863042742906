"""`ps`, `logs`, `rollouts`, `eval`, `pool` and `doctor` show what the broker holds."""

import asyncio
import json
import re
import signal
import threading
import time
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import (
    publish_dead,
    publish_log,
    publish_metric,
    publish_trace,
    read_traces,
)
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.kept_rollouts import RunRollouts
from tinkermq.broker.presence import PresenceBeat
from tinkermq.broker.rollouts import BatchLog, RolloutLog
from tinkermq.clients.cli.doctor import (
    _rows,
    _summary,
    check_nodes,
    clock_differences,
    package_differences,
)
from tinkermq.clients.cli.inspection import send_spans
from tinkermq.clients.cli.runs import _describe_failure, _describe_reason
from tinkermq.clients.export import SCHEMA, write_parquet
from tinkermq.clients.run_records import EpisodeFilter, read_steps
from tinkermq.schemas.checks import CheckResult
from tinkermq.schemas.job import ActorPlacement, JobRecord
from tinkermq.schemas.machines import MachineList, MachineStatus
from tinkermq.schemas.metric import EvalRecord, LogLines, Metric, Presence
from tinkermq.schemas.node import ActorStatus, NodeStatus
from tinkermq.schemas.profile import Span, spans_of
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.task import BatchRecord, Blame, DeadLetter, Task
from tinkermq.schemas.wire.errors import BrokerError, ConfigError
from tinkermq.schemas.wire.subjects import BUCKET_EVALS, JobScope
from tinkermq.schemas.wire.trace import GroupTrace, StepTrace, new_trace, span_of, trace_of

from tests.clients.command import Outcome, command
from tests.clients.conftest import Cli, new_record
from tests.clients.test_transcripts import TRANSCRIPTS
from tests.support.groups import make_group, make_trajectory
from tests.support.snapshots import assert_transcript
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.full


async def aside(cli: Cli, *words: str) -> Outcome:
    """Run a command in a thread: it has a loop of its own, as in its own process."""
    return await asyncio.to_thread(cli, *words)


@pytest.fixture
async def run(broker: Broker, scope: JobScope) -> JobRecord:
    """A run of two actors with one step trained, one task given up and one episode retried."""
    actors = [
        ActorPlacement(name="learner", role="learner", node="n", restarts=1),
        ActorPlacement(name="generator-0", role="generator", node="n"),
    ]
    record = await JobStore(broker).create(
        new_record(scope, actors=actors, has_streams=True), "test"
    )
    values = {"training_step_reward": 0.5, "perf/throughput": 1234.0, "training/total_steps": 3.0}
    await publish_metric(broker, scope, Metric(step=1, values=values, time=time.time()))
    for actor in ("learner", "generator-0"):
        entry = {"event": "step_done", "level": "info", "timestamp": "2026-01-01T10:11:12Z"}
        line = json.dumps(entry)
        lines = LogLines(actor=actor, attempt=1, lines=[line, "a bare line"], time=time.time())
        await publish_log(broker, scope, lines)
    log = RolloutLog(broker, scope)
    failure = Blame(boundary="environment", code="game", message="the game hung")
    for number, reward in enumerate((0.25, 1.0)):
        said = [{"role": "user", "content": "7*8"}, {"role": "assistant", "content": f"[{number}]"}]
        episode = make_trajectory(
            [1, 2],
            [([3, 4], [])],
            [reward],
            messages=said,
            failures=[failure] if number else [],
            num_tries=1 + number,
            finish_reasons=["length" if number else "stop"],
        )
        await log.append(make_group([episode], number))
    given_up = Task(task=2, seed=0, group_size=1, tries=2)
    await log.append(Group(task=given_up, error=failure, source="generator-0"))
    letter = DeadLetter(
        task=given_up, blame=failure, num_attempts=3, source="generator-0", time=1.0
    )
    await publish_dead(broker, scope, letter)
    first = BatchRecord(
        step=1, seqs=[1], tasks=[0], seed=0, digest="d", learner="l", time=time.time()
    )
    await BatchLog(broker, scope).append(first, 0)
    return record


async def test_a_runs_episodes_are_written_as_parquet(
    broker: Broker, run: JobRecord, cli: Cli, tmp_path: Path
) -> None:
    file = tmp_path / "new" / "run.parquet"
    words = ("rollouts", run.name, "--to", str(file), "--nats-url", broker.url)
    told = await aside(cli, *words, "--json")
    assert json.loads(told.out) == {"file": str(file), "episodes": 3}, told.err
    whole = pq.read_table(file)
    there = await RunRollouts.open(broker, run.scope, run.run_dir)
    steps = await read_steps(broker, run.scope, there)
    assert await write_parquet(there, steps, EpisodeFilter(), file, rows_per_group=2) == 3
    read = pq.ParquetFile(file)
    assert (read.num_row_groups, read.schema_arrow) == (2, SCHEMA)
    assert read.read() == whole
    first, second, failed = read.read().to_pylist()
    assert (first["seq"], first["task"], first["step"], first["reward"]) == (1, 0, 1, 0.25)
    assert first["token_ids"] == [1, 2, 3, 4]
    assert (first["mask"], first["versions"]) == ([0, 0, 1, 1], [-1, -1, 0, 0])
    assert first["logprobs"] == [0.0, 0.0, -1.0, -1.0]
    assert first["messages"][1] == {"role": "assistant", "content": "[0]", "tool_calls": None}
    assert (second["step"], second["tries"], second["failures"][0]["code"]) == (None, 2, "game")
    assert failed["error"]["message"] == "the game hung"
    assert (failed["reward"], failed["token_ids"], failed["messages"]) == (None, None, None)
    assert (await aside(cli, *words, "--step", "1", "--errors")).code == 0
    assert pq.ParquetFile(file).metadata.num_rows == 0
    refused = await aside(cli, "rollouts", run.name, "--to", "x.csv", "--nats-url", broker.url)
    assert "x.csv does not end in .parquet" in refused.err
    assert [path.name for path in file.parent.iterdir()] == ["run.parquet"]


async def test_ps_names_the_game_that_is_missing_and_since_when(
    broker: Broker, run: JobRecord, cli: Cli
) -> None:
    waits = Presence(
        actor="generator-0",
        role="generator",
        host="h",
        pid=1,
        state="working",
        waits_for="a host of bandit (env-ada was the last one, and has ended)",
        missing_since=time.time() - 300,
        time=time.time(),
    )
    async with PresenceBeat(broker, f"{run.scope.key}.generator-0", lambda: waits):
        told = await aside(cli, "ps", "--json", "--nats-url", broker.url)
    row = next(one for one in json.loads(told.out) if one["job"] == run.job)
    assert row["missing"].startswith("generator-0 waits for a host of bandit (env-ada was the last")
    assert "for 5m" in row["missing"]


async def test_ps_shows_state_step_reward_and_restarts(
    broker: Broker, run: JobRecord, cli: Cli
) -> None:
    outcome = await aside(cli, "ps", "--json", "--nats-url", broker.url)
    row = next(row for row in json.loads(outcome.out) if row["job"] == run.job)
    assert row["state"] == "RUNNING"
    assert (row["step"], row["total_steps"], row["reward"]) == (1, 3.0, 0.5)
    assert (row["tokens_per_s"], row["slots"], row["restarts"]) == (1234.0, 2, 1)
    shown = await aside(cli, "ps", "--nats-url", broker.url)
    assert "no scheduler answers: your quota is unknown" in shown.err
    text = shown.out
    assert f"{run.name}  RUNNING  1/3" in " ".join(text.split("\n")).replace("   ", "  ")


@pytest.mark.parametrize("state", ["working", "waiting", "draining"])
async def test_ps_tells_a_scheduler_that_is_slow_from_none(
    broker: Broker, run: JobRecord, cli: Cli, state: str
) -> None:
    lives = Presence(
        actor="scheduler-7", role="scheduler", host="a", pid=1, state=state, time=time.time()
    )
    async with PresenceBeat(broker, "pool.scheduler-7", lambda: lives):
        shown = await aside(cli, "ps", "--nats-url", broker.url)
    assert "no scheduler answers" not in shown.err
    assert "scheduler-7 is alive and has not answered within" in " ".join(shown.err.split())


async def test_ps_hides_runs_that_have_ended_unless_asked(
    broker: Broker, run: JobRecord, cli: Cli
) -> None:
    await JobStore(broker).transition(run, "COMPLETED", "done", "test")
    assert run.name not in (await aside(cli, "ps", "--nats-url", broker.url)).out
    assert run.name in (await aside(cli, "ps", "-a", "--nats-url", broker.url)).out


async def test_commands_show_of_a_run_what_they_showed_when_it_was_last_read(
    broker: Broker, run: JobRecord, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    def answer(line: str) -> str:
        outcome = cli(*line.replace("my-run", run.name).split(), "--nats-url", broker.url)
        code = f"[exit code {outcome.code}]\n" if outcome.code else ""
        told = f"{outcome.out}{outcome.err}{code}".replace(run.name, "my-run")
        return re.sub(r'"time": [0-9.]+', '"time": …', told)

    await asyncio.to_thread(assert_transcript, TRANSCRIPTS / "run.txt", answer)


async def test_logs_go_on_with_new_lines_until_control_c(
    broker: Broker, scope: JobScope, run: JobRecord
) -> None:
    words = command(["logs", run.name, "-f", "--actor", "learner", "--nats-url", broker.url])
    process = await asyncio.create_subprocess_exec(*words, stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        seen = [await process.stdout.readline() for _ in range(2)]
        late = LogLines(actor="learner", attempt=1, lines=["a late line"], time=time.time())
        await publish_log(broker, scope, late)
        seen.append(await process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, errors = await process.communicate()
    assert seen[1:] == [b"learner | a bare line\n", b"learner | a late line\n"]
    assert (process.returncode, rest, errors) == (130, b"", b"")


async def test_the_cost_of_runs_is_told_by_role(broker: Broker, scope: JobScope, cli: Cli) -> None:
    used = {"learner": 7200.0, "generator": 1800.0}
    ended = new_record(scope, state="COMPLETED", slot_s=used)
    record = await JobStore(broker).create(ended, "test")
    words = ("cost", record.name, "--nats-url", broker.url)
    (told,) = json.loads((await aside(cli, *words, "--json")).out)
    assert told["slot_hours"] == {"learner": 2.0, "generator": 0.5}
    assert (told["total"], told["slots"]) == (2.5, 0)
    header, row = (await aside(cli, *words)).out.splitlines()
    assert header.split() == ["run", "state", "generator", "learner", "slot-hours", "slots", "now"]
    assert row.split() == [record.name, "COMPLETED", "0.50", "2.00", "2.50", "0"]


def _trace(step: int, wait_s: float) -> StepTrace:
    """A step whose last group was 6 s at the engine and 4 s in its game before it was trained."""
    group = GroupTrace(
        task=step,
        traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        source="generator-0",
        issued=80.0,
        arrived=100.0,
        weights_s=0.0,
        rollout_s=10.0,
        generate_s=6.0,
        environment_s=4.0,
        answer_s=1.25,
    )
    return StepTrace(
        step=step,
        traceparent=new_trace(),
        formed=100.0,
        ended=102.0,
        learner={"wait": wait_s, "train": 2.0},
        generators={"generator-0": {"generate": 3.0, "tasks": 1.0}},
        hosts={"env-a": {"full": 3.0, "idle": 1.0}},
        num_groups=1,
        groups=[group],
    )


async def test_a_profile_tells_who_waited_for_whom_and_what_to_change(
    broker: Broker, scope: JobScope, run: JobRecord, cli: Cli, tmp_path: Path
) -> None:
    words = ("profile", run.name, "--nats-url", broker.url)
    assert "has no traces: none of its steps is over" in (await aside(cli, *words)).err
    for step, wait_s in ((1, 90.0), (2, 2.0), (3, 2.0)):
        await publish_trace(broker, scope, _trace(step, wait_s))

    async def stored() -> bool:
        return len(await read_traces(broker, scope, 9)) == 3

    await eventually(stored, "the traces to be stored")
    shown = await aside(cli, *words, "--steps", "2")
    assert [" ".join(line.split()) for line in shown.out.splitlines()] == [
        "2 steps in 8 s",
        "",
        "actor busy of it waits for",
        "learner 50% train 50% generation 30%, games 20%",
        "generator-0 75% generation 75% tasks 25%",
        "env-a 75% all workers 75% actions 25%",
        "",
        "games answered after p50 1.25 s, p95 1.25 s",
        "",
        "step 2, of median length, took 4 s:",
        "it waited for task 2 of generator-0",
        "generate 1.2 s 30%",
        "environment 800 ms 20%",
        "train 2 s 50%",
        "trace 4bf92f3577b34da6a3ce929d0e0e4736",
        "",
        "- the learner waited 50% of the time for rollouts, mostly for generation, and generators "
        "were held back 25% of the time by the staleness bound: add generators, or raise "
        "training.max_staleness",
        f"change: tinkermq scale {run.name} generators=N, training.max_staleness",
    ]
    told = json.loads((await aside(cli, *words, "--json")).out)
    assert (told["run"], told["num_steps"], told["wall_s"]) == (run.name, 3, 100.0)
    shares = {"queue": 0.1, "generate": 0.084, "environment": 0.056, "other": 0.7}
    assert told["waited_for"] == pytest.approx(shares)
    wrong = await aside(cli, *words, "--torch-profiler", "--steps", "33")
    assert (wrong.code, "ask for 1 to 32" in wrong.err) == (2, True)
    both = await aside(cli, *words, "--torch-profiler", "--otlp", "http://127.0.0.1:1")
    assert (both.code, "give one of them at a time" in both.err) == (2, True)
    asked = await aside(cli, *words, "--torch-profiler")
    assert (asked.code, "the learner's next steps" in asked.err) == (2, True)
    timeline = tmp_path / "steps.json"
    assert (await aside(cli, *words, "--to", str(timeline))).code == 0
    events = json.loads(timeline.read_text())["traceEvents"]
    assert [one["args"]["tinkermq.step"] for one in events if one["name"] == "step"] == [1, 2, 3]
    absent = await aside(cli, *words, "--to", str(tmp_path / "no" / "steps.json"))
    assert (absent.code, "cannot be written: No such file" in absent.err) == (1, True)


async def test_an_ended_run_is_advised_no_scaling(
    broker: Broker, scope: JobScope, run: JobRecord, cli: Cli
) -> None:
    await publish_trace(broker, scope, _trace(1, 2.0))
    await JobStore(broker).transition(run, "COMPLETED", "done", "test")

    async def stored() -> bool:
        return len(await read_traces(broker, scope, 9)) == 1

    await eventually(stored, "the trace to be stored")
    shown = await aside(cli, "profile", run.name, "--nats-url", broker.url)
    assert shown.out.splitlines()[-1] == "  change: generator.count, training.max_staleness"


async def test_an_actor_that_was_scaled_away_has_its_logs(
    broker: Broker, scope: JobScope, run: JobRecord, cli: Cli
) -> None:
    lines = LogLines(actor="generator-7", attempt=1, lines=["gone"], time=time.time())
    await publish_log(broker, scope, lines)
    words = ("logs", run.name, "--nats-url", broker.url, "--actor")
    assert (await aside(cli, *words, "generator-7")).out == "generator-7 | gone\n"
    outcome = await aside(cli, *words, "generator-8")
    assert (outcome.code, "did you mean generator-7?" in outcome.err) == (2, True)


@pytest.mark.parametrize("kind", ["sft", "eval", "infer"])
async def test_a_job_that_logs_no_rollouts_says_so(broker: Broker, kind: str, cli: Cli) -> None:
    record = new_record(JobScope("local", f"{kind}-of-all")).model_copy(update={"kind": kind})
    await JobStore(broker).create(record, "test")
    outcome = await aside(cli, "rollouts", record.name, "--nats-url", broker.url)
    assert outcome.code == 2
    assert f"is of kind {kind}, which logs no rollouts" in " ".join(outcome.err.split())


async def test_an_unknown_run_names_the_closest(broker: Broker, run: JobRecord, cli: Cli) -> None:
    for verb in ("watch", "stop", "resume", "logs", "rollouts", "eval", "replay"):
        outcome = await aside(cli, verb, run.name + "x", "--nats-url", broker.url)
        assert outcome.code == 2, verb
        assert f"did you mean {run.name}?" in outcome.err
    outcome = await aside(cli, "replay", "s1:train:0", "--nats-url", broker.url)
    assert "s1:train:0" in outcome.err  # rich has a picture for `:train:`


async def test_rollouts_show_what_calls_and_branches_were_rewarded_with(
    broker: Broker, scope: JobScope, run: JobRecord, cli: Cli
) -> None:
    call = {"parent": None, "row": 0, "tokens": 3, "text": "said"}
    calls = [
        {**call, "call": 0},
        {**call, "call": 1, "reward": 0.0, "branch_reward": -1.5, "name": "reader"},
        {**call, "call": 2, "parent": 1, "branch": "edited", "reward": 0.25},
    ]
    episode = make_trajectory([1, 2], [([3, 4], [])], [1.0], info={"calls": calls})
    await RolloutLog(broker, scope).append(make_group([episode], 9))
    told = (await aside(cli, "rollouts", run.name, "--nats-url", broker.url)).out
    assert [line.strip() for line in told.splitlines() if line.strip().startswith("call ")] == [
        "call 0: 3 tokens, row 1  said",
        "call 1 (reader): 3 tokens, row 1  reward 0  reward of its branch -1.5  said",
        "call 2 (the history was edited): 3 tokens, row 1  reward 0.25  said",
    ]


async def test_a_live_run_evaluates_its_newest_version(
    broker: Broker, scope: JobScope, run: JobRecord, cli: Cli
) -> None:
    learner = Presence(
        actor="learner",
        role="learner",
        host="h",
        pid=1,
        state="working",
        version=4,
        time=time.time(),
    )
    bucket = Bucket(broker, BUCKET_EVALS, EvalRecord)
    words = ("eval", run.name, "--json", "--nats-url", broker.url)
    async with PresenceBeat(broker, f"{scope.key}.learner", lambda: learner):
        asking = asyncio.create_task(aside(cli, *words))
        entry = await eventually(lambda: bucket.get(f"{scope.key}.4"), "the request")
    assert entry.value.state == "requested"
    done = entry.value.model_copy(update={"state": "done", "values": {"val/mean_score": 0.75}})
    await bucket.update(f"{scope.key}.4", done, entry.revision)
    told = json.loads((await asking).out)
    assert told == {"evaluated": f"{run.name}@4", "values": {"val/mean_score": 0.75}}


async def test_without_a_scheduler_a_change_says_so(own_broker: Broker, cli: Cli) -> None:
    record = await JobStore(own_broker).create(new_record(JobScope("local", "a")), "test")
    outcome = await aside(cli, "stop", record.name, "--nats-url", own_broker.url)
    assert outcome.code == 1
    assert "no scheduler is connected" in outcome.err


# -- `tinkermq ps` names an actor that fails again and again ---------------------------------------


TROUBLE = "learner failed 2 times without finishing any work: deadline: too late"


def _row(**changes: Any) -> dict[str, Any]:
    plain = {"state": "RUNNING", "reason": "all actors run", "trouble": "", "missing": ""}
    return {**plain, **changes}


def _beat(progress: int) -> Presence:
    return Presence(
        actor="learner", role="learner", host="x", pid=1, state="x", progress=progress, time=0.0
    )


def test_a_run_that_gets_on_has_nothing_to_say() -> None:
    assert _describe_reason(_row()) == ""


def test_the_whole_reason_of_a_wait_is_shown_and_where_that_of_a_failure_is() -> None:
    long = "is next: " + "slots are kept for it " * 9 + "(`tinkermq stop other` frees them)"
    assert _describe_reason(_row(state="QUEUED", reason=long)) == long
    assert _describe_reason(_row(state="FAILED", reason=long)) == long
    told = _describe_reason(_row(run="mine", state="FAILED", reason="learner failed\n  set lr"))
    assert told == "learner failed (`tinkermq watch mine` shows all of it)"


def test_an_actor_that_fails_again_and_again_is_told_until_it_has_done_some_work() -> None:
    record = JobRecord(
        job="j",
        name="run",
        user="u",
        state="RUNNING",
        config={},
        created=0.0,
        actors=[ActorPlacement(name="learner", role="learner", trouble=TROUBLE)],
    )
    assert _describe_failure(record, []) == TROUBLE
    assert _describe_failure(record, [_beat(0)]) == TROUBLE
    assert _describe_failure(record, [_beat(1)]) == ""
    assert _describe_reason(_row(trouble=TROUBLE)) == TROUBLE


# -- What `tinkermq pool` shows of nodes and machines ----------------------------------------------


NOW = 10_000.0
MACHINES = MachineList(
    on="slurm:gpu",
    most=4,
    slots=8,
    slot_hours=16.7,
    slot_hours_per_day=400,
    machines=[
        MachineStatus(name="m1", state="here", started=NOW - 7500, ends=NOW + 35_700),
        MachineStatus(name="m2", state="draining", started=NOW - 7500, ends=NOW + 60),
        MachineStatus(name="m3", state="coming", started=NOW - 12),
        MachineStatus(name="m4", state="asked", why="Priority"),
    ],
)


def node(name: str, **more: object) -> NodeStatus:
    return NodeStatus.model_validate({"node": name, "host": "h", "slots": 8, "time": NOW, **more})


def test_machines_stand_with_what_runs_on_them_and_before_nodes_that_nobody_asked_for() -> None:
    learner = ActorStatus(
        user="ada", job="j", name="learner", devices=[0, 1], attempt=1, state="running"
    )
    nodes = [node("m1", actors=[learner]), node("own", draining=True)]
    assert _rows(nodes, MACHINES, NOW) == [
        ("m1", "here", 8, 2, "2h 05m", "9h 55m", ""),
        ("m2", "draining", "", "", "2h 05m", "1m 00s", ""),
        ("m3", "coming", "", "", "12s", "", ""),
        ("m4", "asked", "", "", "", "", "Priority"),
        ("own", "draining", 8, 0, "", "", ""),
    ]


def test_one_line_counts_the_machines_and_what_they_have_cost() -> None:
    assert _summary(MACHINES) == (
        "slurm:gpu: 1 asked, 1 coming, 1 here, 1 draining (0 to 4 machines of 8 slots), "
        "16.70 of 400 slot-hours today"
    )
    free = MACHINES.model_copy(update={"slot_hours_per_day": None, "machines": []})
    assert _summary(free).endswith(
        "0 draining (0 to 4 machines of 8 slots), 16.70 slot-hours today"
    )


def test_packages_that_differ_and_clocks_that_are_off_are_named() -> None:
    old, new = {"python": "3.11.7", "torch": "2.5.1"}, {"python": "3.12.1", "torch": "2.6.0"}
    many = [node(f"n{number}", packages=new) for number in range(5)]
    assert package_differences([*many, node("silent")]) == []
    assert package_differences([node("old", packages=old), *many]) == [
        "packages differ: torch 2.5.1 on old; 2.6.0 on n0, n1, n2 and 2 more"
    ]
    clocks = [node("a", clock_ahead_s=-70.25), node("b", clock_ahead_s=1.9), node("c")]
    assert clock_differences([*clocks, node("d", clock_ahead_s=3)]) == [
        "the clock of a is 70.2 s behind the scheduler's",
        "the clock of d is 3.0 s ahead of the scheduler's",
    ]


# -- `tinkermq doctor` says of nodes what is wrong with them, and of those that are well nothing ---


def _node(
    name: str = "box", *, silent_s: float = 0.0, store_lost: float | None = None
) -> NodeStatus:
    actor = ActorStatus(
        user="ada", job="j1", name="learner", attempt=1, state="running", silent_s=silent_s
    )
    return NodeStatus(
        node=name, host="h", slots=4, actors=[actor], time=time.time(), store_lost=store_lost
    )


def _found(*nodes: NodeStatus) -> dict[str, CheckResult]:
    return {one.name: one for one in check_nodes(list(nodes))}


def test_nodes_that_are_well_are_told_so() -> None:
    assert all(one.ok for one in _found(_node("a"), _node("b")).values())
    assert all(one.ok for one in _found().values())


@pytest.mark.parametrize("silent_s", [30.0, 61.5, 299.0, 5000.0])
def test_an_actor_that_tells_no_heartbeat_is_named(silent_s: float) -> None:
    found = _found(_node("a"), _node("b", silent_s=silent_s))["actors"]
    assert not found.ok
    assert f"learner of job j1 on b for {silent_s:.0f} s" in found.detail


@pytest.mark.parametrize("names", [["a"], ["b"], ["a", "b"]])
def test_a_broker_that_came_back_empty_is_told_with_the_nodes_that_saw_it(names: list[str]) -> None:
    nodes = [_node(one, store_lost=1e9 if one in names else None) for one in ("a", "b")]
    found = _found(*nodes)["store"]
    assert not found.ok
    assert "came back empty" in found.detail
    assert [one for one in ("a", "b") if f"{one} found at 2001" in found.detail] == names
    assert "tinkermq restore" in found.hint


# -- A collector that speaks OpenTelemetry's protocol gets the spans of a run ----------------------


TASK, STEP = new_trace(), new_trace()


def step() -> StepTrace:
    """A step that waited 5 s for a group of 10 s, and trained 2 s."""
    group = GroupTrace(
        task=7,
        traceparent=TASK,
        source="generator-1",
        issued=100.0,
        arrived=120.0,
        weights_s=4.0,
        rollout_s=10.0,
        generate_s=6.0,
        environment_s=3.0,
        answer_s=0.5,
    )
    return StepTrace(
        step=3,
        traceparent=STEP,
        formed=120.0,
        ended=123.0,
        learner={"wait": 5.0, "train": 2.0, "publish": 0.5, "checkpoint": 1.0, "other": 0.5},
        send_s=0.25,
        generators={"generator-1": {"generate": 6.0, "swap": 0.5}},
        num_groups=1,
        groups=[group],
    )


@contextmanager
def collector(status: int = 200) -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Yield the URL of a collector, and what it was sent."""
    taken: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken.append(ExportTraceServiceRequest.FromString(body))
            assert self.path == "/v1/traces"
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", taken
        server.shutdown()
        thread.join()


def test_spans_lie_where_their_time_passed() -> None:
    spans = {span.name: span for span in spans_of(step())}
    placed = {name: (span.actor, span.start, span.end) for name, span in spans.items()}
    assert placed == {
        "task": ("learner", 100.0, 120.0),
        "queue": ("learner", 100.0, 106.0),
        "weights": ("generator-1", 106.0, 110.0),
        "rollout": ("generator-1", 110.0, 120.0),
        "generate": ("generator-1", 110.0, 116.0),
        "environment": ("generator-1", 116.0, 119.0),
        "step": ("learner", 114.0, 123.0),
        "checkpoint": ("learner", 114.0, 115.0),
        "wait": ("learner", 115.0, 120.0),
        "train": ("learner", 120.0, 122.0),
        "publish": ("learner", 122.0, 122.5),
        "send": ("learner", 114.0, 114.25),
        "swap": ("generator-1", 114.0, 114.5),
    }
    of_task = ("task", "queue", "weights", "rollout", "generate", "environment")
    assert {spans[name].trace for name in of_task} == {trace_of(TASK)}
    assert spans["generate"].parent == spans["rollout"].span
    assert spans["rollout"].parent == spans["task"].span == span_of(TASK)
    assert spans["train"].parent == spans["step"].span == span_of(STEP)
    assert spans["train"].links == ((trace_of(TASK), span_of(TASK)),)
    assert len({span.span for span in spans.values()}) == len(spans)


def test_a_collector_gets_ids_parents_links_and_the_actor() -> None:
    spans = list(spans_of(step()))
    with collector() as (url, taken):
        send_spans(spans, f"{url}/", {"tinkermq.run": "r"})
    found = {
        sent.name: (resource.resource, sent)
        for request in taken
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for sent in scope.spans
    }
    assert len(found) == len(spans)
    resource, train = found["train"]
    told = {one.key: one.value.string_value for one in resource.attributes}
    assert told == {
        "service.name": "tinkermq",
        "service.instance.id": "learner",
        "tinkermq.run": "r",
    }
    assert train.trace_id.hex() == trace_of(STEP)
    assert train.parent_span_id.hex() == span_of(STEP)
    assert train.start_time_unix_nano == 120_000_000_000
    assert train.links[0].trace_id.hex() == trace_of(TASK)
    assert found["task"][1].parent_span_id == b""


def test_spans_that_nobody_takes_are_an_error() -> None:
    one = [Span("a", "learner", trace_of(TASK), span_of(TASK), "", 0.0, 1.0)]
    with collector(400) as (url, _), pytest.raises(BrokerError, match="no collector accepted"):
        send_spans(one, url, {})
    with pytest.raises(ConfigError, match="is not the URL of a collector"):
        send_spans(one, "127.0.0.1:4318", {})
