"""The REST interface does what the pages do, refuses what it must, and says why."""

import json
import re
import time
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tinkermq.actors.gateway.rest import OPERATIONS, Operation
from tinkermq.actors.gateway.server import Options, run
from tinkermq.broker.feed import (
    publish_dead,
    publish_event,
    publish_log,
    publish_metric,
    read_dead,
)
from tinkermq.broker.jetstream.streams import create_job_streams
from tinkermq.broker.jobs import JobStore
from tinkermq.broker.nats_server import NatsServer
from tinkermq.broker.rollouts import RolloutLog
from tinkermq.schemas.config.job import LimitsConfig
from tinkermq.schemas.job import JobRecord
from tinkermq.schemas.metric import Event, LogLines, Metric
from tinkermq.schemas.task import Blame, DeadLetter, Task
from tinkermq.schemas.wire.errors import BrokerError
from tinkermq.schemas.wire.subjects import JobScope

from tests.actors.gateway.test_data import PNG, two_turns
from tests.support.configs import small_job
from tests.support.gateway import Gateway, run_gateway, start
from tests.support.groups import make_group
from tests.support.stack import Stack
from tests.support.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEAST: dict[str, Any] = {"config": {"model": {"path": "m"}, "env": {"game": "bandit"}}}
HOSTILE = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"


async def finished_job(stack: Stack, gateway: Gateway, **fields: Any) -> JobRecord:
    """Write a job that has ended as its actors would have, with one of everything."""
    job = f"job-{uuid.uuid4().hex[:8]}"
    scope = JobScope("local", job)
    await create_job_streams(stack.broker, scope, LimitsConfig())
    base: dict[str, Any] = {
        "job": job, "name": job, "user": "local", "state": "COMPLETED", "created": time.time(),
        "config": {"env": {"game": "bandit"}, "model": {"path": "tiny"}, "project": HOSTILE},
    }  # fmt: skip
    record = JobRecord(**{**base, **fields})
    await JobStore(stack.broker).create(record, "test")
    for step in range(1, 6):
        values = {"training_step_reward": step / 5, "actor/entropy": float("nan")}
        await publish_metric(stack.broker, scope, Metric(step=step, values=values, time=0.0))
    await publish_event(
        stack.broker, scope, Event(kind="odd_thing", source=HOSTILE, message=HOSTILE, time=1.0)
    )
    await publish_log(
        stack.broker, scope, LogLines(actor="learner", attempt=1, lines=[HOSTILE], time=1.0)
    )
    episode = two_turns(info={HOSTILE: HOSTILE})
    told = [{"type": "text", "text": HOSTILE}, {"type": "image", "image": PNG}]
    episode.messages[0]["content"] = told
    await RolloutLog(stack.broker, scope).append(make_group([episode]))

    async def listed() -> bool:
        return bool((await gateway.get(f"/api/v1/jobs?search={job}")).json["total"])

    await eventually(listed, "the scheduler to know the job")
    return record


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: f"{one.method} {one.path}")
async def test_a_query_key_that_an_operation_does_not_know_is_refused_with_the_closest(
    gateway: Gateway, operation: Operation
) -> None:
    path = re.sub(r"{\w+:int}", "1", operation.path).replace("{job}", "any")
    asks = {"GET": gateway.get, "POST": gateway.post, "DELETE": gateway.delete}
    ask, known = asks[operation.method], [name for name, _, _ in operation.query]
    for given, hint in [(f"{name}s", f"did you mean {name}?") for name in known] or [("q", "none")]:
        answer = await ask(f"{path}?{given}=1")
        assert answer.status == 400, answer.text
        error = answer.json["error"]
        assert (error["code"], hint in error["hint"]) == ("message", True), error
        assert repr(given) in error["message"]


@pytest.mark.parametrize(
    ("path", "query", "said"),
    [
        ("jobs", "state=foo", "active, queued, completed, failed, cancelled, archived, starting"),
        ("jobs", "state=running%20", "running"),
        ("jobs", "state=running&state=failed", "once"),
        ("jobs", f"search={'x' * 201}", "201 characters"),
        ("jobs/any/logs", f"actor={'x' * 201}", "201 characters"),
        ("jobs/any/rollouts", "sort=best", "log, reward"),
        ("jobs/any/rollouts", "errors=maybe", "true, yes, on, 0, false"),
        ("jobs/any/rollouts", f"q={'x' * 201}", "201 characters"),
    ],
)
async def test_a_value_that_a_query_key_does_not_take_is_refused_with_those_that_it_takes(
    stack: Stack, gateway: Gateway, path: str, query: str, said: str
) -> None:
    if "any" in path:
        path = path.replace("any", (await finished_job(stack, gateway)).job)
    answer = await gateway.get(f"/api/v1/{path}?{query}")
    assert (answer.status, answer.json["error"]["code"]) == (400, "message"), answer.text
    assert said in answer.text


