"""Emulators with a planted defect, as storages and what stands before them have."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

from tests.fake_gcs.emulator import Emulator
from tests.fake_gcs.json_api import JsonApi
from tests.fake_gcs.messages import Answer, Request
from tests.fake_gcs.server import Api


@dataclass(frozen=True)
class _Wrapper:
    """An API in front of another one."""

    api: Api

    def answer(self, request: Request) -> Answer:
        return self.api.answer(request)

    def refused(self, status: int, message: str) -> Answer:
        return self.api.refused(status, message)


class Cache(_Wrapper):
    """Answers a request that it has seen as the first time."""

    def __init__(self, api: Api, pattern: str) -> None:
        super().__init__(api)
        self.pattern = pattern
        self.answers: dict[str, Answer] = {}

    def answer(self, request: Request) -> Answer:
        if not re.search(self.pattern, request.line):
            return super().answer(request)
        # Other parameters are ignored, as TensorStore sends one that is always new.
        known = [request.query.get(name, "") for name in ("prefix", "pageToken")]
        key = f"{request.path} {known} {request.headers.get('range')}"
        if key not in self.answers:
            self.answers[key] = super().answer(request)
        return self.answers[key]


class ShiftedRanges(_Wrapper):
    """Answers each range with the bytes from one byte before."""

    def answer(self, request: Request) -> Answer:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if match is None or match[1] == "0":
            return super().answer(request)
        first, last = (int(number) - 1 for number in match.groups())
        headers = {**request.headers, "range": f"bytes={first}-{last}"}
        answer = super().answer(replace(request, headers=headers))
        shown = re.sub(r"bytes [\d-]+", f"bytes {match[1]}-{match[2]}", _range(answer))
        return replace(answer, headers={**answer.headers, "content-range": shown})


def _range(answer: Answer) -> str:
    return answer.headers.get("content-range", "")


class FoldedNames(_Wrapper):
    """Does not distinguish upper and lower case in names."""

    def answer(self, request: Request) -> Answer:
        query = {
            name: value.lower() if name in ("name", "prefix") else value
            for name, value in request.query.items()
        }
        before, mark, name = request.path.partition("/o/")
        path = f"{before}{mark}{name.lower()}"
        return super().answer(replace(request, path=path, query=query))


class Settings(_Wrapper):
    """A bucket whose resource has further properties."""

    def __init__(self, api: Api, properties: Mapping[str, Any]) -> None:
        super().__init__(api)
        self.properties = properties

    def answer(self, request: Request) -> Answer:
        answer = super().answer(request)
        if not re.fullmatch("/storage/v1/b/[^/]+", request.path):
            return answer
        document = json.loads(bytes(answer.body)) | self.properties
        return replace(answer, body=json.dumps(document).encode())


class Clock(_Wrapper):
    """An API that says another time."""

    def __init__(self, api: Api, skew: timedelta) -> None:
        super().__init__(api)
        self.skew = skew

    def answer(self, request: Request) -> Answer:
        answer = super().answer(request)
        date = format_datetime(datetime.now(UTC) + self.skew, usegmt=True)
        return replace(answer, headers={**answer.headers, "date": date})


class PlantedGcs(Emulator):
    """An emulator of Google Cloud Storage with a defect."""

    def __init__(
        self,
        *,
        wrap: Callable[[Api], Api] = lambda api: api,
        ignored: Sequence[str] = (),
        seconds_between_writes: float = 0.0,
    ) -> None:
        super().__init__(
            lambda made: wrap(JsonApi(made, ignored=ignored)),
            buckets=["b-1"],
            bytes_per_second=math.inf,
            seconds_between_writes=seconds_between_writes,
        )

    @property
    def root(self) -> str:
        """Root of a store in it."""
        return f"gs://b-1/store?endpoint={self.url}"
