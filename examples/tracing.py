"""One trace from the sender to the consumer, including the redelivery."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from embedded import cluster
from turbopump import (
    ConsumeContext,
    ConsumeResult,
    ConsumeTracing,
    Message,
    MessageView,
    Producer,
    PushConsumer,
    SendTracing,
)


def main() -> int:
    # A real application exports to a collector; this one keeps its spans to print them.
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    tracer = trace.get_tracer("shop")
    charged = threading.Event()

    def handle(messages: Sequence[MessageView], context: ConsumeContext) -> ConsumeResult:
        context.delay_level = 1
        if messages[0].reconsume_times == 0:
            raise ConnectionError("the bank does not answer")
        with tracer.start_as_current_span("charge"):
            charged.set()
        return ConsumeResult.SUCCESS

    with cluster() as nameserver:
        with (
            Producer("shop", nameserver=nameserver, hooks=[SendTracing()]) as producer,
            tracer.start_as_current_span("checkout"),
        ):
            producer.send(Message("payments", b"{}", keys=["42"]))
        with PushConsumer(
            "cashier",
            handle,
            nameserver=nameserver,
            subscriptions={"payments": "*"},
            start_from="first",
            hooks=[ConsumeTracing()],
        ):
            is_charged = charged.wait(timeout=30)
    spans = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
    show(spans)
    names = [span.name for span in spans]
    expected = ["checkout", "send payments", "process payments", "process payments", "charge"]
    is_one_trace = len({span.context.trace_id for span in spans if span.context}) == 1
    return 0 if is_charged and is_one_trace and names == expected else 1


def show(spans: Sequence[ReadableSpan]) -> None:
    depths = {0: -1}
    for span in spans:
        assert span.context is not None
        depth = depths[span.parent.span_id if span.parent else 0] + 1
        depths[span.context.span_id] = depth
        print(f"{'  ' * depth}{span.name:30} {span.status.description or ''}")


if __name__ == "__main__":
    sys.exit(main())
