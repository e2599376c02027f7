"""The audit log of a real server: complete, in order, and never silently incomplete."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc.audit.log import DENIAL_BURST, DENIAL_SECONDS, AuditLog
from storesvc.auth.call import _RPCS_BY_FACTS, RPCS
from storesvc.format.audit_chain import (
    FIRST,
    line_digest,
    make_line,
    split_lines,
    verify,
)
from storesvc_client.cli import main
from storesvc_proto.v1 import access_service_pb2 as access_api
from storesvc_proto.v1.access_service_pb2_grpc import AccessServiceStub
from tests.support.audited import Audited
from tests.support.rpcs import NAMES
from tests.support.server_process import EndedError
from tests.support.small_disk import small_disk
from tests.support.tokens import keys_document, signed


def verified(*files: Path) -> Any:
    """Returns the result of the verification of a log."""
    return verify(
        line for file in files for line in split_lines(file.read_bytes(), file.name)
    )


def test_each_rpc_of_the_contract_has_one_row() -> None:
    listed = " ".join(_RPCS_BY_FACTS.values()).split()
    assert sorted(NAMES) == sorted(listed)
    assert NAMES == RPCS.keys()


def test_changes_are_recorded_with_caller_and_object(
    audited: Callable[..., Audited],
) -> None:
    log = audited()
    with store.connect(log.server.address) as client:
        run = client.run("prod/llama")
        run.save(0, {"w": np.arange(9)}).result()  # in one call
        run.save(1, {"w": np.zeros(1 << 18)}, labels={"secret": "label"}).result()
        run.tags.set("best", 1)
        run.restore(1)
        run.tags.delete("best")
        run.delete(1)

    assert log.calls() == [
        ("intent", "CreateCheckpoint"),
        ("ended", "CreateCheckpoint"),
        ("intent", "BeginUpload"),
        ("ended", "BeginUpload"),
        ("intent", "CommitUpload"),
        ("ended", "CommitUpload"),
        ("intent", "SetTag"),
        ("ended", "SetTag"),
        ("ended", "CreateHold"),  # of the restore
        ("ended", "DeleteHold"),
        ("intent", "DeleteTag"),
        ("ended", "DeleteTag"),
        ("intent", "DeleteCheckpoint"),
        ("ended", "DeleteCheckpoint"),
    ]
    created = log.entries()[1]["detail"]
    assert created["name"].startswith("namespaces/prod/runs/llama/uploads/")
    assert created["step"] == "0"
    last = log.entries()[-1]
    assert last["principal"] == last["authentication"] == "local"
    assert last["permissions"] == [
        {"permission": "checkpoints.delete", "resource": "prod/llama"}
    ]
    assert last["detail"] == {"name": "namespaces/prod/runs/llama/checkpoints/1"}
    assert last["reason"] == ""
    assert last["latency_ms"] > 0
    assert log.entries()[-2]["id"] == last["id"]
    assert "secret" not in log.file.read_text()
    assert verified(log.file).broken is None


@pytest.mark.slow
def test_denials_are_recorded_with_their_reason(
    audited: Callable[..., Audited], tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[[bindings]]\nrole="reader"\nruns=["prod/a"]\nwho=["local"]\n')
    log = audited("--policy", str(policy))
    with store.connect(log.server.address) as client:
        with pytest.raises(store.PermissionDeniedError) as denied:
            client.run("prod/a").delete(1)
        with pytest.raises(store.NotFoundError):
            client.run("prod/hidden").latest()
        with pytest.raises(store.NotFoundError):
            client.run("prod/a").latest()
    with pytest.raises(store.UnauthenticatedError):
        store.connect(log.server.address, token="x.y.z")

    found = [
        (e["method"], e["reason"]) for e in log.entries() if e["stage"] == "denied"
    ]
    assert found == [
        ("DeleteCheckpoint", "PERMISSION_DENIED"),
        ("GetCheckpoint", "RUN_NOT_FOUND"),
        ("GetServerInfo", "TOKEN_INVALID"),
    ]
    ids = [e["id"] for e in log.entries() if e["stage"] == "denied"]
    assert denied.value.metadata["request_id"] == ids[0]
    assert "x.y.z" not in log.file.read_text()


POLICY: Final = """
[[issuers]]
name = "corp"
issuer = "https://issuer.example"
audiences = ["storesvc"]
jwks_file = "{keys}"
principal = "user:{{sub}}"

