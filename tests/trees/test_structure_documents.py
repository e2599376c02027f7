"""Documents are compressed, and reading them is bounded in memory."""

import json
import zlib
from typing import Any

import pytest

from storesvc_client._items import values as items
from storesvc_client._items.values import pack_document, unpack_document
from storesvc_client.errors import StructureError


def packed(text: str) -> bytes:
    """Returns a text compressed like a document."""
    return zlib.compress(text.encode())


def test_packing_round_trips() -> None:
    fields = {"a": [1, None, "é", {"b": 1.5}]}

    assert fields == unpack_document(pack_document(fields))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (packed('{"a": 1}')[:-2], "cut short"),
        (packed('{"a": 1}') + b"xx", "nothing after its end, got 2 bytes"),
        (b"garbage", "compressed JSON"),
        (packed("[" * 100_000), "compressed JSON"),
        (packed("[]"), "fields, got a list"),
        (packed('{"a": "é"}'), "ASCII"),
        (packed('{"a": ' + "1" * 5000 + "}"), "compressed JSON"),
        (packed("{\x1b\n"), "compressed JSON"),
    ],
)
def test_other_bytes_are_rejected(document: bytes, words: str) -> None:
    with pytest.raises(StructureError, match=words) as e:
        unpack_document(document)

    assert str(e.value).isprintable()


@pytest.mark.slow
def test_a_document_that_becomes_too_many_bytes_is_rejected() -> None:
    document = zlib.compress(b" " * (items.MAX_BYTES + 1), 9)

    with pytest.raises(StructureError, match="too large: expected at most 134217728 b"):
        unpack_document(document)


@pytest.mark.parametrize("item", ['{"":0}', "{}", "[]", "0"])
def test_a_document_that_becomes_too_many_objects_is_rejected(item: str) -> None:
    count = items.MAX_TOKENS // (1 + sum(map(item.count, ",:[{"))) + 1
    document = packed('{"a":[' + ",".join([item] * count) + "]}")

    with pytest.raises(StructureError, match="too large: expected at most 5000000 v"):
        unpack_document(document)


@pytest.mark.parametrize(("limit", "most"), [("MAX_BYTES", 100), ("MAX_TOKENS", 40)])
def test_nothing_is_packed_that_could_not_be_unpacked(
    limit: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, limit, most)
    fields: dict[str, Any] = {"a": list(range(50))}

    with pytest.raises(StructureError, match="too large"):
        pack_document(fields)
    with pytest.raises(StructureError, match="too large"):
        unpack_document(packed(json.dumps(fields)))


def test_documents_larger_than_memory_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: bytes) -> Any:
        raise MemoryError

    monkeypatch.setattr(json, "loads", fail)

    with pytest.raises(StructureError, match="fits into memory"):
        unpack_document(packed("{}"))
