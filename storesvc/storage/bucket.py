"""Defines the bucket: the few operations that the service needs of a storage.

Any storage with conditional writes implements it: they are the only arbiter between
processes. Paths are relative to the root of the store, with "/" between their parts.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final, NewType, Protocol, TypeAlias

Generation = NewType("Generation", bytes)
"""Version of an object, as its last write made it; opaque."""


class Condition(Enum):
    """Precondition of a write, other than a generation."""

    ALWAYS = "always"
    IF_ABSENT = "if absent"


ALWAYS: Final = Condition.ALWAYS
IF_ABSENT: Final = Condition.IF_ABSENT

WriteCondition: TypeAlias = Condition | Generation
"""A generation requires that the object still has that version."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The contents of an object."""

    data: bytes
    generation: Generation


class PreconditionError(Exception):
    """The object does not have the version that the write requires.

    A retry in a lower layer can fail its precondition against the object that its own
    first attempt wrote: read the object back before assuming a concurrent writer.
    """


class Bucket(Protocol):
    """A storage of objects.

    Every method raises ``StorageUnavailableError`` where the storage does not answer,
    ``StorageDeniedError`` where it rejects the credentials or denies the operation,
    and ``StorageFullError`` where it is full.
    """

    async def read(self, path: str) -> Stored | None:
        """Returns an object; None if it does not exist."""

    async def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Returns the bytes of an object from ``start`` up to ``stop``.

        Raises:
            CorruptDataError: The object is missing or shorter.
        """

    async def write(
        self, path: str, data: bytes, *, condition: WriteCondition = ALWAYS
    ) -> Generation:
        """Writes a whole object; durable when it returns.

        Raises:
            PreconditionError: The condition did not hold; nothing was written.
        """

    async def settle(self, path: str) -> None:
        """Makes an object durable, in the version that a read has just returned.

        A write that was interrupted, or whose sync failed, can be visible before it is
        durable: a call that reports the write of another call MUST settle it first.
        """

    async def delete(self, path: str, *, generation: Generation | None = None) -> None:
        """Deletes an object, if it still has that generation; an absent one is no
        error.

        Raises:
            PreconditionError: It has another generation.
        """

    async def delete_below(self, prefix: str) -> None:
        """Deletes every object whose path begins with a prefix; not atomic."""

    async def list(self, prefix: str, *, after: str = "") -> list[str]:
        """Returns the paths that begin with a prefix, ascending.

        Args:
            prefix: The common beginning of the paths.
            after: Returns only paths after this one, which begins with the prefix.
        """
