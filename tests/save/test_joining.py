"""JoinUpload, call by call: writers that planned the same write one upload."""

import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest

from storesvc.format.checksums import digest
from storesvc.format.trees import Tree, pack_leaves
from storesvc.save.rules import first_difference
from storesvc_proto.v1 import tree_pb2
from storesvc_proto.v1 import upload_service_pb2 as api
from tests.support.contract import Writer, frame, refused, sums, tree_of


@pytest.fixture
def upload(server_address: str) -> Writer:
    """One that expects three writers."""
    begun = Writer(server_address, f"tests/join-{uuid.uuid4().hex}", 1, writers=3)
    begun.begin()
    return begun


def join(
    upload: Writer,
    writer: int = 1,
    *,
    count: int = 3,
    tree: Tree | None = None,
    digests: bytes = b"",
) -> api.Upload:
    def requests() -> Iterator[api.JoinUploadRequest]:
        opening = api.JoinOpening(upload=upload.name, writer=writer, writer_count=count)
        yield api.JoinUploadRequest(open=opening, leaf_count=1)
        for part in pack_leaves(tree or tree_of()):
            leaves = tree_pb2.LeafTable.FromString(part)
            yield api.JoinUploadRequest(leaves=leaves, leaf_digests=digests)

    joined: api.Upload = upload.stub.JoinUpload(requests(), timeout=30).upload
    return joined


def test_a_writer_with_the_same_plan_joins(upload: Writer) -> None:
    joined = join(upload)

    assert upload.name == joined.name
    assert upload.epoch == joined.epoch
    assert 3 == joined.writer_count


def join_by_digests(
    upload: Writer, *, tree: Tree | None = None, digests: bytes = b""
) -> api.Upload:
    opening = api.JoinOpening(
        upload=upload.name,
        writer=1,
        writer_count=3,
        tree_digest=digest(b"".join(pack_leaves(tree or tree_of()))),
        values_digest=digest(digests) if digests else b"",
    )
    requests = iter([api.JoinUploadRequest(open=opening)])
    joined: api.Upload = upload.stub.JoinUpload(requests, timeout=30).upload
    return joined


def test_a_writer_with_the_same_plan_joins_by_its_digest(upload: Writer) -> None:
    assert join(upload) == join_by_digests(upload)


def test_a_digest_of_another_plan_is_rejected(upload: Writer) -> None:
    with refused("PLAN_MISMATCH", "send the leaf table"):
        join_by_digests(upload, tree=tree_of(4))


def test_another_tree_is_rejected_by_its_first_leaf(upload: Writer) -> None:
    with refused(
        "PLAN_MISMATCH", r"writer 2: leaf 'x': expected \(3000,\) uint8, got \(4000,\)"
    ):
        join(upload, 2, tree=tree_of(4))


def test_another_number_of_writers_is_rejected(upload: Writer) -> None:
    with refused("PLAN_MISMATCH", "writer 3: expected 3 writers .* got 4"):
        join(upload, 3, count=4)


def test_a_writer_that_does_not_exist_is_rejected(upload: Writer) -> None:
    with refused("INVALID_FIELD", "expected 0 to 2, got 3"):
        join(upload, 3)


def begun_with(address: str, digests: bytes) -> Writer:
    """An upload of three writers whose writer 0 sent leaf digests."""
    writer = Writer(address, f"tests/join-{uuid.uuid4().hex}", 1, writers=3)
    writer.leaf_digests = digests
    writer.begin()
    return writer


def test_another_value_of_a_leaf_is_rejected_by_leaf_and_processes(
    server_address: str,
) -> None:
    upload = begun_with(server_address, b"\1" * 16)

    with refused(
        "PROCESSES_DIFFER", "leaf 'x': processes 0 and 2 hold different values"
    ):
        join(upload, 2, digests=b"\2" * 16)
    assert upload.name == join(upload, 1, digests=b"\1" * 16).name


@pytest.mark.parametrize(
    ("first", "other"),
    [
        pytest.param(b"", b"\2" * 16, id="an-older-client-began"),
        pytest.param(b"\1" * 16, b"", id="an-older-client-joins"),
        pytest.param(bytes(16), b"\2" * 16, id="writer-0-holds-none-of-it"),
        pytest.param(b"\1" * 16, bytes(16), id="the-other-holds-none-of-it"),
    ],
)
def test_what_one_of_two_writers_sends_no_digest_of_is_not_compared(
    server_address: str, first: bytes, other: bytes
) -> None:
    upload = begun_with(server_address, first)

    assert upload.name == join(upload, 2, digests=other).name


def test_digests_of_another_number_of_leaves_are_rejected(
    upload: Writer, server_address: str
) -> None:
    with refused("INVALID_TREE", "16 bytes of leaf_digests for each of 1 leaves"):
        join(upload, digests=bytes(15))
    with refused("INVALID_TREE", "16 bytes of leaf_digests for each of 1 leaves"):
        begun_with(server_address, bytes(32))


def test_an_upload_that_ended_cannot_be_joined(upload: Writer) -> None:
    upload.abort()

    with refused("UPLOAD_NOT_FOUND"):
        join(upload)


def test_an_upload_names_the_writers_that_have_not_finished(upload: Writer) -> None:
    before = list(upload.get().unfinished_writers)
    upload.write(frame(0), writer=1)
    left = upload.finish(sums(0), writer=1).unfinished_writer_count
    after = list(upload.get().unfinished_writers)

    assert [0, 1, 2] == before
    assert 2 == left
    assert [0, 2] == after


def test_a_difference_is_described_by_the_first_differing_property() -> None:
    (leaf,) = tree_of().leaves
    tree = Tree((leaf,))

    assert ("x", "leaf 'x': expected (3000,) uint8, got none") == first_difference(
        tree, Tree(())
    )
    assert ("x", "leaf 'x': expected none, got (3000,) uint8") == first_difference(
        Tree(()), tree
    )
    assert ("x", "leaf 'x': expected chunks of (1000,), got chunks of (500,)") == (
        first_difference(tree, Tree((replace(leaf, chunk_shape=(500,)),)))
    )
    assert (
        "structure: expected the same document"
        in first_difference(tree, Tree((leaf,), b"other"))[1]
    )