STRANGE_KEYS = [
    *("~: 2", "null: 2", "1: 2", "1.5: 2", "true: 2", ".nan: 2", "2024-01-01: 2", "? [a]\n: 2"),
    *("? {a: 1}\n: 2", "env: {~: 2}", "env: {1: 2}", "<<: 2", "=: 2", '"\\ud800": 2', "? ''\n: 2"),
    *("model: {path: m, ~: 2}", "!!binary aGk=: 2", '"\\0": 2'),
]


@pytest.mark.parametrize("config", [*STRANGE_KEYS, {"\ud800": 2}, {"env": {"\udcff": 2}}, {"": 2}])
async def test_a_strange_key_of_a_configuration_is_refused_and_never_a_failure(
    gateway: Gateway, config: str | dict[str, Any]
) -> None:
    for more in ({}, {"overrides": ["generator.count=2"]}):
        answer = await gateway.post("/api/v1/jobs", {"config": config, **more})
        assert answer.status == 400, answer.text
    if isinstance(config, str):
        form = urlencode({"config": config, "do": "check"}).encode()
        assert (await gateway.form("/submit", form)).status == 400


async def test_a_job_is_submitted_found_and_stopped(
    stack: Stack, gateway: Gateway, model: Path
) -> None:
    config = {**small_job(model), "output_dir": str(stack.folder / "runs")}
    request = {"config": config, "overrides": ["generator.count=31"], "request_id": "once"}
    made = await gateway.post("/api/v1/jobs", request)
    assert made.status == 201, made.text
    job = made.json["job"]
    assert (await gateway.post("/api/v1/jobs", request)).json["job"] == job

    listed = (await gateway.get("/api/v1/jobs?search=bandit")).json
    assert job in [one["job"] for one in listed["jobs"]]
    told = (await gateway.get(f"/api/v1/jobs/{job}")).json
    assert told["state"] in ("QUEUED", "STARTING", "RUNNING")
    assert told["slots_wanted"] == 32
    config = (await gateway.get(f"/api/v1/jobs/{job}/config")).json
    assert config["config"]["generator"]["count"] == 31
    assert config["effective"]["learner"]["grad_clip"] == 1.0

    early = await gateway.delete(f"/api/v1/jobs/{job}")
    assert early.status == 409
    assert "only a run that has ended can be deleted" in early.json["error"]["message"]
    stopped = await gateway.post(f"/api/v1/jobs/{job}/stop", {"now": True})
    assert stopped.status == 200
    assert stopped.json["stop"] == "now"


async def test_jobs_are_found_by_tags_group_and_notes_which_change_at_any_time(
    stack: Stack, gateway: Gateway
) -> None:
    record = await finished_job(stack, gateway)
    tag = f"seed={record.job}"
    labels = {"tags": [tag, "baseline"], "group": f"of-{record.job}", "notes": "the good one"}
    told = await gateway.post(f"/api/v1/jobs/{record.job}/label", labels)
    assert told.status == 200, told.text
    for words in (f"tag:{tag}", f"group:of-{record.job}", f"{record.job} good"):
        found = (await gateway.get(f"/api/v1/jobs?{urlencode({'search': words})}")).json["jobs"]
        assert [one["job"] for one in found] == [record.job], words
        assert {name: found[0][name] for name in labels} == labels
    none = (await gateway.get(f"/api/v1/jobs?{urlencode({'search': f'tag:{tag[:-1]}'})}")).json
    assert none["total"] == 0
    form = urlencode({"tags": f"{tag}, other", "group": "", "notes": HOSTILE})
    page = await gateway.post(
        f"/jobs/{record.job}/label", form.encode(), content_type="application/x-www-form-urlencoded"
    )
    assert page.status in (200, 303), page.text
    now = (await gateway.get(f"/api/v1/jobs?{urlencode({'search': tag})}")).json["jobs"][0]
    assert (now["tags"], now["group"], now["notes"]) == ([tag, "other"], "", HOSTILE)
    for bad in ({"tags": ["a b"]}, {"tags": ["x"] * 33}, {"group": "-"}, {"notes": "x" * 4001}):
        refused = await gateway.post(f"/api/v1/jobs/{record.job}/label", bad)
        assert refused.status == 400, bad
        assert next(iter(bad)) in refused.json["error"]["message"]


