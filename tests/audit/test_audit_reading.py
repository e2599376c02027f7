"""Reading the audit log through a real server: complete, in order, bounded, and only by
callers who may."""

import asyncio
import json
import os
import threading
import uuid
from base64 import urlsafe_b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

import storesvc_client as store
from storesvc.audit.log import AuditLog, AuditObserver
from storesvc.audit.reader import (
    MAX_LINE_BYTES,
    SCAN_BYTES,
    AuditFilter,
    AuditPage,
    AuditReader,
    Bookmark,
    Entry,
)
from storesvc.auth.policy import ROLES, Policy
from storesvc.errors import AuditUnavailableError
from storesvc.format.audit_chain import FIRST, line_digest, make_line
from storesvc.rpc import paging
from storesvc.server.security import error_reason as audit_reason_of
from storesvc_proto.v1 import access_service_pb2 as api
from storesvc_proto.v1 import checkpoint_service_pb2 as checkpoint_api
from storesvc_proto.v1 import upload_service_pb2 as upload_api
from storesvc_proto.v1.access_service_pb2_grpc import AccessServiceStub
from storesvc_proto.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from storesvc_proto.v1.upload_service_pb2_grpc import UploadServiceStub
from tests.support.audited import Audited
from tests.support.contract import Writer
from tests.support.policies import Restricted, restricted
from tests.support.rpcs import outcome_of


def line_values(line: bytes) -> dict[str, Any]:
    """Returns the values of a line that a client sees."""
    found = json.loads(line)
    stage = found["stage"]
    if stage in ("started", "reopened"):
        return {"seq": found["seq"], "stage": stage, "server": found["server"]}
    names = ("seq", "stage", "server", "id", "principal", "authentication", "peer")
    values = {name: found[name] for name in (*names, "method", "detail")}
    values["permissions"] = [
        (p["permission"], p["resource"]) for p in found["permissions"]
    ]
    values["reason"] = found.get("reason", "")
    values["latency_ms"] = found.get("latency_ms")
    missing = found.get("missing")
    values["missing"] = missing and (missing["permission"], missing["resource"])
    values["time"] = found["time"][:26]  # microseconds
    return values


def entry_values(entry: store.AuditEntry) -> dict[str, Any]:
    """Returns the same values of an entry."""
    assert entry.problem == ""
    assert entry.time is not None
    if entry.stage in ("started", "reopened"):
        return {"seq": entry.seq, "stage": entry.stage, "server": entry.server}
    latency = entry.latency
    return {
        "seq": entry.seq,
        "stage": entry.stage,
        "server": entry.server,
        "id": entry.request_id,
        "principal": entry.principal,
        "authentication": entry.authentication,
        "peer": entry.peer,
        "method": entry.method,
        "detail": entry.detail,
        "permissions": [*entry.permissions],
        "reason": entry.reason,
        "missing": entry.missing,
        "latency_ms": None if latency is None else latency / timedelta(milliseconds=1),
        "time": entry.time.strftime("%Y-%m-%dT%H:%M:%S.%f"),
    }


