"""Lists of things of one kind."""

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from storesvc_client.cli.output import (
    Column,
    plural,
    print_json,
    print_note,
    print_table,
)

if TYPE_CHECKING:
    from storesvc_client import DataLossError

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Generic[_Item]):
    """How things of one kind are listed."""

    noun: str
    columns: tuple[Column, ...]
    row: Callable[[_Item], tuple[str, ...]]

    def show(
        self,
        items: Iterable[_Item],
        *,
        as_json: bool,
        limit: int | None = None,
        damaged: "Sequence[DataLossError]" = (),
    ) -> None:
        """Prints the items, and says beside the output what it left out.

        Args:
            items: To print.
            as_json: Whether as JSON.
            limit: The first so many only, damaged ones counted.
            damaged: Of those that cannot be told, as they are met.

        Raises:
            DataLossError: The last of them; the others are told before.
        """
        shown: list[_Item] = []
        rest = False
        for item in items:
            rest = limit is not None and len(shown) + len(damaged) >= limit
            if rest:
                break
            shown.append(item)
        # One more may have been met on the way to the first that is not shown.
        told = damaged if limit is None else damaged[: limit - len(shown)]
        rest = rest or len(told) < len(damaged)
        if as_json:
            print_json(shown)
        elif shown:
            print_table(self.columns, map(self.row, shown))
        elif not damaged:
            print_note(f"no {plural(self.noun)}")
        if rest:
            known = f"of {len(items):,} " if isinstance(items, Sized) else ""
            noun = self.noun if limit == 1 and not known else plural(self.noun)
            print_note(f"{limit:,} {known}{noun} shown, there are more")
        for error in told[:-1]:
            print_note(str(error))
        if told:
            raise told[-1]
