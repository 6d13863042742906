"""A collector that speaks OpenTelemetry's protocol gets the spans of a run."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tinkermq.broker.profile import Span, spans_of
from tinkermq.clients.cli.inspection import send_spans
from tinkermq.schemas.wire.errors import BrokerError, ConfigError
from tinkermq.schemas.wire.trace import GroupTrace, StepTrace, new_trace, span_of, trace_of

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
    with pytest.raises(ConfigError, match="no URL of a collector"):
        send_spans(one, "127.0.0.1:4318", {})
