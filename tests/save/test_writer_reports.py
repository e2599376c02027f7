"""Reports of writers: which are accepted, and which a checkpoint keeps."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storesvc.errors import InvalidFieldError
from storesvc.rpc.upload_service import writer_report
from storesvc.save.receipts import MAX_PHASES, MAX_WRITERS, check_report, longest
from storesvc_proto.v1 import report_pb2 as pb
from storesvc_proto.v1 import upload_service_pb2 as api

seconds = st.floats(0, 1e6, width=32)


def a_report() -> pb.WriterReport:
    return pb.WriterReport(
        seconds=2, phases=[pb.PhaseSpan(name="plan", start_seconds=0, end_seconds=1)]
    )


@given(st.text("abc ", min_size=1, max_size=32), seconds, seconds, seconds)
def test_a_well_formed_report_is_accepted(
    name: str, first: float, second: float, busy: float
) -> None:
    phase = pb.PhaseSpan(
        name=name,
        start_seconds=min(first, second),
        end_seconds=max(first, second),
        busy_seconds=busy,
    )

    check_report(pb.WriterReport(seconds=first, phases=[phase] * MAX_PHASES))


CHANGES: dict[str, Callable[[pb.WriterReport], object]] = {
    "report.sent_bytes": lambda r: setattr(r, "sent_bytes", 1),
    "report.start_time": lambda r: setattr(r.start_time, "seconds", 1 << 60),
    "report.seconds": lambda r: setattr(r, "seconds", math.nan),
    "report.phases:": lambda r: r.phases.extend([r.phases[0]] * MAX_PHASES),
    "report.phases[0].name": lambda r: setattr(r.phases[0], "name", "a\nb"),
    "report.phases[0].start_seconds": lambda r: setattr(
        r.phases[0], "start_seconds", -1
    ),
    "report.phases[0].end_seconds": lambda r: setattr(
        r.phases[0], "start_seconds", 1.5
    ),
    "report.phases[0].busy_seconds": lambda r: setattr(
        r.phases[0], "busy_seconds", math.inf
    ),
}


@pytest.mark.parametrize("place", CHANGES)
def test_a_malformed_report_is_rejected_with_its_place(place: str) -> None:
    report = a_report()
    CHANGES[place](report)

    with pytest.raises(InvalidFieldError) as caught:
        check_report(report)
    assert str(caught.value).startswith(place)


@pytest.mark.parametrize("name", ["", "x" * 33, "Plan", "<b>", "é", "a\x00"])
def test_a_name_of_other_characters_is_rejected(name: str) -> None:
    report = a_report()
    report.phases[0].name = name

    with pytest.raises(InvalidFieldError, match="name"):
        check_report(report)


@given(st.lists(seconds, max_size=100))
def test_the_writers_that_took_longest_are_kept_in_their_order(
    times: list[float],
) -> None:
    reports = [pb.WriterReport(writer=at, seconds=t) for at, t in enumerate(times)]

    kept = longest(reports)

    assert len(kept) == min(len(times), MAX_WRITERS)
    assert [one.writer for one in kept] == sorted(one.writer for one in kept)
    left = [one for one in reports if one not in kept]
    if left:
        assert min(k.seconds for k in kept) >= max(one.seconds for one in left)


def test_fields_that_this_release_does_not_know_are_not_kept() -> None:
    unknown = b"\xa2\x06\x04abcd"  # field 100
    report = pb.WriterReport.FromString(a_report().SerializeToString() + unknown)
    report.phases[0].MergeFromString(unknown)
    report.start_time.MergeFromString(unknown)
    request = api.FinishWriterRequest(report=report)
    assert b"abcd" in request.SerializeToString()

    kept = writer_report(request)

    assert kept is not None
    assert b"abcd" not in kept.SerializeToString()
