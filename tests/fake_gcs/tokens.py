"""Bearer tokens, their expiry, and the limits of those that are lent."""

import time
import uuid

from tests.fake_gcs.grants import Grant

LENT_SECONDS = 3600.0


class Tokens:
    """Tokens that were issued, and the times at which they expire."""

    def __init__(self, *given: str) -> None:
        """Begins with tokens that do not expire."""
        self._until = dict.fromkeys(given, float("inf"))
        self._limits: dict[str, list[tuple[Grant, ...]]] = {}
        """Grants of limited tokens, of which each must permit a request."""
        self._is_frozen = False
        self.lent_seconds = LENT_SECONDS
        """Life of lent tokens."""
        self.lent: list[str] = []
        """Tokens that were lent, in this order."""
        self.uses: list[tuple[str, str]] = []
        """Token and line of each request that a valid token made."""

    def hand_out(self, seconds: float) -> str:
        """Returns a new token that expires after some seconds."""
        made = uuid.uuid4().hex
        self._until[made] = time.monotonic() + seconds
        return made

    def limit(self, token: str, *grants: Grant) -> None:
        """Limits a token."""
        self._limits[token] = [*self._limits.get(token, []), grants]

    def lend(self, parent: str, grants: tuple[Grant, ...]) -> tuple[str, float]:
        """Returns a token with grants that its parent has too, and its life."""
        seconds = min(self.lent_seconds, self._until[parent] - time.monotonic())
        made = self.hand_out(seconds)
        self._limits[made] = [*self._limits.get(parent, []), grants]
        if self._is_frozen:
            self._limits[made].append(())
        self.lent.append(made)
        return made, seconds

    def freeze(self) -> None:
        """Takes the rights on objects from what lends, so that tokens to come have
        none."""
        self._is_frozen = True

    def end(self, token: str) -> None:
        """Ends a token."""
        self._until[token] = 0.0

    def limits(self, token: str) -> list[tuple[Grant, ...]]:
        """Returns the limits of a token, none if it may do everything."""
        return self._limits.get(token, [])

    def revoke(self) -> None:
        """Revokes all tokens."""
        self._until.clear()

    def counts(self, token: str) -> bool:
        """Returns whether a token is issued and not expired."""
        return self._until.get(token, 0.0) > time.monotonic()