@pytest.mark.full
async def test_what_serves_or_evaluates_a_run_stands_beneath_it(
    stack: Stack, gateway: Gateway
) -> None:
    run = await finished_job(stack, gateway)
    serving = await finished_job(stack, gateway, kind="infer", serves=f"{run.name}@3")
    judging = await finished_job(stack, gateway, kind="eval", fork_of=f"{run.name}@2")
    alone = await finished_job(stack, gateway, kind="infer", serves="gone@1")
    everything = {run.job, serving.job, judging.job, alone.job}
    jobs = (await gateway.get("/api/v1/jobs?limit=1000")).json["jobs"]
    assert everything <= {one["job"] for one in jobs}
    page = re.sub(r"<[^>]*>", "", (await gateway.get("/jobs?limit=1000")).text)
    assert f"↳ {serving.job} serves @3 · completed" in page
    assert f"↳ {judging.job} evaluates @2 · completed" in page
    assert f"↳ {alone.job}" not in page
    alone_on_page = (await gateway.get(f"/jobs?search={serving.job}")).text
    assert (serving.job in alone_on_page, "↳" in alone_on_page) == (True, False)


async def test_a_form_that_is_sent_twice_makes_one_job_and_a_changed_one_another(
    stack: Stack, gateway: Gateway, model: Path
) -> None:
    page = (await gateway.get("/submit")).text
    once = re.search('name="request_id" value="([0-9A-Za-z]+)"', page)
    assert once is not None
    config = json.dumps({**small_job(model), "output_dir": str(stack.folder / "runs")})

    async def sent(priority: int) -> str:
        fields = {"request_id": once[1], "config": config, "priority": str(priority)}
        answer = await gateway.form("/submit", urlencode(fields).encode())
        assert answer.status == 303, answer.text
        return answer.headers["location"]

    first = await sent(0)
    assert await sent(0) == first
    second = await sent(1)
    assert second != first
    for place in (first, second):
        stopped = await gateway.post(f"/api/v1{place}/stop", {"now": True, "complete": True})
        assert (stopped.json["stop"], stopped.json["stop_complete"]) == ("now", True)


async def test_everything_of_a_job_can_be_read(stack: Stack, gateway: Gateway) -> None:
    record = await finished_job(stack, gateway)
    base = f"/api/v1/jobs/{record.job}"
    metrics = (await gateway.get(f"{base}/metrics")).json
    assert metrics["series"]["training_step_reward"]["y"] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert "actor/entropy" not in metrics["series"]
    events = (await gateway.get(f"{base}/events")).json["events"]
    assert [event["kind"] for event in events] == ["job_completed", "odd_thing"]
    assert (await gateway.get(f"{base}/logs?actor=learner")).json["lines"][0]["text"] == HOSTILE
    assert (await gateway.get(f"{base}/logs?actor=other")).json["lines"] == []
    (group,) = (await gateway.get(f"{base}/rollouts")).json["groups"]
    episode = (await gateway.get(f"{base}/rollouts/{group['seq']}/0")).json
    assert episode["messages"][0]["parts"][0]["text"] == HOSTILE
    assert (await gateway.get(f"{base}/checkpoints")).json == {"checkpoints": []}
    assert (await gateway.get(f"{base}/actors")).json == {"actors": []}
    await assert_failed_tasks_are_decided(stack, gateway, record)
    nodes = (await gateway.get("/api/v1/nodes")).json["nodes"]
    assert [node["node"] for node in nodes] == ["node"]

    deleted = await gateway.delete(base)
    assert (deleted.status, deleted.json["removal"]) == (200, "delete")

    async def gone() -> bool:
        return (await gateway.get(base)).status == 404

    await eventually(gone, "the job to be deleted")


