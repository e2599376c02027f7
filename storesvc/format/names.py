"""Names of namespaces, runs, checkpoints, tags, items, uploads and holds.

Ids are opaque and never decoded. An id that does not match its rule is rejected, so no
id can lead to another path of the bucket. All parsers and checks of this module raise
``InvalidNameError``.

Client and service derive the ids of traces from the id of an upload. So all processes
of a job and all servers emit the spans of a save into one trace, without having to
agree on it. The format is that of W3C Trace Context (16 bytes for a trace, 8 for a
span): the trace has the id of the upload, and the span that is the parent of all others
has its second half.

Example:
    >>> ids = trace_of_upload("0d2f6c1e9a5b4c3d8e7f60718293a4b5")
    >>> f"{ids.trace:032x}", f"{ids.span:016x}"
    ('0d2f6c1e9a5b4c3d8e7f60718293a4b5', '8e7f60718293a4b5')
"""

import re
from dataclasses import dataclass
from typing import Final, NamedTuple, Self, TypeAlias

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f][13579bdf]")
_UPLOAD = re.compile(r"[0-9a-f]{32}")


class TraceIds(NamedTuple):
    """The ids of a span."""

    trace: int
    span: int


def upload_trace(upload: str) -> TraceIds | None:
    """Returns the ids of the root span of an upload; None if its id is no UUID."""
    return _valid(upload, upload[16:]) if _UPLOAD.fullmatch(upload) else None


def parse_traceparent(text: str) -> TraceIds | None:
    """Returns the ids of a ``traceparent``; None if it is malformed, or if its last bit
    states that the trace is not sampled."""
    found = _TRACEPARENT.fullmatch(text)
    return _valid(*found.groups()) if found else None


def traceparent(ids: TraceIds) -> str:
    """Returns the ``traceparent`` of a span that is sampled."""
    return f"00-{ids.trace:032x}-{ids.span:016x}-01"


def _valid(trace: str, span: str) -> TraceIds | None:
    ids = TraceIds(int(trace, 16), int(span, 16))
    return ids if ids.trace and ids.span else None


Which: TypeAlias = int | str
"""A step, "latest" for the newest checkpoint, or a tag."""

LATEST: Final = "latest"
"""Name of the newest committed checkpoint of a run."""

MAX_STEP: Final = 2**63 - 1
"""Maximum step: steps are int64."""

_ID: Final = re.compile(
    r"[A-Za-z0-9]((?:[A-Za-z0-9_-]|\.(?=[A-Za-z0-9])){0,61}[A-Za-z0-9])?"
)
_ITEM: Final = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_HEX_ID: Final = re.compile(r"[0-9a-f]{32}")
_DATA_FILE: Final = re.compile(r"(?:d|[0-9a-f]{32})/[0-9a-f]{32}")
_STEP: Final = re.compile(r"0|[1-9][0-9]{0,18}")

_ID_RULE: Final = (
    "1 to 63 letters, digits, '-', '_' and '.', with a letter or a digit at both ends "
    "and after each '.'"
)
_ITEM_RULE: Final = (
    "1 to 63 lower-case letters, digits and hyphens, a letter first and no hyphen last"
)

_SHOWN_CHARACTERS: Final = 80


class InvalidNameError(ValueError):
    """A name breaks a rule, which the message states."""


