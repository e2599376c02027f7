"""Rules of items in a leaf table, and of encoded values, as ``tree.proto`` states
them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import storesvc_client as store
from storesvc.format.keys import (
    MAX_ENCODED_BYTES,
    MAX_ITEMS,
    InvalidItemError,
    ItemName,
    describe,
    escape_part,
    is_item,
    parse_item_key,
)
from storesvc.format.trees import (
    InvalidTreeError,
    Leaf,
    Tree,
    pack_leaves,
    unpack_leaves,
)
from storesvc_proto.v1 import tree_pb2 as pb
from tests.support.contract import Writer
from tests.support.in_process_server import InProcessServer
from tests.support.refusals import rejected

TEXT, JSON = pb.LEAF_KIND_TEXT, pb.LEAF_KIND_JSON


def item(
    key: str,
    kind: "pb.LeafKind.ValueType" = JSON,
    *,
    path_kinds: str | None = None,
    size: int = 3,
) -> Leaf:
    parts = key.count("/")
    return Leaf(
        key=key,
        path_kinds="rkp"[: parts + 1] if path_kinds is None else path_kinds,
        kind=kind,
        dtype="uint8",
        shape=(size,),
        chunk_shape=(min(max(1, size), 1 << 20),),
    )


def leaf(key: str) -> Leaf:
    return Leaf(
        key=key,
        path_kinds="k" * len(key.split("/")) if key else "",
        kind=pb.LEAF_KIND_HOST_ARRAY,
        dtype="float32",
        shape=(4,),
        chunk_shape=(4,),
    )


def table(*leaves: Leaf) -> pb.LeafTable:
    return pb.LeafTable.FromString(b"".join(pack_leaves(Tree(leaves))))


def test_items_follow_all_leaves_and_are_counted_by_name() -> None:
    rows = (
        *(leaf("!"), leaf("~")),
        *(item("%item/config"), item("%item/data/0"), item("%item/data/1")),
    )

    tree = unpack_leaves(table(*rows))

    assert rows == tree.leaves
    assert (2, 2) == (tree.tree_count, tree.item_count)


def test_a_tree_that_is_one_leaf_has_items_too() -> None:
    tree = unpack_leaves(table(leaf(""), item("%item/config")))

    assert (1, 1) == (tree.tree_count, tree.item_count)


def test_a_tree_without_leaves_has_items_too() -> None:
    tree = unpack_leaves(table(item("%item/config")))

    assert (0, 1) == (tree.tree_count, tree.item_count)


@pytest.mark.parametrize("part", ["%item", "%", "item", "%25item", "%item/x"])
def test_no_path_of_a_tree_is_an_item(part: str) -> None:
    assert not is_item(f"{escape_part(part)}/x")


def test_the_item_of_a_key() -> None:
    assert ItemName("a-1") == parse_item_key(ItemName("a-1").key)
    assert ItemName("a", 12) == parse_item_key(ItemName("a", 12).key)
    assert "item 'a' of process 12" == describe("%item/a/12")
    assert "item 'a'" == describe("%item/a")
    assert "leaf 'item/a'" == describe("item/a")


PER_PROCESS = [item(f"%item/data/{process}") for process in (0, 1, 2)]
MANY = [item(f"%item/x{number:02}") for number in range(MAX_ITEMS + 1)]
BAD_ITEMS: dict[str, tuple[Sequence[Leaf], str, str]] = {
    "no name": ([item("%item/")], "item '': expected 1 to 63 lower-case", ""),
    "capitals": ([item("%item/Data")], "item 'Data': expected 1 to 63", "Data"),
    "a digit first": ([item("%item/1a")], "a letter first", "1a"),
    "no process": ([item("%item/a/x")], "expected the number of a process", "a"),
    "a padded process": ([item("%item/a/00")], "the number of a process", "a"),
    "too deep": (
        [item("%item/a/0/0", path_kinds="rkpp")],
        "the number of a process, got '0/0'",
        "a",
    ),
    "other path kinds": (
        [item("%item/a", path_kinds="kk")],
        "item 'a': expected the path kinds 'rk', got 'kk'",
        "a",
    ),
    "an integer": (
        [item("%item/a", pb.LEAF_KIND_INTEGER)],
        "item 'a': expected text, JSON or bytes, got the kind LEAF_KIND_INTEGER",
        "a",
    ),
    "a process is absent": (
        [PER_PROCESS[0], PER_PROCESS[2]],
        "item 'data': expected a value of each of the processes 0 to 2, got 2",
        "data",
    ),
    "kinds differ": (
        [PER_PROCESS[0], item("%item/data/1", TEXT)],
        r"item 'data': expected values of one kind .* got json and text",
        "data",
    ),
    "too many": (MANY, "expected at most 64 items, got 65", "x64"),
}


@pytest.mark.parametrize(("rows", "match", "name"), BAD_ITEMS.values(), ids=BAD_ITEMS)
def test_items_that_break_a_rule_are_rejected_by_name(
    rows: Sequence[Leaf], match: str, name: str
) -> None:
    with pytest.raises(InvalidItemError, match=match) as caught:
        unpack_leaves(table(leaf("w"), *rows))

    assert name == caught.value.item


def test_as_many_items_as_are_allowed_are_accepted() -> None:
    assert MAX_ITEMS == unpack_leaves(table(leaf("w"), *MANY[:MAX_ITEMS])).item_count


def shaped(leaf: Leaf, **changes: object) -> Leaf:
    fields = {name: getattr(leaf, name) for name in Leaf.__slots__}
    return Leaf(**fields | changes)


BAD_ROWS: dict[str, tuple[Sequence[Leaf], str]] = {
    "an item before a leaf": (
        [item("%item/a"), leaf("w")],
        "item 'a': expected items after all leaves",
    ),
    "items are not in order": (
        [item("%item/b"), item("%item/a")],
        "strictly ascending order",
    ),
    "an item is above another": (
        [item("%item/a"), item("%item/a/0")],
        "is below the leaf '%item/a'",
    ),
    "another dtype": (
        [shaped(item("%item/a"), dtype="int8")],
        r"item 'a': expected the bytes of an encoded value.*got \(3,\) int8",
    ),
    "a scalar": (
        [shaped(item("%item/a"), shape=(), chunk_shape=())],
        r"one dimension of uint8 without a sharding, got \(\) uint8",
    ),
    "too large": (
        [item("%item/a", size=MAX_ENCODED_BYTES + 1)],
        "item 'a': expected at most 1073741824 bytes, got 1073741825",
    ),
    "a text of a tree with another dtype": (
        [shaped(item("a", TEXT, path_kinds="k"), dtype="float32")],
        "leaf 'a': expected the bytes of an encoded value",
    ),
    "path kinds of items in a tree": (
        [item("a", TEXT, path_kinds="r")],
        "leaf 'a': path_kinds 'r' do not fit its key",
    ),
}


@pytest.mark.parametrize(("rows", "match"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_rows_that_no_checkpoint_has_are_rejected(
    rows: Sequence[Leaf], match: str
) -> None:
    with pytest.raises(InvalidTreeError, match=match):
        unpack_leaves(table(*rows))


def test_the_largest_item_is_accepted() -> None:
    largest = item("%item/a", size=MAX_ENCODED_BYTES)

    assert (largest,) == unpack_leaves(table(largest)).leaves


def test_a_server_rejects_items_with_a_reason_of_their_own(
    serve: Callable[[], InProcessServer], tmp_path: Path
) -> None:
    server = serve()
    writer = Writer(server.address, "tests/run", 1)
    writer._tree = Tree((leaf("w"), item("%item/Config")))

    error = store.InvalidRequestError
    with rejected("INVALID_ITEM", error, match="item 'Config'") as caught:
        writer.begin()
    assert caught.value.metadata["item"] == "Config"
