"""The log of requests, and the API under ``/_fake/`` by which other processes control
the emulator.

| request | body or response |
|---|---|
| POST /_fake/faults | {"match": "POST", "action": ACTION, "times": 1, "after": 0} |
| GET /_fake/log | {"requests": [...], "stored_bytes": 0, "sent_bytes": 0} |
| POST /_fake/clear | clears faults and log |
| POST /_fake/deny, POST /_fake/allow | {"bucket": "b1"} |

An ACTION has a name and fields: {"kind": "status", "code": 503}.

Faults do not apply to these requests; they need no token, and are not logged.
"""

import re
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Final

from tests.fake_gcs.faults import Faults, parse_action
from tests.fake_gcs.messages import Answer, Request, json_answer, refusal
from tests.fake_gcs.objects import Buckets, RefusedError


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


PREFIX: Final = "/_fake/"


class Control:
    """Executes the requests under ``/_fake/``."""

    def __init__(self, buckets: Buckets, faults: Faults, log: Log) -> None:
        self._buckets = buckets
        self._faults = faults
        self._log = log

    def answer(self, request: Request) -> Answer:
        """Executes a request, and returns the response or an error response."""
        try:
            return json_answer(self._do(request))
        except RefusedError as e:
            return refusal(e)
        except (KeyError, TypeError, ValueError, re.error) as e:
            return refusal(RefusedError(HTTPStatus.BAD_REQUEST, repr(e)))

    def _do(self, request: Request) -> dict[str, object]:
        document = request.document()
        match request.method, request.path.removeprefix(PREFIX):
            case "POST", "faults":
                action = parse_action(document.pop("action"))
                self._faults.add(document.pop("match"), action, **document)
            case "GET", "log":
                return {
                    "requests": [asdict(entry) for entry in self._log.entries],
                    "stored_bytes": self._log.stored_bytes,
                    "sent_bytes": self._log.sent_bytes,
                }
            case "POST", "clear":
                self._faults.clear()
                self._log.clear()
            case "POST", "deny":
                self._buckets.deny(document["bucket"])
            case "POST", "allow":
                self._buckets.allow(document["bucket"])
            case _:
                raise RefusedError(
                    HTTPStatus.NOT_FOUND, f"no {request.method} {request.path}"
                )
        return {}
