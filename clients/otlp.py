"""Sending the spans of a run to whatever takes OpenTelemetry's protocol over HTTP.

The packages are those of the extra `otel`; they are imported when somebody asks for this.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..broker.profile import Span
from ..schemas.wire.errors import BrokerError, ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_BATCH = 512
_TIMEOUT_S = 10.0


def send_spans(spans: Sequence[Span], url: str, attributes: Mapping[str, str]) -> None:
    """Send spans to a collector, such as http://127.0.0.1:4318; `attributes` name the run.

    Raises ConfigError when the packages are not installed, BrokerError when nobody takes them.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError as error:
        raise ConfigError(
            f"--otlp needs a package that cannot be imported: {error}",
            hint="pip install 'tinkermq[otel]'",
        ) from error
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{url!r} is no URL of a collector", hint="write it as http://127.0.0.1:4318"
        )
    endpoint = f"{url.rstrip('/')}/v1/traces"
    sender = OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
    readable = [_readable(span, attributes) for span in spans]
    try:
        for start in range(0, len(readable), _BATCH):
            result = sender.export(readable[start : start + _BATCH])
            if result is not SpanExportResult.SUCCESS:
                raise BrokerError(
                    f"nobody took the spans at {endpoint}",
                    hint="does the collector run, and does it listen for OTLP over HTTP?",
                )
    finally:
        sender.shutdown()


def _readable(span: Span, attributes: Mapping[str, str]) -> "ReadableSpan":
    """Return a span as the SDK knows it, of the actor as its service's instance."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Link, SpanContext, TraceFlags

    def context(trace_id: str, span_id: str) -> SpanContext:
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int(trace_id, 16), int(span_id, 16), True, sampled)

    return ReadableSpan(
        span.name,
        context=context(span.trace, span.span),
        parent=context(span.trace, span.parent) if span.parent else None,
        resource=Resource(
            {"service.name": "tinkermq", "service.instance.id": span.actor, **attributes}
        ),
        attributes=dict(span.attributes),
        links=[Link(context(*link)) for link in span.links],
        start_time=int(span.start * 1e9),
        end_time=int(span.end * 1e9),
    )
