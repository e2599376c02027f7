"""The items of a save: encoded, and agreed between the processes of a job.

All processes of a joint save plan the same rows, and a row has the size of its value.
So each process publishes the sizes of its own values on the job's board, and process 0
publishes the sizes for all. Only a save with items waits for that: process 0, if a
value is per process, for all others, and these for process 0. It costs little, because
the arrays of a step are computed by all processes, and none copies them before all have
come this far.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self

from storesvc.format.keys import MAX_ITEMS, ItemName, kind_text
from storesvc.format.names import InvalidNameError, check_item
from storesvc_client._items.values import OwnItem, PlannedItem, Sharing, own_item
from storesvc_client._job.job import JointSave, process_name
from storesvc_client._values.arguments import shown
from storesvc_client.errors import (
    InvalidRequestError,
    PeerFailedError,
    StoreError,
    UnavailableError,
)
from storesvc_proto.v1 import tree_pb2 as pb

_POLL_SECONDS: Final = 1.0
"""Interval at which a process that waits for others checks whether one has failed."""

_SHARINGS: Final[dict[Sharing, str]] = {
    "first": "one value for all",
    "same": "Replicated",
    "own": "a PerProcess",
}
"""Words on which processes' values are kept."""


@dataclass(frozen=True, slots=True)
class _Declared:
    """An item as a process publishes it: without its value."""

    sharing: Sharing
    kind: "pb.LeafKind.ValueType"
    size: int
    digest: str
    """Digest of a value that is equal in all processes; "" of others."""

    @classmethod
    def from_item(cls, item: OwnItem) -> Self:
        """Returns what the other processes must know of an item."""
        data, digest = item.encoded.data, ""
        if item.sharing == "same":
            digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        return cls(item.sharing, item.encoded.kind, len(data), digest)


def checked_items(place: str, items: object) -> dict[str, OwnItem]:
    """Returns the items of a save in stored form, in the order of their names."""
    if items is None:
        return {}
    if not isinstance(items, Mapping):
        raise InvalidRequestError(
            f"{place}: items=: expected a mapping, got {shown(items)}"
        )
    if len(items) > MAX_ITEMS:
        raise InvalidRequestError(
            f"{place}: items=: expected at most {MAX_ITEMS} items, got {len(items)}"
        )
    found = {}
    for name, value in items.items():
        try:
            if not isinstance(name, str):
                raise InvalidRequestError(
                    f"{place}: items=: expected texts as names, got {shown(name)}"
                )
            check_item(name)
            found[name] = own_item(value)
        except InvalidNameError as e:
            raise InvalidRequestError(f"{place}: items=: {e}") from e
        except InvalidRequestError:
            raise
        except ValueError as e:
            raise InvalidRequestError(f"{place}: items=: item {name!r}: {e}") from e
    return dict(sorted(found.items()))


def items_alone(own: Mapping[str, OwnItem]) -> list[PlannedItem]:
    """Returns the rows of the items of a process that saves alone."""
    return _order_rows(
        PlannedItem(
            name=ItemName(name, 0 if item.sharing == "own" else None),
            kind=item.encoded.kind,
            size=len(item.encoded.data),
            data=item.encoded.data,
        )
        for name, item in own.items()
    )


