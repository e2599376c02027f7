"""Bearer tokens: which of them open the buckets, and for how long."""

import time
import uuid


class Tokens:
    """Those that were handed out; all but the ones that are over count."""

    def __init__(self, *given: str) -> None:
        """Begins with tokens that never end by themselves."""
        self._until = dict.fromkeys(given, float("inf"))

    def hand_out(self, seconds: float) -> str:
        """Returns a new one, which counts for some seconds."""
        made = uuid.uuid4().hex
        self._until[made] = time.monotonic() + seconds
        return made

    def revoke(self) -> None:
        """Ends all."""
        self._until.clear()

    def counts(self, token: str) -> bool:
        """Returns whether a token was handed out, and is not over."""
        return self._until.get(token, 0.0) > time.monotonic()
