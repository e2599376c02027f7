"""The bucket: the little that the service asks of a storage.

Any storage with a conditional write will do: it is the only arbiter there is.
Places are texts below the root, "/" between their parts.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, NewType, Protocol, TypeAlias

Generation = NewType("Generation", bytes)
"""Names one write of one place; opaque."""


class Condition(Enum):
    """When a write takes place, other than at a generation."""

    ALWAYS = "always"
    IF_ABSENT = "if absent"


ALWAYS: Final = Condition.ALWAYS
IF_ABSENT: Final = Condition.IF_ABSENT

WriteCondition: TypeAlias = Condition | Generation
"""A generation: only while the place still holds that write."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What a place holds."""

    data: bytes
    generation: Generation


class PreconditionError(Exception):
    """The place does not hold what the write was conditional on.

    After a retry below us this may be our own write: read back before believing
    in a rival.
    """


class Bucket(Protocol):
    """A storage.

    Every method raises ``StorageUnavailableError`` where the storage does not
    answer, ``StorageDeniedError`` where it lets us not in, or not do this, and
    ``StorageFullError`` where it is full.
    """

    async def read(self, place: str) -> Stored | None:
        """Returns what a place holds; None where it holds nothing."""

    async def read_range(self, place: str, start: int, stop: int) -> bytes:
        """Returns the bytes from ``start`` up to ``stop``.

        Raises:
            CorruptDataError: The place holds nothing, or less.
        """

    async def write(
        self, place: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        """Writes a place as a whole; durable when it returns.

        Raises:
            PreconditionError: The condition did not hold; nothing was written.
        """

    async def settle(self, place: str) -> None:
        """Makes durable what a place was just seen to hold.

        A write that was cut off, or whose sync failed, can be seen before it is
        durable: who answers for what another call wrote MUST settle it first.
        """

    async def delete(self, place: str, *, generation: Generation | None = None) -> None:
        """Empties a place, if it still holds that write. Empty already: no error.

        Raises:
            PreconditionError: It holds another write.
        """

    async def delete_below(self, prefix: str) -> None:
        """Empties every place that begins with a prefix; not atomic."""

    async def list(self, prefix: str, *, after: str = "") -> list[str]:
        """Returns the places that begin with a prefix, ascending.

        Args:
            prefix: What they begin with.
            after: Only those after this place, which begins with the prefix.
        """