async def assert_failed_tasks_are_decided(
    stack: Stack, gateway: Gateway, record: JobRecord
) -> None:
    path = f"/api/v1/jobs/{record.job}/failed"
    assert (await gateway.get(path)).json == {"failed": []}
    blame = Blame(boundary="environment", code="game", message=HOSTILE)
    for number, tries in ((3, 2), (7, 0), (9, 2)):  # the second is issued again by itself
        task = Task(task=number, seed=0, group_size=1, tries=tries)
        letter = DeadLetter(task=task, blame=blame, num_attempts=3, source="g", time=1.0)
        await publish_dead(stack.broker, record.scope, letter)
    failed = (await gateway.get(path)).json["failed"]
    assert [letter["task"]["task"] for letter in failed] == [3, 9]
    assert failed[0]["blame"]["message"] == HOSTILE
    refused = await gateway.post(path, {"decision": "drop", "tasks": [7]})
    assert (refused.status, "task 7 of" in refused.text) == (404, True)
    assert (await gateway.post(path, {"decision": "forget"})).status == 400
    assert (await gateway.post(path, {"decision": "drop", "tasks": [9]})).status == 200
    assert (await gateway.post(path, {"decision": "repeat"})).status == 200
    assert (await gateway.get(path)).json == {"failed": []}
    decided = [item.decision for item in await read_dead(stack.broker, record.scope)]
    assert decided == [None, None, None, "drop", "repeat"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("GET", "/api/v1/jobs/nope", None, 404, "no run 'nope'"),
        ("GET", "/api/v1/nope", None, 404, "does not exist start at /jobs; operations"),
        (
            "POST",
            "/api/v1/jobs/nope",
            {},
            405,
            "is not answered at /api/v1/jobs/nope see /api",
        ),
        ("GET", "/api/v1/jobs?limit=many", None, 400, "limit='many'"),
        ("POST", "/api/v1/jobs", {}, 400, "config"),
        ("POST", "/api/v1/jobs", {"config": "a: [b"}, 400, "not valid YAML"),
        ("POST", "/api/v1/jobs", {"config": "- a"}, 400, "holds a list"),
        ("POST", "/api/v1/jobs", {"config": {}, "overrides": ["a=[b"]}, 400, "not valid YAML"),
        ("POST", "/api/v1/check", {"config": "x" * 200_001}, 400, "config"),
        ("POST", "/api/v1/jobs", {"config": {"modell": {}}}, 400, "did you mean model"),
        ("POST", "/api/v1/jobs", {"config": {}, "extra": 1}, 400, "extra"),
        ("POST", "/api/v1/jobs", LEAST | {"weights_only": True}, 400, "starts from a checkpoint"),
        ("POST", "/api/v1/jobs", LEAST | {"adapters": ["r@1"]}, 400, "for inference runs"),
        ("POST", "/api/v1/jobs", b"{broken", 400, "cannot be read: it is not valid JSON"),
        ("POST", "/api/v1/jobs", b"[]", 400, "JSON object"),
        ("POST", "/api/v1/jobs/nope/pause", {}, 404, "no run"),
        ("POST", "/api/v1/jobs/nope/scale", {"role": "learner", "count": 1}, 400, "role"),
        ("POST", "/api/v1/jobs/nope/scale", {"role": "server", "count": 1}, 404, "no run"),
        ("POST", "/api/v1/jobs/nope/explode", {}, 404, "does not exist"),
    ],
)
async def test_an_error_says_what_is_wrong(
    gateway: Gateway, method: str, path: str, body: Any, status: int, says: str
) -> None:
    answer = await (gateway.get(path) if method == "GET" else gateway.post(path, body))
    assert answer.status == status, answer.text
    told = answer.json["error"]
    assert says in f"{told['message']} {told['hint']}"


async def test_pages_run_no_foreign_script_and_are_framed_by_nobody(gateway: Gateway) -> None:
    for path in ("/jobs", "/api/v1/jobs", "/nope", "/static/app.js"):
        policy = (await gateway.get(path)).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "style-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy


async def test_pages_hold_no_inline_script_or_style(stack: Stack, gateway: Gateway) -> None:
    record = await finished_job(stack, gateway)
    for tab in ("", "/logs", "/events", "/config", "/checkpoints", "/rollouts", "/rollouts/1/0"):
        answer = await gateway.get(f"/jobs/{record.job}{tab}")
        assert answer.status == 200
        assert "<script>" not in answer.text
        assert " style=" not in answer.text
        assert not re.search(r" on[a-z]+=", answer.text.replace("src=x onerror=", ""))


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"cookie": "tinkermq_session=x"},
    ],
    ids=str,
)
async def test_a_change_asked_for_by_another_site_is_refused(
    gateway: Gateway, headers: dict[str, str]
) -> None:
    for path in ("/submit", "/api/v1/jobs", "/jobs/x/stop"):
        assert (await gateway.post(path, {}, **headers)).status == 403


async def test_without_keys_only_names_of_this_machine_are_answered(gateway: Gateway) -> None:
    assert (await gateway.get("/jobs", host="rebound.example")).status == 403
    assert (await gateway.get("/jobs", host="localhost:1")).status == 200


async def test_without_keys_the_gateway_does_not_listen_beyond_this_machine(
    stack: Stack, tmp_path: Path
) -> None:
    process = start(stack.server.url, tmp_path, "--host", "0.0.0.0", "--port", "0")
    assert process.wait(PATIENCE_S) == 2
    assert "requires no keys" in (tmp_path / "gateway.log").read_text()