@pytest.mark.slow
def test_an_administrator_reads_all_entries_as_the_file_has_them(
    audited: Callable[..., Audited], tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[[bindings]]\nrole="admin"\nruns=["**"]\nwho=["local"]\n')
    log = audited("--policy", str(policy))
    with pytest.raises(store.UnauthenticatedError):
        store.connect(log.server.address, token="x.y.z")
    with store.connect(log.server.address) as client:
        run = client.run("prod/llama")
        run.save(1, {"w": np.arange(9)}, labels={"secret": "label"}).result()
        run.delete(1)
        entries = client.audit_entries()
        found = [*entries]

    lines = log.file.read_bytes().splitlines()
    assert [line_values(line) for line in reversed(lines)] == [
        entry_values(entry) for entry in found
    ]
    assert ("DeleteCheckpoint", "prod/llama@1") == (
        found[0].method,
        found[0].object_name,
    )
    assert "TOKEN_INVALID" in {entry.reason for entry in found}
    assert entries.server == found[0].server != ""
    assert "secret" not in repr(found)
    assert "x.y.z" not in repr(found)


@contextmanager
def reading(tmp_path: Path) -> Iterator[Restricted]:
    """Serves a store with a policy and an audit log that can be read."""
    log = AuditLog(tmp_path / "audit.log", server="here")
    observer = AuditObserver(log, reason_of=audit_reason_of)
    with restricted(tmp_path / "store", [observer], AuditReader(log)) as server:
        yield server


def test_a_denial_is_listed_with_its_caller_its_object_and_its_reason(
    tmp_path: Path,
) -> None:
    with reading(tmp_path) as server:
        server.policies.bind(
            ("admin", "**", "user:boss"), ("reader", "prod/*", "user:eve")
        )
        channel = server.channel("user:boss")
        Writer(server.address, "prod/llama", 1, channel=channel).save()
        name = "namespaces/prod/runs/llama/checkpoints/1"
        with pytest.raises(grpc.RpcError):
            CheckpointServiceStub(server.channel("user:eve")).DeleteCheckpoint(
                checkpoint_api.DeleteCheckpointRequest(name=name)
            )
        stub = AccessServiceStub(channel)
        response = stub.ListAuditEntries(
            api.ListAuditEntriesRequest(stage=api.AUDIT_STAGE_DENIED)
        )

    (entry,) = response.entries
    assert ("user:eve", "DeleteCheckpoint") == (entry.principal, entry.method)
    assert {"name": name} == dict(entry.detail)
    assert "PERMISSION_DENIED" == entry.reason
    assert "here" == response.server == entry.server


PROD, EVES = "namespaces/prod/runs/llama", "namespaces/lab/runs/eve"
UPLOAD = f"{PROD}/uploads/{'a' * 32}"


@pytest.mark.parametrize(
    ("request_", "call", "name", "permission"),
    [
        (
            api.LendCredentialsRequest(upload=upload_api.WriterRef(upload=UPLOAD)),
            lambda channel: AccessServiceStub(channel).LendCredentials,
            UPLOAD,
            "credentials.lendWrite",
        ),
        (
            api.LendCredentialsRequest(hold=f"{PROD}/holds/{'a' * 32}"),
            lambda channel: AccessServiceStub(channel).LendCredentials,
            f"{PROD}/holds/{'a' * 32}",
            "credentials.lendRead",
        ),
        (
            checkpoint_api.DiffCheckpointsRequest(
                base=f"{PROD}/checkpoints/1", name=f"{EVES}/checkpoints/1"
            ),
            lambda channel: CheckpointServiceStub(channel).DiffCheckpoints,
            f"{EVES}/checkpoints/1",
            "checkpoints.read",
        ),
    ],
    ids=["lend an upload", "lend a hold", "diff"],
)
def test_a_denial_is_found_by_the_run_that_was_denied(
    tmp_path: Path, request_: Any, call: Any, name: str, permission: str
) -> None:
    with reading(tmp_path) as server:
        server.policies.bind(
            ("admin", "**", "user:boss"), ("writer", "lab/*", "user:eve")
        )
        with pytest.raises(grpc.RpcError):
            list(call(server.channel("user:eve"))(request_))
        stub = AccessServiceStub(server.channel("user:boss"))
        response = stub.ListAuditEntries(
            api.ListAuditEntriesRequest(stage=api.AUDIT_STAGE_DENIED, resource=PROD)
        )

    (entry,) = response.entries
    assert {"name": name} == dict(entry.detail)
    assert (permission, "prod/llama") == (
        entry.missing.permission,
        entry.missing.resource,
    )


@pytest.mark.parametrize(
    ("request_id", "name"),
    [
        ("x" * 1000, PROD),
        ("a" * 32, PROD),
        (str(uuid.UUID(int=1)), f"{PROD}/uploads/{uuid.UUID(int=1).hex}"),
    ],
    ids=range(3),
)
def test_a_denied_upload_is_recorded_by_its_id_if_that_is_one(
    tmp_path: Path, request_id: str, name: str
) -> None:
    file = tmp_path / "audit.log"
    with reading(tmp_path) as server:
        server.policies.bind(("reader", "prod/*", "user:eve"))
        opening = upload_api.BeginUploadRequest(parent=PROD, request_id=request_id)
        stub = UploadServiceStub(server.channel("user:eve"))
        reason = outcome_of(lambda: stub.BeginUpload(iter([opening])))
        (line,) = [json.loads(each) for each in file.read_bytes().splitlines()[1:]]

    assert "PERMISSION_DENIED" == reason
    assert name == line["detail"]["name"]


def test_callers_without_a_name_are_listed_by_their_authentication(
    tmp_path: Path,
) -> None:
    with reading(tmp_path) as server:
        server.policies.bind(("admin", "**", "user:boss"))
        for channel in (
            server.channel("user:eve"),
            grpc.insecure_channel(server.address),
        ):
            with pytest.raises(grpc.RpcError):
                CheckpointServiceStub(channel).GetRun(
                    checkpoint_api.GetRunRequest(name=PROD)
                )
        stub = AccessServiceStub(server.channel("user:boss"))
        request = api.ListAuditEntriesRequest(
            authentication=api.AUTHENTICATION_ANONYMOUS
        )
        (entry,) = stub.ListAuditEntries(request).entries
        request.authentication = cast("Any", 7)  # of a newer client
        with pytest.raises(grpc.RpcError, match="use a newer server"):
            stub.ListAuditEntries(request)

    assert ("", "GetRun") == (entry.principal, entry.method)
    assert api.AUDIT_STAGE_DENIED == entry.stage


def test_only_an_administrator_of_all_runs_reads_the_log(tmp_path: Path) -> None:
    found = {}
    with reading(tmp_path) as server:
        stub = AccessServiceStub(server.channel("user:me"))
        read = partial(stub.ListAuditEntries, api.ListAuditEntriesRequest())
        for role in ROLES:
            for runs in ("prod/*", "**"):
                server.policies.bind((role, runs, "user:me"))
                found[role, runs] = outcome_of(read)
        server.policies.policy = Policy(anonymous="reader")
        anonymous = outcome_of(read)

    assert [("admin", "**")] == [
        cell for cell, result in found.items() if result == "OK"
    ]
    assert {"OK", "PERMISSION_DENIED"} == {*found.values()}
    assert "PERMISSION_DENIED" == anonymous


def test_a_server_without_a_log_says_so(tmp_path: Path) -> None:
    with (
        store.connect((tmp_path / "store").as_uri()) as client,
        pytest.raises(store.PreconditionError, match="--audit-log") as caught,
    ):
        next(client.audit_entries())

    assert "AUDIT_LOG_DISABLED" == caught.value.reason


@pytest.mark.slow
def test_reading_the_log_is_recorded_like_any_read(
    audited: Callable[..., Audited],
) -> None:
    log = audited("--audit-reads")
    with store.connect(log.server.address) as client:
        assert [*client.audit_entries()]

    assert ("ended", "ListAuditEntries") in log.calls()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"principal": "local", "method": "DeleteTag"},
            [("intent", "a"), ("ended", "a")],
        ),
        ({"parent": "prod/b", "method": "SetTag"}, [("intent", "b"), ("ended", "b")]),
        (
            {"parent": "prod", "method": "SetTag"},
            [("intent", "a"), ("ended", "a"), ("intent", "b"), ("ended", "b")],
        ),
        ({"parent": "other"}, []),
        ({"principal": "user:a"}, []),
        (
            {"authentication": "local", "method": "DeleteTag"},
            [("intent", "a"), ("ended", "a")],
        ),
        ({"authentication": "anonymous"}, []),
        ({"stage": "intent", "method": "DeleteTag"}, [("intent", "a")]),
        ({"until": datetime(2026, 1, 1, tzinfo=UTC)}, []),
        ({"since": datetime(2200, 1, 1, tzinfo=UTC)}, []),
        (
            {"since": datetime(2020, 1, 1, tzinfo=UTC), "method": "DeleteTag"},
            [("intent", "a"), ("ended", "a")],
        ),
    ],
    ids=range(11),
)
def test_entries_are_filtered_by_fields(
    tagged: store.Client, arguments: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    found = [*tagged.audit_entries(**arguments)]

    assert expected == [
        (entry.stage, entry.object_name.split("/")[1].split(" ")[0])
        for entry in reversed(found)
    ]


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[store.Client]:
    """A client of a server whose log has tags of two runs."""
    folder = tmp_path_factory.mktemp("tagged")
    log = Audited(folder, folder / "audit.log")
    with store.connect(log.server.address) as client:
        for name in ("a", "b"):
            run = client.run(f"prod/{name}")
            run.save(1, {"w": np.arange(3)}).result()
            run.tags.set("best", 1)
        client.run("prod/a").tags.delete("best")
        yield client
    log.server.stop()


EAST, WEST = (timezone(timedelta(hours=hours)) for hours in (5, -5))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"method": "DeleteChekpoint"}, "did you mean DeleteCheckpoint"),
        ({"method": ""}, "method="),
        ({"principal": 7}, "principal="),
        ({"stage": "begun"}, "expected one of 'started'"),
        ({"parent": "a b"}, "a b"),
        ({"since": datetime(2026, 1, 1)}, "with a time zone"),  # noqa: DTZ001 - wrong
        ({"until": 7}, "with a time zone"),
        ({"since": datetime.min.replace(tzinfo=EAST)}, "in the years 1 to 9999"),
        ({"until": datetime.max.replace(tzinfo=WEST)}, "in the years 1 to 9999"),
        ({"authentication": "unknown"}, "expected one of 'anonymous', 'local'"),
        ({"page_token": "x"}, "page_token"),
        ({"page_token": 5}, "page_token"),
        ({"page_token": "\ud800"}, "page_token"),
    ],
    ids=range(13),
)
def test_an_argument_that_is_not_valid_is_rejected(
    tagged: store.Client, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(store.InvalidRequestError, match=said):
        next(tagged.audit_entries(**arguments))


def test_a_token_of_another_list_is_rejected(tagged: store.Client) -> None:
    entries = tagged.audit_entries(method="SetTag")
    assert len(entries.read_page(3)) == 3
    token = entries.page_token

    with pytest.raises(store.InvalidRequestError, match="page_token"):
        tagged.audit_entries(method="DeleteTag", page_token=token).read_page()
    (second,) = tagged.audit_entries(method="SetTag", page_token=token).read_page()
    assert "prod/a tag best" == second.object_name


# --- the reader -------------------------------------------------------------------


ALL = AuditFilter()


class Reading:
    """An audit log on its own, and its reader."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.log = AuditLog(file, server="here")
        self.reader = AuditReader(self.log)

    def page(
        self, after: Bookmark | None = None, size: int = 1000, wanted: AuditFilter = ALL
    ) -> AuditPage:
        """Reads a page."""
        return asyncio.run(self.reader.page(wanted, after=after, size=size))

    def all(self, size: int = 1000) -> list[int | str]:
        """Returns the numbers of all entries, or what is wrong with a line."""
        found, after = list[int | str](), None
        while True:
            page = self.page(after, size)
            found += [
                row.seq if isinstance(row, Entry) else row.problem for row in page.rows
            ]
            if page.after is None:
                return found
            after = Bookmark.parse(str(page.after))

    def append(self, count: int) -> None:
        """Appends entries."""

        async def write() -> None:
            for _ in range(count):
                await self.log.write({"time": TIME, "stage": "ended"})

        asyncio.run(write())


TIME = "2026-11-24T07:55:00.123456789Z"


def lines_of(count: int, **fields: Any) -> list[bytes]:
    """Returns the lines of a log."""
    lines, prev = list[bytes](), FIRST
    for seq in range(1, count + 1):
        values = {"time": TIME, "stage": "ended", **fields}
        lines.append(make_line(values, seq=seq, prev=prev) + b"\n")
        prev = line_digest(lines[-1][:-1])
    return lines


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_pages_join_while_entries_are_appended(tmp_path: Path, size: int) -> None:
    log = Reading(tmp_path / "audit.log")
    log.append(40)
    found, after = list[int](), None
    while True:
        page = log.page(after, size)
        found += [row.seq for row in page.rows if isinstance(row, Entry)]
        log.append(3)
        if page.after is None:
            break
        after = Bookmark.parse(str(page.after))

    assert [*range(41, 0, -1)] == found


def test_an_empty_file_has_the_entry_of_the_start_only(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    file.touch()

    assert [1] == Reading(file).all()


def test_a_file_that_was_emptied_has_no_entries(tmp_path: Path) -> None:
    log = Reading(tmp_path / "audit.log")
    os.truncate(log.file, 0)

    assert [] == log.all()
    log.file.write_bytes(b"\n\n\n")
    assert [] == log.all()


def test_what_is_no_entry_is_marked_and_the_others_are_read(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    first, second = lines_of(2)
    file.write_bytes(first + b"a secret\n\n" + second + b'{"seq":3,"ti')
    log = Reading(file)  # completes the line

    log.append(1)
    with file.open("ab") as more:
        more.write(b"again a sec")
    found = log.all(size=1)

    tail, *entries = found
    assert "the line has no end" in str(tail)
    assert [4, 3] == entries[:2]
    assert "was cut off, as by a crash of the server" in str(entries[2])
    assert 2 == entries[3]
    assert f"8 bytes at byte {len(first)}" in str(entries[4])
    assert [1] == entries[5:]
    assert "sec" not in "".join(map(str, found))


@pytest.mark.parametrize("size", [1, 1000])
def test_long_lines_are_read_and_too_long_ones_are_marked(
    tmp_path: Path, size: int
) -> None:
    file = tmp_path / "audit.log"
    long = lines_of(2, principal="x" * (1 << 20))
    huge = b"y" * (2 * SCAN_BYTES + 17) + b"\n"
    file.write_bytes(long[0] + huge + long[1] + b"z" * MAX_LINE_BYTES + b"\n")
    log = Reading(file)

    started, ended, second, marked, first = log.all(size)

    assert [1, 2, 1] == [started, second, first]
    assert f"{MAX_LINE_BYTES:,} bytes at byte" in str(ended)
    assert f"{len(huge) - 1:,} bytes at byte {len(long[0]):,}: expected a line of" in (
        str(marked)
    )


@pytest.mark.slow
def test_a_page_of_a_large_log_reads_a_bounded_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread, parts = os.pread, list[int]()

    def counted(*arguments: Any) -> bytes:
        part = pread(*arguments)
        parts.append(len(part))
        return part

    file = tmp_path / "audit.log"
    (line,) = lines_of(1, principal="user:a", method="SetTag")
    file.write_bytes(line * 200_000)
    log = Reading(file)
    whole = file.stat().st_size
    assert whole > 4 * SCAN_BYTES

    monkeypatch.setattr(os, "pread", counted)
    newest = log.page(size=100)
    read_for_newest = sum(parts)
    rare = log.page(wanted=AuditFilter(principal="user:b"))
    read_for_rare = sum(parts) - read_for_newest

    print(f"{whole:,} bytes; read {read_for_newest:,} and {read_for_rare:,}")
    assert len(newest.rows) == 100
    assert read_for_newest <= 256 << 10
    assert rare.rows == ()
    assert rare.after is not None
    assert read_for_rare <= SCAN_BYTES + (64 << 10)


def test_an_entry_that_is_rare_is_found_over_many_pages(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    rare = make_line(
        {"time": TIME, "stage": "ended", "principal": "user:b"}, seq=1, prev=FIRST
    )
    padding = lines_of(1, principal="user:a", peer="x" * 9000)[0] * 2000
    file.write_bytes(rare + b"\n" + padding)
    log, wanted = Reading(file), AuditFilter(principal="user:b")

    page, pages = log.page(wanted=wanted), 1
    while page.after is not None:
        assert page.rows == ()
        page, pages = log.page(page.after, wanted=wanted), pages + 1

    assert [1] == [row.seq for row in page.rows if isinstance(row, Entry)]
    assert pages == -(-file.stat().st_size // SCAN_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["renamed", "deleted", "copied and truncated"])
def test_a_token_of_a_file_that_was_rotated_is_rejected(
    tagged_log: Audited, how: str
) -> None:
    log = tagged_log
    with store.connect(log.server.address) as client:
        run = client.run("prod/a")
        entries = client.audit_entries()
        assert len(entries.read_page(2)) == 2
        if how == "renamed":
            log.file.rename(log.file.with_suffix(".1"))
        elif how == "deleted":
            log.file.unlink()
        else:
            os.truncate(log.file, 0)
        run.tags.set("next", 1)

        with pytest.raises(store.InvalidRequestError, match="rotated") as caught:
            entries.read_page(2)
        first, *rest = client.audit_entries()

    assert "INVALID_PAGE_TOKEN" == caught.value.reason
    assert ("ended", "SetTag") == (first.stage, first.method)
    assert len(rest) < 3


@pytest.mark.slow
def test_a_token_of_another_server_is_rejected(
    tagged: store.Client, tagged_log: Audited
) -> None:
    entries = tagged.audit_entries()
    entries.read_page(2)

    with (
        store.connect(tagged_log.server.address) as other,
        pytest.raises(store.InvalidRequestError, match="was of another server"),
    ):
        other.audit_entries(page_token=entries.page_token).read_page()


@pytest.mark.parametrize(
    "place",
    [
        "{end}:5:0",  # before the offset
        "{end}:{end}:0",
        "1:{long}:0",  # a line that is not too long
        "1:{behind}:0",
        "-1::0",
        "1:-" + "9" * 5000 + ":0",
        "9" * 5000 + "::0",
        "{end}::2",
        "٣::0",
    ],
    ids=range(9),
)
def test_a_forged_token_is_rejected(tmp_path: Path, place: str) -> None:
    file = tmp_path / "audit.log"
    file.write_bytes(lines_of(1)[0] + b"x" * (2 * MAX_LINE_BYTES) + b"\n")
    with reading(tmp_path) as server:
        stub = AccessServiceStub(server.channel("user:boss"))
        whole = api.ListAuditEntriesRequest(page_size=1)
        data = urlsafe_b64decode(stub.ListAuditEntries(whole).next_page_token)
        stamp = data.decode(errors="replace").rpartition(":")[2]
        end = file.stat().st_size
        text = place.format(end=end, long=1 + MAX_LINE_BYTES, behind=end + 1)
        token = paging.page_token("audit entries", f"{text}:{stamp}")
        request = api.ListAuditEntriesRequest(page_token=token)
        reason = outcome_of(lambda: stub.ListAuditEntries(request))

    assert "INVALID_PAGE_TOKEN" == reason


@pytest.fixture
def tagged_log(audited: Callable[..., Audited]) -> Audited:
    """A server with some entries in its log."""
    log = audited()
    with store.connect(log.server.address) as client:
        run = client.run("prod/a")
        run.save(1, {"w": np.arange(3)}).result()
        for tag in ("a", "b", "c"):
            run.tags.set(tag, 1)
    return log


def test_a_file_that_is_renamed_is_read_until_the_next_entry(tmp_path: Path) -> None:
    log = Reading(tmp_path / "audit.log")
    log.append(9)
    first = log.page(size=4)
    log.file.rename(tmp_path / "audit.log.1")

    rest = log.page(first.after)

    assert [*range(10, 0, -1)] == [
        row.seq for row in (*first.rows, *rest.rows) if isinstance(row, Entry)
    ]


def test_pages_that_are_cancelled_keep_no_other_waiting(tmp_path: Path) -> None:
    log = Reading(tmp_path / "audit.log")
    log.append(5)

    async def read() -> AuditPage:
        pages = [
            asyncio.create_task(log.reader.page(ALL, after=None, size=9))
            for _ in range(4)
        ]
        await asyncio.sleep(0)
        for page in pages:
            page.cancel()
        return await log.reader.page(ALL, after=None, size=9)

    assert len(asyncio.run(read()).rows) == 6


def test_pages_that_are_cancelled_on_a_disk_that_hangs_occupy_one_thread(
    tmp_path: Path,
) -> None:
    log = Reading(tmp_path / "audit.log")
    log.append(5)

    async def read() -> tuple[set[threading.Thread], AuditPage]:
        before = set(threading.enumerate())
        with log.log._durable:  # as a sync that does not return
            for _ in range(8):
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await log.reader.page(ALL, after=None, size=9)
            added = set(threading.enumerate()) - before
        return added, await log.reader.page(ALL, after=None, size=9)

    added, page = asyncio.run(read())

    assert 1 == len(added)
    assert len(page.rows) == 6


@pytest.mark.slow
def test_a_log_that_was_closed_is_an_error(tmp_path: Path) -> None:
    log = Reading(tmp_path / "audit.log")
    asyncio.run(log.log.close())

    with pytest.raises(AuditUnavailableError, match="cannot be read"):
        log.page()
