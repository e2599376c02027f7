"""What was asked and answered."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """A request, and what became of it."""

    method: str
    target: str
    """As it was sent, percent-encoded."""
    status: int | None
    """Of the answer; None where the connection ended without one."""
    received_bytes: int
    """Of the body."""
    sent_bytes: int
    """Of the answer's body."""
    stored_bytes: int
    """The size of the object that it uploaded."""
    seconds: float
    """From the end of the request to the end of the answer."""


class Log:
    """All requests since it was cleared, in the order of their answers."""

    def __init__(self) -> None:
        self._entries: list[Logged] = []
        self._pending: set[object] = set()
        self.most_pending = 0
        """The most that were there at once, since it was cleared."""

    @property
    def pending(self) -> int:
        """Requests that came since it was cleared and are not answered."""
        return len(self._pending)

    @property
    def entries(self) -> list[Logged]:
        """All of them."""
        return self._entries.copy()

    @property
    def stored_bytes(self) -> int:
        """What uploads stored."""
        return sum(entry.stored_bytes for entry in self.entries)

    @property
    def sent_bytes(self) -> int:
        """What answers held."""
        return sum(entry.sent_bytes for entry in self.entries)

    def begin(self, request: object) -> None:
        """Takes note of a request that came."""
        self._pending.add(request)
        self.most_pending = max(self.most_pending, self.pending)

    def add(self, request: object, entry: Logged) -> None:
        """Adds the latest that is answered."""
        self._pending.discard(request)
        self._entries.append(entry)

    def clear(self) -> None:
        """Forgets all."""
        self._entries.clear()
        self._pending.clear()
        self.most_pending = 0
