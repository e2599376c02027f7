"""Claims on a step in a bucket, where there are no locks: of two exports that write it
at once, the one that began last goes on, and the other one fails.

A file in the step names the export that writes it. An export that finds the file of
another one takes it for one that has failed: it deletes what is there, and begins
again. So each export compares the file before it writes another one, and before and
after the one that completes the step: otherwise it would complete a step whose files
the other one has deleted.
"""

from typing import Any, Final
from uuid import uuid4

from storesvc_client._export.target import Target
from storesvc_client.errors import PreconditionError

MARK: Final = ".storesvc-export"
"""File in a step that is not finished."""


class ClaimedStep:
    """A step that this export writes; implements ``Target``."""

    local = None

    def __init__(self, target: Target) -> None:
        """Claims a step.

        Args:
            target: The step; what it holds is of an export that has failed.
        """
        self._target = target
        self.url = target.url
        self._text = f"An export of storesvc that is not finished: {uuid4()}\n".encode()
        with target.create(MARK) as file:
            file.write(self._text)

    def complete(self, name: str, data: bytes) -> None:
        """Writes the file that completes the step, and removes the claim.

        Raises:
            PreconditionError: Another export writes the step.
        """
        with self.create(name) as file:
            file.write(data)
        found = self._found()
        if found == self._text:
            self._target.remove(MARK)
            return
        if found:  # it has deleted files of this export, and not completed its own
            self._target.remove(name)
        raise self._lost()

    def claimed(self) -> Target:
        """Returns the target itself, for copies within its bucket.

        Raises:
            PreconditionError: Another export writes the step.
        """
        if self._found() != self._text:
            raise self._lost()
        return self._target

    def below(self, folder: str) -> Target:
        """See ``Target``."""
        return self._target.below(folder)

    def size(self, path: str) -> int | None:
        """See ``Target``."""
        return self._target.size(path)

    def names(self, folder: str = "") -> list[str]:
        """See ``Target``."""
        return self._target.names(folder)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See ``Target``."""
        return self._target.read(path, start, stop)

    def create(self, path: str) -> Any:
        """See ``Target``.

        Raises:
            PreconditionError: Another export writes the step.
        """
        return self.claimed().create(path)

    def remove(self, path: str) -> None:
        """See ``Target``."""
        self._target.remove(path)

    def _found(self) -> bytes:
        """Returns the text of the claim; empty if there is none."""
        size = self._target.size(MARK)
        return self._target.read(MARK, 0, len(self._text)) if size else b""

    def _lost(self) -> PreconditionError:
        return PreconditionError(
            f"{self.url}: another export writes it; wait for it, or choose another "
            "target"
        )
