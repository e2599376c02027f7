"""Selects and orders the records of a list, in bounded memory if it has a limit."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import click

from storesvc_client._values.texts import plural
from storesvc_client.cli.records.fields import Kind, Schema
from storesvc_client.cli.records.query import (
    QueryError,
    parse_condition,
    parse_order,
)
from storesvc_client.cli.suggestions import nearest

_MOST_NAMES: Final = 1000
"""Maximum names that are kept for a suggestion."""


class RecordSelection:
    """Applies ``--where`` and ``--sort`` to the records of one list."""

    def __init__(
        self, schema: Schema, *, where: Sequence[str] = (), sort: str | None = None
    ) -> None:
        """Parses the options.

        Args:
            schema: Fields of the records.
            where: Conditions, of which a record must satisfy all.
            sort: Order; None: that of the list.

        Raises:
            BadParameter: An option cannot be read.
        """
        from datetime import UTC, datetime

        now = datetime.now(UTC)
        option = "--where"
        try:
            self._conditions = [parse_condition(t, schema, now=now) for t in where]
            option = "--sort"
            self._order = None if sort is None else parse_order(sort, schema)
        except QueryError as e:
            raise click.BadParameter(str(e), param_hint=option) from e
        self._schema = schema
        used = {field for each in self._conditions for field in each.fields}
        if self._order:
            used.add(self._order.field)
        self._absent = {each.name: each for each in used if each.kind is Kind.ANY}
        self._known = set[str]()
        self._count = 0
        self._is_complete = False

    def of(self, records: Iterable[Any], *, limit: int | None) -> Iterator[Any]:
        """Yields the records that match, in order.

        Args:
            records: All records; they are read one by one.
            limit: Maximum number that the caller uses; None: all. One more is yielded
                if there are more, and no more are kept.
        """
        kept = self._matching(records)
        order = self._order
        if order is None:
            yield from kept
        elif limit is None:
            yield from sorted(kept, key=order.key, reverse=order.descending)
        else:
            pick = heapq.nlargest if order.descending else heapq.nsmallest
            yield from pick(limit + 1, kept, key=order.key)

    def absence(self) -> str:
        """Returns the note of an empty list."""
        if not self._count:
            return f"no {plural(self._schema.noun)}"
        noun = plural(self._schema.noun)
        if self._count == 1:
            return f"the only {self._schema.noun} does not match --where"
        return f"none of {self._count:,} {noun} matches --where"

    def warning(self) -> str | None:
        """Returns a note on names that no record has; None if each is found."""
        if not (self._is_complete and self._count and self._absent):
            return None
        return self._absence_text(min(self._absent))

    def _check_order(self) -> None:
        """Rejects an order by a name that no record has.

        Raises:
            BadParameter: Suggests a name that some have.
        """
        order = self._order
        if order is not None and self._count and order.field.name in self._absent:
            raise click.BadParameter(
                self._absence_text(order.field.name), param_hint="--sort"
            )

    def _absence_text(self, name: str) -> str:
        bare = name.partition(".")[2] if name.partition(".")[0] in self._maps else name
        known = sorted(self._known | {*self._schema.fields})
        found = nearest(bare, known)
        what = " or ".join(which.removesuffix("s") for which in self._maps)
        ending = f"; did you mean {found}?" if found else ""
        return f"no {self._schema.noun} has a {what} {name!r}{ending}"

    @property
    def _maps(self) -> list[str]:
        return [*self._schema.maps]

    def _matching(self, records: Iterable[Any]) -> Iterator[Any]:
        for record in records:
            self._count += 1
            self._note_names(record)
            if all(condition.matches(record) for condition in self._conditions):
                yield record
        self._is_complete = True
        self._check_order()

    def _note_names(self, record: Any) -> None:
        """Keeps which names the records have, until each that is used was found."""
        if self._absent:
            found = {n for n, f in self._absent.items() if f.value(record) is not None}
            for name in found:
                del self._absent[name]
            if len(self._known) < _MOST_NAMES:
                self._known |= self._schema.names_of(record)