class ItemExchange:
    """The agreement of the processes of one joint save about its items."""

    def __init__(
        self, joint: JointSave, place: str, own: Mapping[str, OwnItem]
    ) -> None:
        """Publishes the items of this process, without their values."""
        self._joint = joint
        self._place = place
        self._own = own
        self._declared = {name: _Declared.from_item(item) for name, item in own.items()}
        self._waits = any(item.sharing == "own" for item in own.values())
        # Also if there are none: another process may have some, and would wait. But a
        # board that is gone must fail no save without items.
        with suppress(*(() if own else (StoreError,))):
            if joint.job.index:
                joint.publish_items(_to_text(self._declared))
            elif not self._waits:
                self._publish_all([self._declared])

    def agree_items(self, *, seconds: float) -> list[PlannedItem]:
        """Waits for the sizes of the items of the other processes, at most `seconds`
        for each; returns the rows of all, with the bytes that this process writes.

        Raises:
            InvalidRequestError: The processes pass items of other names, or one is per
                process in some of them only, or of another kind.
            PeerFailedError: Another process failed.
            UnavailableError: A process does not save the step in time.
        """
        if not self._own:
            return []
        tables = [self._declared]
        if self._joint.job.index:
            text = self._await_items(None, seconds)
            tables = [_parse_declared(each) for each in json.loads(text)]
            self._check(0, tables[0], self._joint.job.index, self._declared)
        elif self._waits:  # else process 0 has published its own items for all
            for index in range(1, self._joint.job.count):
                table = _parse_declared(self._await_items(index, seconds))
                self._check(0, self._declared, index, table)
                tables.append(table)
            self._publish_all(tables)
        me, rows = self._joint.job.index, list[PlannedItem]()
        for process, table in enumerate(tables):
            for name, item in table.items():
                if process and item.sharing != "own":
                    continue  # process 0's value is saved
                rows.append(
                    PlannedItem(
                        name=ItemName(name, process if item.sharing == "own" else None),
                        kind=item.kind,
                        size=item.size,
                        data=self._own[name].encoded.data if process == me else None,
                    )
                )
        return _order_rows(rows)

    def _publish_all(self, tables: Sequence[Mapping[str, _Declared]]) -> None:
        self._joint.publish_all_items(json.dumps([*map(_to_text, tables)]))

    def _await_items(self, index: int | None, seconds: float) -> str:
        """Returns the published items of a process, or with None of all processes."""
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            text = self._joint.items_of(index, seconds=min(_POLL_SECONDS, left))
            if text is not None:
                return text
            ended = self._joint.ended()
            if ended is not None and ended.failure:
                raise PeerFailedError(
                    f"{self._place} failed in another process of the job: "
                    f"{ended.failure}"
                )
            if left <= 0:
                other = self._joint.other_step(index or 0)
                last = f" (its last save is of step {other})" if other else ""
                raise UnavailableError(
                    f"{self._place}: items=: {self._label(index or 0)}{last} has not "
                    f"begun it in {seconds:g} s; every process of the job must save "
                    "each step, and run still"
                )

    def _check(
        self,
        index: int,
        expected: Mapping[str, _Declared],
        other: int,
        got: Mapping[str, _Declared],
    ) -> None:
        """Rejects items of two processes that differ in more than their values."""
        if expected.keys() != got.keys():
            names = [", ".join(table) or "none" for table in (expected, got)]
            raise InvalidRequestError(
                f"{self._place}: items=: {self._label(index)} passes {names[0]}, "
                f"{self._label(other)} {names[1]}; pass the same names in all "
                "processes of the job"
            )
        for name, item in expected.items():
            there = got[name]
            if item.sharing != there.sharing:
                raise InvalidRequestError(
                    f"{self._place}: items=: item {name!r} is "
                    f"{_SHARINGS[item.sharing]} in {self._label(index)}, but "
                    f"{_SHARINGS[there.sharing]} in {self._label(other)}; pass it in "
                    "the same way in all processes of the job"
                )
            if item.digest != there.digest:
                raise InvalidRequestError(
                    f"{self._place}: items=: item {name!r}: expected an equal value in "
                    f"all processes of the job, got another one in "
                    f"{self._label(other)} than in {self._label(index)}; a data "
                    "iterator must have gone through as many batches in each"
                )
            if item.sharing == "own" and item.kind != there.kind:
                kinds = [kind_text(item.kind), kind_text(there.kind)]
                raise InvalidRequestError(
                    f"{self._place}: items=: item {name!r}: {self._label(index)} "
                    f"passes {kinds[0]}, {self._label(other)} {kinds[1]}; pass values "
                    "of one kind in all processes of the job"
                )

    def _label(self, index: int) -> str:
        return process_name(self._joint.job, index)


def _order_rows(rows: "Any") -> list[PlannedItem]:
    return sorted(rows, key=lambda row: row.name.key)


def _to_text(table: Mapping[str, _Declared]) -> str:
    rows = [
        [name, item.sharing, item.kind, item.size, item.digest]
        for name, item in table.items()
    ]
    return json.dumps(rows)


def _parse_declared(text: str) -> dict[str, _Declared]:
    return {name: _Declared(*fields) for name, *fields in json.loads(text)}