[[bindings]]
role = "writer"
runs = ["prod/*"]
who = ["user:trainer"]

[[bindings]]
role = "manager"
runs = ["prod/*"]
who = ["user:boss"]
"""


def policy_of(folder: Path) -> tuple[str, str]:
    """Returns the options of a server with a policy."""
    keys, policy = folder / "keys.json", folder / "policy.toml"
    keys.write_text(keys_document())
    policy.write_text(POLICY.format(keys=keys))
    return "--policy", str(policy)


@pytest.mark.slow
def test_a_flood_of_denials_is_counted_and_does_not_fill_the_log(
    audited: Callable[..., Audited], tmp_path: Path
) -> None:
    log = audited(*policy_of(tmp_path))
    stub = AccessServiceStub(grpc.insecure_channel(log.server.address))
    # strangers have one allowance: without a valid token, and without a binding
    callers = [f"Bearer {token}" for token in ("x", signed("eve"), signed("mallory"))]
    request = access_api.GetQuotaRequest(parent="namespaces/prod")
    began = time.monotonic()
    for _ in range(3):
        burst = [
            stub.GetQuota.future(request, metadata=(("authorization", caller),))
            for caller in callers
            for _ in range(DENIAL_BURST // 5)
        ]
        assert all(call.code() is not grpc.StatusCode.OK for call in burst)
    with (
        store.connect(log.server.address, token=signed("trainer")) as client,
        pytest.raises(store.PermissionDeniedError),
    ):
        client.run("prod/a").delete(1)
    for _ in range(10):
        with pytest.raises(store.UnauthenticatedError):
            store.connect(log.server.address, token="x.y.z")
    log.server.stop()

    denied = [entry for entry in log.entries() if entry["stage"] == "denied"]
    named = next(each for each in denied if each.get("principal") == "user:trainer")
    assert ("DeleteCheckpoint", 1) <= (named["method"], named["left_out"])
    last = denied.pop()  # which the server has written when it ended
    assert last.keys() == {"seq", "server", "time", "stage", "left_out", "prev"}
    refilled = (time.monotonic() - began) / DENIAL_SECONDS
    assert DENIAL_BURST <= len(denied) - 1 <= DENIAL_BURST + refilled
    left_out = sum(each.get("left_out", 0) for each in (*denied, last))
    assert 9 * (DENIAL_BURST // 5) + 10 == len(denied) - 1 + left_out
    assert verified(log.file).broken is None


@pytest.mark.slow
def test_denials_leave_the_last_space_of_a_disk_to_changes(
    audited: Callable[..., Audited], tmp_path: Path
) -> None:
    mounted = tmp_path / "disk"
    with small_disk(mounted, size_bytes=256 << 10):
        (mounted / "filler").write_bytes(bytes(236 << 10))
        log = audited(*policy_of(tmp_path), log=mounted / "audit.log")
        for _ in range(3):
            with pytest.raises(store.UnauthenticatedError):
                store.connect(log.server.address, token="x.y.z")
        with store.connect(log.server.address, token=signed("trainer")) as client:
            client.run("prod/a").save(1, {"w": np.arange(9)}).result()
        log.server.stop()

        (denied,) = [each for each in log.entries() if each["stage"] == "denied"]
        assert 3 == denied["left_out"]


@pytest.mark.slow
def test_a_second_server_does_not_write_the_log_of_another(
    audited: Callable[..., Audited], tmp_path: Path
) -> None:
    log = audited()
    (tmp_path / "other").mkdir()
    with pytest.raises(EndedError, match="another server writes it, and each needs a"):
        Audited(tmp_path / "other", log.file)
    log.server.kill()
    log.server.start()

    assert verified(log.file).broken is None


@pytest.mark.slow
def test_no_change_is_made_that_cannot_be_recorded(
    audited: Callable[..., Audited], tmp_path: Path
) -> None:
    log = audited(*policy_of(tmp_path))
    with (
        store.connect(log.server.address, token=signed("boss"), timeout=1) as client,
        store.connect(log.server.address, token=signed("trainer")) as other,
    ):
        run = client.run("prod/a")
        for step in (1, 2):
            run.save(step, {"w": np.arange(9)}).result()
        run.update(1, pinned=True)
        run.tags.set("best", 1)
        changes: dict[str, Callable[[], object]] = {
            "unpin": lambda: run.update(1, pinned=False),
            "pin": lambda: run.update(2, pinned=True),
            "metrics": lambda: run.update(2, metrics={"loss": 1.0}),
            "protect": lambda: run.tags.set("best", 1, protected=True),
            "move a tag": lambda: run.tags.set("best", 2),
            "delete a tag": lambda: run.tags.delete("best"),
            "release the hold of another": lambda: run.holds.release(held.id),
            "delete": lambda: run.delete(2),
            "collect": lambda: [*client.collect("prod")],
            "policy": lambda: run.configure(labels={"a": "b"}),
        }
        with other.run("prod/a").holds.create(1) as _:
            (held,) = run.holds.list()
            client._connection.patience = 1  # the error is transient
            kept = log.file.rename(log.file.with_suffix(".kept"))
            log.file.mkdir()  # no entry can be written
            before = [*run.checkpoints()], [*run.tags.list()], [*run.holds.list()]
            made = []
            for name, change in changes.items():
                try:
                    change()
                    made.append(name)
                except store.StoreError as e:
                    assert "AUDIT_UNAVAILABLE" == e.reason, name
            assert [] == made
            after = [*run.checkpoints()], [*run.tags.list()], [*run.holds.list()]
            assert [each.id for each in before[2]] == [each.id for each in after[2]]
            assert before[:2] == after[:2]
            assert np.array_equal(run.restore(1)["w"], np.arange(9))  # own holds
            log.file.rmdir()
            kept.rename(log.file)
            run.holds.release(held.id)
            assert [] == [*run.holds.list()]

    assert ("intent", "DeleteHold") in log.calls()
    assert verified(log.file).broken is None


@pytest.mark.slow
def test_reads_are_recorded_on_request(audited: Callable[..., Audited]) -> None:
    log = audited("--audit-reads")
    with store.connect(log.server.address) as client:
        list(client.runs())

    assert ("ended", "ListRuns") in log.calls()


@pytest.mark.slow
def test_a_log_that_is_rotated_continues_its_chain(
    audited: Callable[..., Audited],
) -> None:
    log = audited()
    with store.connect(log.server.address) as client:
        run = client.run("prod/llama")
        run.save(1, {"w": np.arange(9)}).result()
        old = log.file.rename(log.file.with_suffix(".1"))
        os.kill(log.server.pid, signal.SIGHUP)
        run.save(2, {"w": np.arange(9)}).result()
        older = old.rename(old.with_suffix(".2"))
        newer = log.file.rename(log.file.with_suffix(".1"))
        run.save(3, {"w": np.arange(9)}).result()

    found = verified(older, newer, log.file)
    assert found.broken is None
    assert (found.first, found.last) == (1, found.lines)
    assert verified(older, log.file).broken is not None


@pytest.mark.slow
def test_a_log_continues_after_a_restart_and_a_torn_line(
    audited: Callable[..., Audited],
) -> None:
    log = audited()
    log.server.kill()
    with log.file.open("ab") as file:
        file.write(b'{"seq":2,"time"')
    log.server.start()
    with store.connect(log.server.address) as client:
        client.run("prod/llama").save(1, {"w": np.arange(9)}).result()

    found = verified(log.file)
    assert (found.broken, found.torn) == (None, 1)
    assert found.last == found.lines - 1


def set_tags(run: store.Run) -> None:
    """Sets tags until the server is gone."""
    for number in range(10**6):
        run.tags.set(f"tag-{number}", 0)


def delete_all(run: store.Run) -> None:
    """Deletes all checkpoints but the last one."""
    for step in run.steps()[:-1]:
        run.delete(step)


def fill(file: Path) -> None:
    """Fills the disk of a file to its last page."""
    opened = os.open(file, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while True:
            os.write(opened, b"x" * 1024)
    os.close(opened)


@pytest.mark.slow
def test_a_log_is_whole_after_a_server_is_killed_at_work(
    audited: Callable[..., Audited],
) -> None:
    log = audited()
    for turn in range(5):
        with store.connect(log.server.address) as client:
            run = client.run(f"prod/turn-{turn}")
            run.save(0, {"w": np.arange(9)}).result()
            killer = threading.Timer(0.2, log.server.kill)
            killer.start()
            client._connection.patience = 0.2  # it ends with the server
            with pytest.raises(store.StoreError):
                set_tags(run)
            killer.join()
        log.server.start()

    assert verified(log.file).broken is None


@pytest.mark.slow
@pytest.mark.soak
def test_a_full_disk_refuses_commits_and_deletions_and_serves_reads(
    audited: Callable[..., Audited], tmp_path: Path
) -> None:
    mounted = tmp_path / "disk"
    with small_disk(mounted, size_bytes=64 << 10):
        log = audited(log=mounted / "audit.log")
        with store.connect(log.server.address, timeout=5) as client:
            run = client.run("prod/llama")
            for step in range(20):
                run.save(step, {"w": np.arange(9)}).result()
            client._connection.patience = 3.0  # the error is transient
            filler = mounted / "filler"
            fill(filler)

            # The last page of the log has room for some entries.
            with pytest.raises(store.StoreError) as deleted:
                delete_all(run)
            steps = run.steps()
            with pytest.raises(store.StoreError) as saved:
                run.save(20, {"w": np.arange(9)}).result(timeout=60)

            assert deleted.value.reason == "AUDIT_UNAVAILABLE"
            assert "cannot be recorded" in str(saved.value)
            assert steps == run.steps()
            assert np.array_equal(run.restore(19)["w"], np.arange(9))
            filler.unlink()
            run.delete(19)
        assert verified(log.file).broken is None


async def test_concurrent_entries_share_syncs(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.log", server="me")
    before = log.syncs
    await asyncio.gather(*(log.write({"number": n}) for n in range(200)))
    syncs = log.syncs - before
    await log.close()

    print(f"200 entries, {syncs} syncs")
    assert syncs < 20
    assert verified(tmp_path / "audit.log").lines == 201


def chain(count: int) -> list[bytes]:
    """Returns the lines of a log."""
    lines: list[bytes] = []
    prev = FIRST
    for seq in range(1, count + 1):
        lines.append(make_line({"value": seq % 3}, seq=seq, prev=prev))
        prev = line_digest(lines[-1])
    return lines


@given(st.integers(2, 12), st.data())
def test_a_changed_removed_added_or_moved_line_is_found(
    count: int, data: st.DataObject
) -> None:
    lines = chain(count)
    assert verify(("log", line) for line in lines).broken is None
    at = data.draw(st.integers(0, count - 2))
    other = data.draw(st.integers(0, count - 1).filter(lambda n: n != at))
    kind = data.draw(st.sampled_from(["change", "remove", "repeat", "swap"]))
    if kind == "change":
        lines[at] = lines[at].replace(b'"value":', b'"valve":')
    elif kind == "remove" and at:
        del lines[at]
    elif kind == "repeat":
        lines.insert(other, lines[at])
    else:
        lines[at], lines[other] = lines[other], lines[at]

    assert verify(("log", line) for line in lines).broken is not None


def test_audit_verify_finds_a_head_and_an_end_that_were_removed(tmp_path: Path) -> None:
    file, lines = tmp_path / "audit.log", chain(5)
    digests = [line_digest(line) for line in lines]

    def verify_lines(first: int, last: int, *options: str) -> str:
        file.write_bytes(b"".join(line + b"\n" for line in lines[first:last]))
        done = CliRunner().invoke(main, ["audit", "verify", str(file), *options])
        return f"{done.exit_code}: {done.output}"

    assert "0: 5 lines, 1 to 5" in (said := verify_lines(0, 5))
    assert digests[4] in said
    assert "1: " in (said := verify_lines(2, 5))
    assert "expected the first line of the log, got the line 3" in said
    assert "--after" in said
    assert "0: 3 lines, 3 to 5" in verify_lines(2, 5, "--after", digests[1])
    assert "1: " in verify_lines(3, 5, "--after", digests[1])
    assert "0: 3 lines, 1 to 3" in verify_lines(0, 3)  # nothing in it shows the end
    assert "0: 5 lines" in verify_lines(0, 5, "--has", digests[3], "--has", digests[4])
    said = verify_lines(0, 3, "--has", digests[3])
    assert f"expected a line with the digest {digests[3]}, got none" in said
    assert "1: " in said


@pytest.mark.slow
def test_the_log_of_the_server_has_the_id_of_each_call(
    audited: Callable[..., Audited],
) -> None:
    log = audited()
    with store.connect(log.server.address) as client:
        client.run("prod/llama").save(1, {"w": np.arange(9)}).result()

    (commit,) = [
        entry
        for entry in log.entries()
        if (entry["stage"], entry.get("method")) == ("ended", "CreateCheckpoint")
    ]
    assert f"[{commit['id']}] CreateCheckpoint prod/llama@1" in log.server.log
