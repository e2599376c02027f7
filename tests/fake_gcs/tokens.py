"""Bearer tokens, and their expiry."""

import time
import uuid


class Tokens:
    """Tokens that were issued, and the times at which they expire."""

    def __init__(self, *given: str) -> None:
        """Begins with tokens that do not expire."""
        self._until = dict.fromkeys(given, float("inf"))

    def hand_out(self, seconds: float) -> str:
        """Returns a new token that expires after some seconds."""
        made = uuid.uuid4().hex
        self._until[made] = time.monotonic() + seconds
        return made

    def revoke(self) -> None:
        """Revokes all tokens."""
        self._until.clear()

    def counts(self, token: str) -> bool:
        """Returns whether a token is issued and not expired."""
        return self._until.get(token, 0.0) > time.monotonic()
