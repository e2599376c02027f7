"""Lists of things of one kind."""

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from storesvc_client.cli._output import (
    Column,
    plural,
    print_json,
    print_note,
    print_table,
)

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Generic[_Item]):
    """How things of one kind are listed."""

    noun: str
    columns: tuple[Column, ...]
    row: Callable[[_Item], tuple[str, ...]]

    def show(
        self, items: Iterable[_Item], *, as_json: bool, limit: int | None = None
    ) -> None:
        """Prints the items, and says beside the output what it left out.

        Raises:
            DataLossError: Some cannot be told; the others are printed.
        """
        from storesvc_client import DataLossError

        shown: list[_Item] = []
        rest: Iterator[_Item] = iter(items)
        damage = None
        try:
            for item in islice(rest, limit):
                shown.append(item)  # noqa: PERF402 - what came before an error stays
        except DataLossError as e:
            damage = e
        if as_json:
            print_json(shown)
        elif shown:
            print_table(self.columns, map(self.row, shown))
        elif damage is None:
            print_note(f"no {plural(self.noun)}")
        if damage is not None:
            raise damage
        if limit is not None and next(rest, None) is not None:
            known = f"of {len(items):,} " if isinstance(items, Sized) else ""
            noun = self.noun if limit == 1 and not known else plural(self.noun)
            print_note(f"{limit:,} {known}{noun} shown, there are more")
