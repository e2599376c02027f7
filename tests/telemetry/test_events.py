"""Events reach their subscribers, whose failures reach no call."""

import logging

import pytest

from storesvc.telemetry.events import (
    AuditFailed,
    Event,
    publish,
    subscribe,
    unsubscribe,
)


def test_a_subscriber_that_fails_is_logged_once_and_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[Event] = []

    def failing(event: Event) -> None:
        raise OSError(event)

    subscribe(failing)
    subscribe(seen.append)
    try:
        with caplog.at_level(logging.ERROR, logger="storesvc.telemetry"):
            publish(AuditFailed())
            publish(AuditFailed())
    finally:
        unsubscribe(failing)
        unsubscribe(seen.append)
    publish(AuditFailed())

    assert seen == [AuditFailed(), AuditFailed()]
    assert len(caplog.records) == 1
