"""Splits a file that is read from its end into lines, the last line first.

The blocks of the file are given from the last one to the first one. Memory is bounded:
of a line that is longer than ``MAX_LINE_BYTES`` only the place and the size are kept.
Pure, so that each way to cut a file into blocks can be tested.

>>> lines = BackwardLines(Position(offset=6))
>>> [line.data for line in (*lines.add(b"a\\nbb\\n\\n"), *lines.finish())]
[b'bb', b'a']
"""

from dataclasses import dataclass, replace
from typing import Final

MAX_LINE_BYTES: Final = 2 << 20
"""Maximum bytes of a line that is kept. Entries of a server are far shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place up to which a file was read from its end."""

    offset: int
    """Offset of the first byte that was read."""
    long_end: int | None = None
    """End of the line that begins before ``offset``, if it is too long to be kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a file."""

    start: int
    """Offset of its first byte."""
    end: int
    """Offset after its last byte, without the line break."""
    data: bytes | None
    """Its bytes; None: there are more than ``MAX_LINE_BYTES``."""
    is_whole: bool = True
    """False if it has no line break, as the last line of a file that was cut off."""


class BackwardLines:
    """Splits blocks into lines; empty lines are left out."""

    def __init__(
        self, after: Position, *, max_line_bytes: int = MAX_LINE_BYTES
    ) -> None:
        """Begins at a position, at which the first block must end."""
        self._offset = after.offset
        """Offset of the first byte of the last block."""
        self._kept = b""
        """Bytes of blocks that belong to a line whose beginning was not found yet."""
        self._long_end = after.long_end
        self._max = max_line_bytes

    @property
    def position(self) -> Position:
        """The place after the lines of all blocks that were given."""
        if self._long_end is not None:
            return Position(offset=self._offset, long_end=self._long_end)
        return Position(offset=self._offset + len(self._kept))

    def add(self, block: bytes) -> list[Line]:
        """Returns the lines that begin in the block before those that were given."""
        self._offset -= len(block)
        found = list[Line]()
        if self._long_end is not None:
            cut = block.rfind(b"\n") + 1
            if not cut:
                return []
            found.append(self._long_line(self._offset + cut))
            block = block[:cut]
        data = block + self._kept
        # a line break at the end belongs to the line that is kept
        cut = data.find(b"\n", 0, len(data) - 1) + 1
        if cut:
            found += self._lines(data[cut:], self._offset + cut)
            data = data[:cut]
        self._keep(data)
        return found

    def finish(self) -> list[Line]:
        """Returns the first line of the file, once its first block was given."""
        if self._long_end is not None:
            return [self._long_line(self._offset)]
        found = self._lines(self._kept, self._offset)
        self._kept = b""
        return found

    def _lines(self, data: bytes, start: int) -> list[Line]:
        """Returns the lines of bytes that begin at an offset, the last one first."""
        found = list[Line]()
        for text in data.split(b"\n"):
            end = start + len(text)
            if text:
                is_long = len(text) > self._max
                found.append(Line(start=start, end=end, data=None if is_long else text))
            start = end + 1
        if found and not data.endswith(b"\n"):
            found[-1] = replace(found[-1], is_whole=False)
        return found[::-1]

    def _keep(self, data: bytes) -> None:
        length = len(data.removesuffix(b"\n"))
        if length > self._max:
            self._long_end, data = self._offset + length, b""
        self._kept = data

    def _long_line(self, start: int) -> Line:
        assert self._long_end is not None
        end, self._long_end = self._long_end, None
        return Line(start=start, end=end, data=None)
