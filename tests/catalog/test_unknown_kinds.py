"""A rule, state or kind that the code does not know is an error, never another one."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc.catalog import slots
from storesvc.errors import FormatUnsupportedError
from storesvc.format.layout import RunPaths
from storesvc.format.names import RunName
from storesvc.retention import policy as policies
from storesvc.watch import events
from storesvc_client._values.policies import KeepAny, RetentionPolicy, policy_message
from storesvc_proto.v1 import bucket_pb2 as pb
from storesvc_proto.v1 import retention_pb2
from tests.support import stored_records
from tests.support.server_process import ServerProcess

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PINNED = policies.Candidate(step=1, commit_time=NOW, pinned=True)
NEWEST = policies.Candidate(step=2, commit_time=NOW, metrics={"loss": 1.0})
RUN = RunName("tests", "unknown")
LATER_STATE = 99
"""A number that a later release might use."""


@dataclass(frozen=True, slots=True)
class KeepWeekends(RetentionPolicy):
    """A rule that nothing has a case for."""


NO_RULE = retention_pb2.RetentionPolicy()
"""Result of parsing a message with a rule of a later release."""


@pytest.mark.parametrize(
    "policy",
    [
        NO_RULE,
        retention_pb2.RetentionPolicy(
            any=retention_pb2.RetentionPolicies(policies=[NO_RULE])
        ),
        retention_pb2.RetentionPolicy(
            best=retention_pb2.KeepBest(count=1, metric="loss")
        ),
    ],
    ids=["alone", "nested", "without a mode"],
)
def test_an_unknown_rule_decides_nothing(policy: retention_pb2.RetentionPolicy) -> None:
    with pytest.raises(FormatUnsupportedError, match="use a newer release"):
        policies.decide(policy, [PINNED, NEWEST], NOW)
    with pytest.raises(FormatUnsupportedError, match="use a newer release"):
        policies.describe(policy)


@pytest.mark.parametrize("show", [store.format_policy, policy_message])
@pytest.mark.parametrize(
    "policy", [KeepWeekends(), KeepAny((KeepWeekends(),))], ids=["alone", "nested"]
)
def test_an_unknown_rule_is_neither_printed_nor_sent(
    show: Callable[[RetentionPolicy], object], policy: RetentionPolicy
) -> None:
    with pytest.raises(store.InvalidRequestError, match="got KeepWeekends"):
        show(policy)


def test_the_enum_of_slot_states_has_all_that_the_contract_has() -> None:
    known = {state.value for state in slots.SlotState}
    expected = set(pb.CheckpointRecord.State.values())

    assert expected - {pb.CheckpointRecord.STATE_UNSPECIFIED} == known


@pytest.mark.slow
def test_a_step_in_an_unknown_state_is_neither_taken_over_nor_collected(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    root = tmp_path / "store"
    server = start_server(root=root)
    slot = RunPaths(RUN).checkpoint(1)
    with store.connect(server.address) as client:
        run = client.run(str(RUN))
        for step in (1, 2):
            run.save(step, {"x": np.full(9, step)}).result()
        record = stored_records.read(root, slot, pb.CheckpointRecord)
        record.state = LATER_STATE  # type: ignore[assignment]  # as read from the wire
        stored_records.write(root, slot, record)
        before = stored(root)

        with pytest.raises(store.PreconditionError, match="got 99") as saved:
            run.save(1, {"x": np.zeros(9)}).result()
        (collected,) = client.collect(grace=timedelta(0))

        assert "FORMAT_UNSUPPORTED" == saved.value.reason
        assert "got 99; use a newer release" in collected.postponed
        assert before <= stored(root)


def test_an_announcement_of_an_unknown_kind_is_no_deletion() -> None:
    announcement = pb.Announcement(kind=LATER_STATE)  # type: ignore[arg-type]  # as above

    with pytest.raises(FormatUnsupportedError, match="got 99"):
        events.resolve(1, announcement, None, now=NOW)


def stored(root: Path) -> set[Path]:
    return {path for path in root.rglob("*") if path.is_file()}