@dataclass(frozen=True, slots=True, order=True)
class RunName:
    """A run: ``prod/llama-8b`` for people, ``namespaces/prod/runs/llama-8b`` on the
    wire."""

    namespace: str
    run: str

    def __post_init__(self) -> None:
        check_id(self.namespace, "namespace")
        check_id(self.run, "run")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses ``namespace/run``."""
        namespace, slash, run = text.partition("/")
        if not slash or "/" in run:
            raise InvalidNameError(
                f"run {text!r}: expected namespace/run, such as prod/llama-8b"
            )
        return cls(namespace, run)

    @classmethod
    def from_resource(cls, resource: str) -> Self:
        """Parses ``namespaces/{namespace}/runs/{run}``."""
        match resource.split("/"):
            case ["namespaces", namespace, "runs", run]:
                return cls(namespace, run)
            case _:
                raise InvalidNameError(
                    f"name {resource!r}: expected namespaces/NAMESPACE/runs/RUN"
                )

    @property
    def resource(self) -> str:
        """Name on the wire."""
        return f"namespaces/{self.namespace}/runs/{self.run}"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.run}"


@dataclass(frozen=True, slots=True)
class CheckpointName:
    """A checkpoint of a run."""

    run: RunName
    which: Which

    def __post_init__(self) -> None:
        if isinstance(self.which, str):
            if self.which != LATEST:
                check_tag(self.which)
        elif not 0 <= self.which <= MAX_STEP:
            raise InvalidNameError(
                f"step {self.which} of {self.run}: expected 0 to 2^63 - 1"
            )

    @classmethod
    def from_resource(cls, resource: str) -> Self:
        """Parses ``.../runs/{run}/checkpoints/{checkpoint}``."""
        parent, _, which = resource.rpartition("/checkpoints/")
        return cls(RunName.from_resource(parent), parse_which(which))

    @property
    def resource(self) -> str:
        return f"{self.run.resource}/checkpoints/{self.which}"

    def __str__(self) -> str:
        return f"{self.run}@{self.which}"


@dataclass(frozen=True, slots=True)
class TagName:
    """A tag of a run."""

    run: RunName
    tag: str

    def __post_init__(self) -> None:
        check_tag(self.tag)

    @classmethod
    def from_resource(cls, resource: str) -> Self:
        """Parses ``.../runs/{run}/tags/{tag}``."""
        parent, _, tag = resource.rpartition("/tags/")
        return cls(RunName.from_resource(parent), tag)

    @property
    def resource(self) -> str:
        return f"{self.run.resource}/tags/{self.tag}"

    def __str__(self) -> str:
        return f"{self.run}@{self.tag}"


@dataclass(frozen=True, slots=True)
class HoldName:
    """A hold on a checkpoint of a run."""

    run: RunName
    hold: str

    def __post_init__(self) -> None:
        check_hold(self.hold)

    @classmethod
    def from_resource(cls, resource: str) -> Self:
        """Parses ``.../runs/{run}/holds/{hold}``."""
        parent, _, hold = resource.rpartition("/holds/")
        return cls(RunName.from_resource(parent), hold)

    @property
    def resource(self) -> str:
        return f"{self.run.resource}/holds/{self.hold}"

    def __str__(self) -> str:
        return f"{self.run} hold {self.hold}"


@dataclass(frozen=True, slots=True, order=True)
class UploadName:
    """An upload to a run."""

    run: RunName
    upload: str

    def __post_init__(self) -> None:
        _check_hex_id(self.upload, "upload")

    @classmethod
    def from_resource(cls, resource: str) -> Self:
        """Parses ``.../runs/{run}/uploads/{upload}``."""
        parent, _, upload = resource.rpartition("/uploads/")
        return cls(RunName.from_resource(parent), upload)

    @property
    def resource(self) -> str:
        return f"{self.run.resource}/uploads/{self.upload}"

    def __str__(self) -> str:
        return f"{self.run} upload {self.upload}"


def check_id(text: str, noun: str) -> None:
    """Rejects an invalid id."""
    if not _ID.fullmatch(text):
        words = re.findall(r"[A-Za-z0-9]+", text)
        hint = f", such as {'-'.join(words)[:63].rstrip('-')!r}" if words else ""
        raise InvalidNameError(f"{noun} {text!r}: expected {_ID_RULE}{hint}")


def check_tag(text: str) -> None:
    """Rejects an invalid name of a tag."""
    check_id(text, "tag")
    if text.lower() == LATEST or not text[0].isalpha():
        raise InvalidNameError(
            f"tag {text!r}: expected a letter first, and not {LATEST!r}"
        )


def check_item(text: str) -> None:
    """Rejects an invalid name of an item."""
    if not _ITEM.fullmatch(text):
        raise InvalidNameError(f"item {text!r}: expected {_ITEM_RULE}")


def check_hold(text: str) -> None:
    """Rejects an invalid name of a hold."""
    _check_hex_id(text, "hold")


def check_data_file(text: str) -> None:
    """Rejects a name that this format gives to no data file.

    Names are relative to the pool: the id of an upload, or ``d`` in the first release,
    and the id of the file. No other name is read, so no name leads out of the pool.
    """
    if not _DATA_FILE.fullmatch(text):
        raise InvalidNameError(
            f"data file {text[:_SHOWN_CHARACTERS]!r}: expected UPLOAD/ID, each of 32 "
            "lower-case hexadecimal digits"
        )


def check_upload(text: str) -> None:
    """Rejects an invalid id of an upload."""
    _check_hex_id(text, "upload")


def parse_which(text: str) -> Which:
    """Parses a step, "latest" or a tag."""
    if text == LATEST:
        return LATEST
    if text[:1].isalpha():
        check_tag(text)
        return text
    return parse_step(text)


def _check_hex_id(text: str, noun: str) -> None:
    if not _HEX_ID.fullmatch(text):
        raise InvalidNameError(
            f"{noun} {text!r}: expected 32 lower-case hexadecimal digits"
        )


def parse_step(text: str) -> int:
    """Parses a step: decimal digits without leading zeros."""
    if not _STEP.fullmatch(text) or int(text) > MAX_STEP:
        raise InvalidNameError(
            f"step {text!r}: expected 0 to 2^63 - 1, latest, or a tag"
        )
    return int(text)
