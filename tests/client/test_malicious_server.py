"""A client of a malicious or broken server raises typed errors, in bounded memory."""

import resource
from collections.abc import Callable, Iterator
from itertools import repeat

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

import storesvc_client as store
from storesvc_proto.v1 import access_service_pb2 as access_api
from tests.client.malicious_server import PART_BYTES, Answers, malicious, manifest_of

MEMORY_BYTES = 1 << 40
"""Largest allocation of a read; the system may grant more memory than it has."""


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Fails allocations of more than ``MEMORY_BYTES``."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def endless(manifest: bytes) -> Iterator[bytes]:
    del manifest
    return repeat(bytes(PART_BYTES))


READS: dict[str, tuple[Callable[[], Answers], type[store.StoreError], str]] = {
    "a manifest that never ends": (
        lambda: Answers(parts=endless),
        store.DataLossError,
        "more than the",
    ),
    "a manifest of an exabyte": (
        lambda: Answers(changes={"manifest_bytes": 1 << 60}, parts=endless),
        store.DataLossError,
        "announced a manifest of",
    ),
    "a manifest of less than nothing": (
        lambda: Answers(changes={"manifest_bytes": -1}),
        store.DataLossError,
        "announced a manifest of -1 bytes",
    ),
    "a manifest that is none": (
        lambda: Answers(manifest=b"\xff" * 99),
        store.DataLossError,
        "manifest",
    ),
    "a leaf of more than there is memory": (
        lambda: Answers(
            manifest=manifest_of(2 * MEMORY_BYTES, chunk=1 << 26),
            chunks=lambda: repeat(bytes(500)),
        ),
        store.LimitError,
        f"leaf 'x': expected to allocate {2 * MEMORY_BYTES} bytes",
    ),
    "chunks that never end": (
        lambda: Answers(chunks=lambda: repeat(bytes(500))),
        store.DataLossError,
        "which were not requested",
    ),
    "a chunk that is larger than it can be": (
        lambda: Answers(chunks=lambda: iter([bytes(5000)])),
        store.DataLossError,
        "which were not requested",
    ),
}


@pytest.mark.usefixtures("bounded_memory")
@pytest.mark.parametrize("case", READS)
def test_a_malformed_response_to_a_read_is_a_typed_error(case: str) -> None:
    answers, error, said = READS[case]
    with (
        malicious(answers()) as address,
        store.connect(address, timeout=20) as client,
        pytest.raises(error, match=said),
    ):
        list(client.run("ns/r").open(1).read(["x"]))


@pytest.mark.parametrize("name", ["", "namespaces/../runs/x\x1b[2J/checkpoints/1"])
def test_an_invalid_checkpoint_name_in_a_response_is_data_loss(name: str) -> None:
    with (
        malicious(Answers(changes={"name": name})) as address,
        store.connect(address) as client,
        pytest.raises(store.DataLossError) as caught,
    ):
        list(client.run("ns/r").checkpoints())

    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        access_api.AuditEntry(seq=1, time=Timestamp(seconds=seconds))
        for seconds in (-(2**63), -62135596800, -1, 253402300799, 2**63 - 1)
    ]
    + [
        access_api.AuditEntry(seq=1, time=Timestamp(nanos=-1)),
        access_api.AuditEntry(seq=1, latency=Duration(seconds=2**63 - 1)),
    ],
    ids=range(7),
)
def test_an_audit_entry_of_no_time_is_data_loss(entry: access_api.AuditEntry) -> None:
    with (
        malicious(Answers(audit_entries=[entry])) as address,
        store.connect(address) as client,
        pytest.raises(store.DataLossError, match="which no log has"),
    ):
        list(client.audit_entries())


LISTS: dict[str, Callable[[store.Client], Iterator[object]]] = {
    "checkpoints": lambda client: client.run("ns/r").checkpoints(),
    "audit entries": lambda client: client.audit_entries(),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_repeated_page_token_ends_a_list(name: str) -> None:
    with (
        malicious(Answers(page_token="again")) as address,
        store.connect(address) as client,
        pytest.raises(store.DataLossError, match="next page is itself"),
    ):
        list(LISTS[name](client))
