"""Log of requests and responses."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A request, and its outcome."""

    method: str
    target: str
    """Target as it was sent, percent-encoded."""
    status: int | None
    """Status of the response; None if the connection ended without one."""
    received_bytes: int
    """Bytes of the request's body."""
    sent_bytes: int
    """Bytes of the response's body."""
    stored_bytes: int
    """Size of the object that it uploaded."""
    copied_bytes: int
    """Size of the object that it made of another one, without its bytes."""
    began_seconds: float
    """``time.monotonic`` at the end of the request."""
    seconds: float
    """Time from the end of the request to the end of the response."""


class Log:
    """Requests since the log was cleared, in the order of their responses."""

    def __init__(self) -> None:
        self._entries: list[Logged] = []
        self._pending: set[object] = set()
        self.most_pending = 0
        """Largest number of pending requests since the log was cleared."""

    @property
    def pending(self) -> int:
        """Number of requests that are received and not yet answered."""
        return len(self._pending)

    @property
    def entries(self) -> list[Logged]:
        """Copy of all entries."""
        return self._entries.copy()

    @property
    def stored_bytes(self) -> int:
        """Bytes that uploads stored."""
        return sum(entry.stored_bytes for entry in self.entries)

    @property
    def copied_bytes(self) -> int:
        """Bytes that the storage copied itself."""
        return sum(entry.copied_bytes for entry in self.entries)

    @property
    def sent_bytes(self) -> int:
        """Bytes of response bodies."""
        return sum(entry.sent_bytes for entry in self.entries)

    def begin(self, request: object) -> None:
        """Adds a pending request."""
        self._pending.add(request)
        self.most_pending = max(self.most_pending, self.pending)

    def add(self, request: object, entry: Logged) -> None:
        """Adds the entry of an answered request."""
        self._pending.discard(request)
        self._entries.append(entry)

    def clear(self) -> None:
        """Removes all entries and pending requests."""
        self._entries.clear()
        self._pending.clear()
        self.most_pending = 0
