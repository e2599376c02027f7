"""Checkpoints of other projects: the steps at a location, the arrays of a step.

A reader of a format returns values of these classes; ``mount.py`` and ``importing.py``
take them. The rows of ``ForeignStep.tree`` follow every rule of ``tree.proto``, except
the maximum size of a chunk: the chunks of a row are the pieces that its format reads as
a whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from storesvc.format.grids import Region
from storesvc.format.trees import Tree


class Reading(Protocol):
    """A read in progress; futures of ``concurrent.futures`` and of TensorStore are."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the read.

        Raises:
            StoreError: It failed.
            TimeoutError: It has not ended within `timeout` seconds.
        """

    def cancel(self) -> Any:
        """Ends the read as soon as it can be; its result is not needed any more."""


class ForeignArray(Protocol):
    """The elements of one row. Threads may share it."""

    together: "Together | None" = None
    """Reads small chunks of this array and of others; None: there is no such way."""

    def read(self, region: Region, into: NDArray[Any]) -> Reading:
        """Starts to read a region.

        Reads no more than the chunks that the region touches, or the ranges themselves
        where the format stores plain bytes.

        Args:
            region: Start and stop of each dimension.
            into: Receives the elements: an array of the shape of the region and the
                dtype of the row, which need be neither contiguous nor aligned.

        Returns:
            The read. Its result raises a DataLossError that names the row if the stored
            bytes are damaged, and an UnavailableError if the storage does not answer.
        """


Wanted: TypeAlias = tuple["ForeignArray", Region, NDArray[Any]]
"""A region of an array, and what receives its elements."""


class Together(Protocol):
    """Reads small chunks of many arrays in one step. Threads may share it."""

    def read(self, wanted: Sequence[Wanted]) -> bool:
        """Reads regions of arrays that have this value in ``together``; returns False
        if that is not possible or fails: each is to be read by its array then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadItem:
    """A part of a step that is not read; the others are."""

    name: str
    is_tree: bool
    """True if it holds leaves."""
    reason: str
    """Message of the error."""
    is_needed: bool = True
    """False if the step is whole without it, such as tensors that its index lacks."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForeignStep:
    """One checkpoint that another project wrote."""

    step: int
    url: str
    """Location of the step, for messages and provenance."""
    format: str
    """Name of the format, such as "orbax"; the scheme of its URLs."""
    tree: Tree
    """Leaves and items. ``Tree.structure`` is empty, or the containers that the leaves
    do not show (``_items/values.py``)."""
    arrays: Sequence[ForeignArray]
    """The elements of each row of ``tree``."""
    create_time: datetime | None = None
    """Time of its writing, as its files state."""
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Provenance, such as custom metadata as JSON; without the labels that every import
    adds."""
    digest: str = ""
    """Digest in hexadecimal of the files that describe the step and, where these do not
    change with its elements, of the stamps of its data files (``steps.py``). If it is
    equal, a second read of the step would return the same bytes; it may differ
    for a copy of the files."""
    verified_count: int = 0
    """Number of rows of which the format stores checksums, which reading compares."""
    unread: Sequence[UnreadItem] = ()
    """Parts that the tree lacks: items that cannot be read, and files of no item."""

    @property
    def is_verified(self) -> bool:
        """True if reading compares checksums of all elements."""
        return 0 < self.verified_count == len(self.tree.leaves)

    @property
    def is_local(self) -> bool:
        """True if its files are in a file system of this machine."""
        return self.url.removeprefix(f"{self.format}:").startswith("file:")


class ForeignRoot(Protocol):
    """A location below which a project writes its steps."""

    url: str
    """The location with the scheme of its format, as a user would give it."""

    def steps(self) -> Sequence[int]:
        """Returns the finished steps, ascending; lists the location each time."""

    def open(self, step: int) -> ForeignStep:
        """Reads what describes a step; no elements are read.

        Raises:
            NotFoundError: There is no such step, or it is unfinished.
            DataLossError: Its files are damaged; the message names file and field.
            PreconditionError: The step holds something that a checkpoint cannot hold,
                such as two arrays of one name.
        """
