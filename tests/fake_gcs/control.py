"""The API under ``/_fake/`` by which other processes control the emulator.

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
from dataclasses import asdict
from http import HTTPStatus
from typing import Final

from tests.fake_gcs.faults import Faults, parse_action
from tests.fake_gcs.log import Log
from tests.fake_gcs.messages import Answer, Request, json_answer, refusal
from tests.fake_gcs.objects import Buckets
from tests.fake_gcs.refusals import RefusedError

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
