"""Calls carry the span of their caller, and nothing where there is none."""

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from storesvc.format.names import parse_traceparent
from storesvc_client._rpc.connection import call_metadata
from tests.support.programs import run_python


def within(flags: int) -> list[tuple[str, str]]:
    """Returns the metadata of a call within a span."""
    span = SpanContext(1 << 100, 7, is_remote=False, trace_flags=TraceFlags(flags))
    with trace.use_span(NonRecordingSpan(span)):
        return list(call_metadata(lambda: "t0ken", "store")())


def test_a_call_within_a_sampled_span_names_it() -> None:
    bearer, (name, value) = within(1)

    assert ("authorization", "Bearer t0ken") == bearer
    assert "traceparent" == name
    assert (1 << 100, 7) == parse_traceparent(value)


def test_a_call_within_a_span_that_is_not_sampled_has_the_token_alone() -> None:
    assert [("authorization", "Bearer t0ken")] == within(0)


def test_a_call_outside_of_a_span_has_no_metadata() -> None:
    assert [] == call_metadata(None, "store")()


@pytest.mark.slow
def test_a_process_without_opentelemetry_sends_nothing_and_imports_none() -> None:
    program = (
        "import sys, numpy\n"
        "import storesvc_client as store\n"
        "from storesvc_client._rpc.connection import call_metadata\n"
        "with store.connect('memory://') as client:\n"
        "    run = client.run('a/b')\n"
        "    run.save(1, {'x': numpy.ones(3)}).result()\n"
        "    run.restore()\n"
        "print(call_metadata(None, 'store')(), 'opentelemetry.trace' in sys.modules)\n"
    )
    done = run_python(program)
    assert "[] False\n" == done.stdout
