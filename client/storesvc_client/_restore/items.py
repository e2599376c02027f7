"""The items of an open checkpoint, read one by one. Needs no jax."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from storesvc.format.keys import parse_item_key
from storesvc.format.trees import Leaf, Tree
from storesvc_client._items.iterators import (
    UnfitStateError,
    give_shards,
    give_state,
    has_state,
    holds_shards,
    read_shards,
    shard_part,
)
from storesvc_client._items.values import decode_value
from storesvc_client._values.arguments import shown
from storesvc_client._values.messages import UNKNOWN
from storesvc_client._values.models import KINDS, ItemInfo
from storesvc_client._views.texts import count_text
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    MismatchError,
    NotFoundError,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from storesvc_client._job.job import Job


@dataclass(slots=True)
class _Item:
    """The rows of one item."""

    rows: dict[int | None, int]
    """Row by process; one row with None if it is one value for all."""

    @property
    def process_count(self) -> int | None:
        """Number of processes; None: one value for all."""
        return None if None in self.rows else len(self.rows)


class Items(Mapping[str, Any]):
    """The items of one checkpoint by name; returned by ``Run.items``.

    A value is read when it is asked for, and each time: it belongs to the caller. A
    checkpoint without items has none. Threads may share it.

    >>> items = run.items("latest")
    >>> sorted(items)
    ['config', 'data']
    >>> items["config"]["layers"]
    32
    >>> items.info("data").process_count
    4
    """

    def __init__(
        self,
        name: str,
        tree: Tree,
        read: "Callable[[Sequence[int]], Iterator[tuple[int, NDArray[Any]]]]",
        job: "Job | None",
        *,
        unread: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Creates it; nothing is read.

        Args:
            name: Name of the checkpoint, for messages.
            tree: The tree with the rows of the items.
            read: Yields the arrays of bytes of rows.
            job: Job whose processes read together; None if this process reads alone.
            unread: Reason for each item that the tree lacks because it cannot be read.
        """
        self._unread = unread
        self._name = name
        self._tree = tree
        self._read = read
        self._index, self._count = (0, 1) if job is None else (job.index, job.count)
        found: dict[str, _Item] = {}
        for row in range(tree.tree_count, len(tree.leaves)):
            item = parse_item_key(tree.leaves[row].key)
            found.setdefault(item.item, _Item({})).rows[item.process] = row
        self._items = dict(sorted(found.items()))

    def __repr__(self) -> str:
        return f"<Items of {self._name}: {', '.join(self._items) or 'none'}>"

    def _repr_html_(self) -> str:
        from storesvc_client._views.notebook import items_html

        return items_html(f"items of {self._name}", [*map(self.info, self)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __getitem__(self, name: str) -> Any:
        """Returns the value of an item; of an item of several processes, the value that
        this process saved.

        Raises:
            NotFoundError: The checkpoint has no such item; names the nearest.
            MismatchError: It was saved by another number of processes.
            DataLossError: Stored bytes are damaged.
        """
        item = self._item(name)
        count = item.process_count
        if count is None:
            return self._values([item.rows[None]])[0]
        if count != self._count:
            raise MismatchError(
                f"{self._name} item {name!r}: expected to be read by the {count} "
                f"processes that saved a value each, got a job of {self._count}; "
                f"per_process({name!r}) returns the values of all"
            )
        return self._values([item.rows[self._index]])[0]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of an item, or the default if the checkpoint has no such
        item.

        Raises:
            StoreError: As for ``items[name]``, except that the item may be absent.
        """
        if name not in self and name not in self._unread:
            return default
        return self[name]

    def restore_into(self, name: str, target: Any) -> None:
        """Gives a data iterator, or a random generator, the state that was saved.

        An iterator of Grain also begins to read ahead.

        >>> items.restore_into("data", iterator)

        Args:
            name: Name of the item that was saved from such an object.
            target: Object with ``set_state`` and ``get_state``, or with
                ``load_state_dict`` and ``state_dict``; or a ``numpy.random.Generator``.

        Raises:
            NotFoundError: The checkpoint has no such item; names the nearest.
            InvalidRequestError: The target takes no state.
            MismatchError: The state is that of an object of another class, or the
                target rejects it; or it was saved by another number of processes, and
                is neither shared nor in shards.
            DataLossError: Stored bytes are damaged.
        """
        self.prepare_restore(name, target)()

    def prepare_restore(self, name: str, target: Any) -> Callable[[], None]:
        """Reads and checks what ``restore_into`` needs, and returns a function that
        gives it to the target; raises as ``restore_into`` does."""
        place = f"{self._name} item {name!r}"
        item = self._item(name)
        count = item.process_count
        if not has_state(target):
            raise InvalidRequestError(
                f"{place}: expected an object with get_state and set_state, or with "
                "state_dict and load_state_dict, or a numpy.random.Generator, got "
                f"{shown(target)}"
            )
        fits = count in (None, self._count)
        process = self._index if count == self._count else 0
        (value,) = self._read_values(item, [process])
        if holds_shards(value):
            with _unfit_as_mismatch(place):
                shards = read_shards(
                    *shard_part(target),
                    len(item.rows),
                    partial(self._read_values, item),
                    {process: value},
                )
            give = partial(give_shards, target, shards)
        elif fits:
            give = partial(give_state, target, value)
        else:
            raise MismatchError(
                f"{place}: expected a job of the {count} processes that saved a state "
                f"each, got one of {self._count}; an iterator that is to go on with "
                "another number must be saved as Replicated, or be an ElasticIterator "
                "of Grain"
            )

        def restore() -> None:
            with _unfit_as_mismatch(place):
                give()

        return restore

    def per_process(self, name: str) -> list[Any]:
        """Returns the values that all processes saved, in the order of the processes.

        Raises:
            NotFoundError: The checkpoint has no such item; names the nearest.
            InvalidRequestError: It is one value for all processes.
            DataLossError: Stored bytes are damaged.
        """
        item = self._item(name)
        if item.process_count is None:
            raise InvalidRequestError(
                f"{self._name} item {name!r}: expected a value of each process, got "
                f"one for all; use items[{name!r}]"
            )
        return self._read_values(item, range(item.process_count))

    def info(self, name: str) -> ItemInfo:
        """Returns kind, size and number of processes of an item; reads nothing.

        Raises:
            NotFoundError: The checkpoint has no such item; names the nearest.
        """
        item = self._item(name)
        leaves = [self._leaf(row) for row in item.rows.values()]
        return ItemInfo(
            name=name,
            kind=KINDS.get(leaves[0].kind, UNKNOWN),
            size_bytes=sum(leaf.shape[0] for leaf in leaves),
            process_count=item.process_count,
        )

    def encoded(self, name: str, process: int | None = None) -> bytes:
        """Returns the stored bytes of an item: UTF-8 of a text, canonical JSON.

        Args:
            name: Name of the item.
            process: Number of the process that saved the value, for an item of several
                processes.

        Raises:
            NotFoundError: The checkpoint has no such item, or the item no value of that
                process.
            InvalidRequestError: It is an item of several processes, and ``process`` is
                None.
            DataLossError: Stored bytes are damaged.
        """
        item = self._item(name)
        count = item.process_count
        if process in item.rows:
            return self._bytes([item.rows[process]])[0]
        if process is None:
            raise InvalidRequestError(
                f"{self._name} item {name!r}: expected the number of a process, below "
                f"{len(item.rows)}, got none; each has saved a value of its own"
            )
        there = "one value for all"
        if count is not None:
            there = f"of {count_text(count, 'process')} from 0"
        raise NotFoundError(
            f"{self._name} item {name!r} has no value of process {process}, but {there}"
        )

    def _item(self, name: str) -> _Item:
        found = self._items.get(name)
        if found is None and name in self._unread:
            raise DataLossError(
                f"{self._name} item {name!r}: expected one that can be read, got "
                f"{self._unread[name]}"
            )
        if found is None:
            nearest = get_close_matches(str(name), self._items, n=3, cutoff=0.4)
            shown = ", ".join(nearest or self._items)
            which = "nearest" if nearest else "it has"
            raise NotFoundError(
                f"{self._name} has no item {name!r}; {which}: {shown}"
                if shown
                else f"{self._name} has no items"
            )
        return found

    def _leaf(self, row: int) -> Leaf:
        return self._tree.leaves[row]

    def _read_values(self, item: _Item, processes: Sequence[int]) -> list[Any]:
        """Returns the values of some processes; one value for all is that of each."""
        shared = item.rows.get(None)
        rows = [item.rows[at] if shared is None else shared for at in processes]
        return self._values(rows)

    def _values(self, rows: Sequence[int]) -> list[Any]:
        return [
            decode_value(self._leaf(row).key, self._leaf(row).kind, data)
            for row, data in zip(rows, self._bytes(rows), strict=True)
        ]

    def _bytes(self, rows: Sequence[int]) -> list[bytes]:
        found = {row: array.tobytes() for row, array in self._read(rows)}
        return [found[row] for row in rows]


@contextmanager
def _unfit_as_mismatch(place: str) -> Iterator[None]:
    try:
        yield
    except UnfitStateError as e:
        raise MismatchError(f"{place}: {e}") from e
