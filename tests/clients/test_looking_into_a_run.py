"""`ps`, `logs`, `rollouts` and `eval` show what the broker holds."""

import asyncio
import json
import signal
import time
from asyncio.subprocess import PIPE

import pytest
from tinkermq.broker.batches import BatchLog
from tinkermq.broker.client.connection import Broker
from tinkermq.broker.feed import publish_log, publish_metric, publish_trace, read_traces
from tinkermq.broker.jetstream.kv import Bucket
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.presence import presences
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.schemas.job import ActorPlacement, JobRecord
from tinkermq.schemas.metric import EvalRecord, LogLines, Metric, Presence
from tinkermq.schemas.rollout import Group
from tinkermq.schemas.task import BatchRecord, Blame, Task
from tinkermq.schemas.wire.subjects import BUCKET_EVALS, JobScope
from tinkermq.schemas.wire.trace import GroupTrace, StepTrace, new_trace

from tests.clients.command import Outcome, command
from tests.clients.conftest import Cli, new_record
from tests.support.groups import make_group, make_trajectory
from tests.support.waiting import PATIENCE_S, eventually


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
    record = await JobStore(broker).create(new_record(scope, actors=actors), "test")
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
    await log.append(
        Group(task=Task(task=2, seed=0, group_size=1), error=failure, source="generator-0")
    )
    first = BatchRecord(
        step=1, seqs=[1], tasks=[0], seed=0, digest="d", learner="l", time=time.time()
    )
    await BatchLog(broker, scope).append(first, 0)
    return record


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
    await presences(broker).put(f"{run.scope.key}.generator-0", waits)
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
    await presences(broker).put("pool.scheduler-7", lives)
    try:
        shown = await aside(cli, "ps", "--nats-url", broker.url)
    finally:
        await presences(broker).purge("pool.scheduler-7")
    assert "no scheduler answers" not in shown.err
    assert "scheduler-7 is alive and has not answered within" in " ".join(shown.err.split())


async def test_ps_hides_runs_that_have_ended_unless_asked(
    broker: Broker, run: JobRecord, cli: Cli
) -> None:
    await JobStore(broker).transition(run, "COMPLETED", "done", "test")
    assert run.name not in (await aside(cli, "ps", "--nats-url", broker.url)).out
    assert run.name in (await aside(cli, "ps", "-a", "--nats-url", broker.url)).out


async def test_logs_are_printed_by_actor(broker: Broker, run: JobRecord, cli: Cli) -> None:
    outcome = await aside(cli, "logs", run.name, "--nats-url", broker.url)
    assert outcome.out.splitlines() == [
        "learner | 10:11:12 info step_done",
        "learner | a bare line",
        "generator-0 | 10:11:12 info step_done",
        "generator-0 | a bare line",
    ]
    words = ("logs", run.job, "--actor", "learner", "--json", "--nats-url", broker.url)
    assert len((await aside(cli, *words)).out.splitlines()) == 1


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
    broker: Broker, scope: JobScope, run: JobRecord, cli: Cli
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
        "generator-0 75% tasks 25%",
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


async def test_an_unknown_actor_names_the_closest(broker: Broker, run: JobRecord, cli: Cli) -> None:
    outcome = await aside(cli, "logs", run.name, "--actor", "lerner", "--nats-url", broker.url)
    assert outcome.code == 2
    assert "did you mean learner?" in outcome.err


async def test_an_unknown_run_names_the_closest(broker: Broker, run: JobRecord, cli: Cli) -> None:
    for verb in ("watch", "stop", "resume", "logs", "rollouts", "eval", "replay"):
        outcome = await aside(cli, verb, run.name + "x", "--nats-url", broker.url)
        assert outcome.code == 2, verb
        assert f"did you mean {run.name}?" in outcome.err


async def test_the_id_of_a_model_is_printed_as_it_is(broker: Broker, cli: Cli) -> None:
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


async def test_rollouts_show_messages_rewards_and_versions_best_first(
    broker: Broker, run: JobRecord, cli: Cli
) -> None:
    words = ("rollouts", run.name, "--sort", "reward", "--json", "--nats-url", broker.url)
    rows = [json.loads(line) for line in (await aside(cli, *words)).out.splitlines()]
    assert [row.get("reward") for row in rows] == [1.0, 0.25, None]
    assert rows[1]["messages"][0]["content"] == "7*8"
    assert (rows[1]["step"], rows[0]["step"]) == (1, None)
    assert rows[0]["versions"] == [0, 0]
    assert [(row["finish"], row["finish_reasons"]) for row in rows[:2]] == [
        ("length", ["length"]),
        ("done", ["stop"]),
    ]
    text = (await aside(cli, "rollouts", run.name, "--nats-url", broker.url)).out
    assert "given up" in text
    assert "ended by length (cut: turn 1)" in text
    # What looks like markup in a model's answer is shown as it is.
    assert "    [1]" in text


async def test_rollouts_of_one_step_and_those_with_errors(
    broker: Broker, run: JobRecord, cli: Cli
) -> None:
    words = ("rollouts", run.name, "--step", "1", "--json", "--nats-url", broker.url)
    rows = [json.loads(line) for line in (await aside(cli, *words)).out.splitlines()]
    assert [row["task"] for row in rows] == [0]
    words = ("rollouts", run.name, "--errors", "--json", "--nats-url", broker.url)
    rows = [json.loads(line) for line in (await aside(cli, *words)).out.splitlines()]
    assert [row["task"] for row in rows] == [2, 1]
    assert rows[0]["error"]["message"] == "the game hung"
    outcome = await aside(cli, "rollouts", run.name, "--step", "9", "--nats-url", broker.url)
    assert outcome.code == 2
    assert "trained are 1 to 1" in outcome.err


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
    await presences(broker).put(f"{scope.key}.learner", learner)
    asking = asyncio.create_task(aside(cli, "eval", run.name, "--json", "--nats-url", broker.url))
    bucket = Bucket(broker, BUCKET_EVALS, EvalRecord)
    async with asyncio.timeout(PATIENCE_S):
        while (entry := await bucket.get(f"{scope.key}.4")) is None:
            await asyncio.sleep(0.05)
    assert entry.value.state == "requested"
    done = entry.value.model_copy(update={"state": "done", "values": {"val/mean_score": 0.75}})
    await bucket.update(f"{scope.key}.4", done, entry.revision)
    told = json.loads((await asking).out)
    assert told == {"evaluated": f"{run.name}@4", "values": {"val/mean_score": 0.75}}


async def test_what_is_no_checkpoint_is_refused(broker: Broker, run: JobRecord, cli: Cli) -> None:
    for words in (("fork", run.name), ("fork", f"{run.name}@x"), ("eval", f"{run.name}@x")):
        outcome = await aside(cli, *words, "--nats-url", broker.url)
        assert outcome.code == 2
        assert "RUN@STEP" in outcome.err


async def test_without_a_scheduler_a_change_says_so(own_broker: Broker, cli: Cli) -> None:
    record = await JobStore(own_broker).create(new_record(JobScope("local", "a")), "test")
    outcome = await aside(cli, "stop", record.name, "--nats-url", own_broker.url)
    assert outcome.code == 1
    assert "no scheduler is connected" in outcome.err


async def test_scale_is_checked_before_anything_is_asked(cli: Cli) -> None:
    assert "generators=2" in (await aside(cli, "scale", "r", "generators")).err
    outcome = await aside(cli, "scale", "r", "generatrs=2")
    assert outcome.code == 2
    assert "did you mean generators?" in outcome.err