async def test_prometheus_gets_jobs_nodes_and_actors(gateway: Gateway) -> None:
    await gateway.get("/jobs")
    text = (await gateway.get("/metrics")).text
    assert 'tinkermq_node_slots{kind="cpu",node="node"} 32.0' in text
    assert 'tinkermq_jobs{state="active"}' in text
    assert re.search(r'tinkermq_actor_up\{actor="pool.gateway",role="gateway"', text)
    assert 'tinkermq_gateway_requests_total{method="GET",status="200"}' in text
    assert len(re.findall("^# TYPE tinkermq_jobs gauge", text, flags=re.MULTILINE)) == 1


async def test_health_tells_of_the_broker(gateway: Gateway) -> None:
    answer = await gateway.get("/healthz")
    assert answer.json["status"] == "ok"
    assert not answer.json["with_keys"]


async def test_health_tells_that_the_broker_is_away_and_back(
    own_server: NatsServer, tmp_path: Path
) -> None:
    async with run_gateway(own_server.url, tmp_path) as gateway:
        own_server.kill()
        answer = await gateway.get("/healthz")
        assert (answer.status, answer.json["status"]) == (503, "no broker")
        assert "no NATS server answers at" in answer.json["error"]["message"]
        own_server.start()
        assert (await gateway.get("/healthz")).status == 200


async def test_a_gateway_without_a_broker_does_not_start() -> None:
    nowhere = "nats://127.0.0.1:1"
    with pytest.raises(BrokerError, match=f"no NATS server answers at {nowhere}"):
        await run(Options(nowhere, patience_s=0))


async def test_the_openapi_document_has_every_operation_and_no_dangling_reference(
    gateway: Gateway,
) -> None:
    answer = await gateway.get("/api/openapi.json")
    document = answer.json
    told = {(verb.upper(), path) for path, verbs in document["paths"].items() for verb in verbs}
    assert told == {(one.method, re.sub(r":\w+", "", one.path)) for one in OPERATIONS}
    for name in re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)):
        assert name in document["components"]["schemas"]
    ids = [one["operationId"] for verbs in document["paths"].values() for one in verbs.values()]
    assert len(ids) == len(set(ids))
    assert (await gateway.get("/api")).status == 200


async def test_metrics_are_had_by_name_and_range_and_to_the_bit(
    stack: Stack, gateway: Gateway
) -> None:
    base = f"/api/v1/jobs/{(await finished_job(stack, gateway)).job}/metrics"
    some = (await gateway.get(f"{base}?names=training_*&from=2&to=3")).json
    assert some["x"] == [2, 3]
    assert some["series"] == {"training_step_reward": {"y": [0.4, 0.6]}}
    assert "training_step_reward" in some["names"]
    exact = (await gateway.get(f"{base}/exact?from=2&to=3")).text.splitlines()
    assert [json.loads(line)["step"] for line in exact] == [2, 3]
    assert json.loads(exact[1])["values"]["training_step_reward"] == 3 / 5
    wrong = await gateway.get(f"{base}?name=x")
    assert (wrong.status, wrong.json["error"]["hint"]) == (400, "did you mean names?")
    many = await gateway.get(f"{base}?names={','.join('a' for _ in range(600))}")
    assert many.status == 400
    assert "at most 512" in many.json["error"]["message"]


async def test_jobs_are_sorted_by_their_figures(stack: Stack, gateway: Gateway) -> None:
    record = await finished_job(stack, gateway)
    for sort in ("-reward", "validation", "name"):
        jobs = (await gateway.get(f"/api/v1/jobs?sort={sort}&state=completed")).json["jobs"]
        assert record.job in [one["job"] for one in jobs]
    known = [one["reward"] for one in jobs if one["reward"] is not None]
    best = (await gateway.get("/api/v1/jobs?sort=-reward")).json["jobs"]
    assert best[0]["reward"] == max(known)
    refused = await gateway.get("/api/v1/jobs?sort=colour")
    assert refused.status == 400


async def test_a_wrong_path_of_a_model_api_is_told_in_its_words(gateway: Gateway) -> None:
    lost = await gateway.post("/v1/embeddings", {"input": "a"})
    assert lost.status == 404
    assert lost.json["error"]["message"].startswith("there is no /v1/embeddings here")
    assert lost.json["error"]["code"] == "request"
    lost = await gateway.post("/v1/messages/batches", {"requests": []})
    assert (lost.status, lost.json["type"]) == (404, "error")
    for path in ("/v1/chat/completions", "/tokenize"):
        wrong = await gateway.get(path)
        assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
        assert f"GET is not answered at {path}" in wrong.json["error"]["message"]
    assert (await gateway.get("/health")).status == 200
