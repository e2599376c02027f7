"""Defines the kinds of problems of a place, and the verdict that follows from them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple


class Severity(Enum):
    """The consequence of a finding."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    FAILURE = "failure"


class Problem(NamedTuple):
    """A kind of problem, the same for every place that has it."""

    severity: Severity
    meaning: str
    """Consequence for a store."""
    action: str
    """Remedy."""


def _failure(meaning: str, action: str) -> Problem:
    """Returns a problem because of which no store should be kept in a place."""
    return Problem(Severity.FAILURE, meaning, action)


def _warning(meaning: str, action: str) -> Problem:
    """Returns a problem with which a store works."""
    return Problem(Severity.WARNING, meaning, action)


_OTHER_STORAGE: Final = "use a storage that the documentation names"

PROBLEMS: Final[Mapping[str, Problem]] = {
    "check.failed": _failure(
        "a check could not be made",
        "mend what the message names, and run the doctor again",
    ),
    "clean-up.left": _warning(
        "what the checks wrote costs until it is deleted", "delete it by hand"
    ),
    "clock.differs": _warning(
        "leases, holds and purge times of hosts disagree by as much",
        "synchronize the clocks (chrony, ntpd)",
    ),
    "conditions.ignored": _failure(
        "two writers of one step would both succeed", _OTHER_STORAGE
    ),
    "encryption.none": _warning(
        "others on the network can read and change checkpoints",
        "serve with --tls-cert and --tls-key, and connect with ca=",
    ),
    "file-system.bucket": _failure(
        "renames are copies, and neither they nor locks are atomic",
        "give the bucket itself, gs://... or s3://...",
    ),
    "file-system.network": _warning(
        "locks and syncs depend on how its server is configured",
        "mount it hard and with locks; if many hosts write, let one server own it",
    ),
    "file-system.volatile": _warning(
        "a restart of the machine loses it", "use it for tests only"
    ),
    "flipped-bit.missed": _failure(
        "corrupt bytes would be used for training",
        "report this: it is a defect of storesvc",
    ),
    "latency.tail": _warning(
        "hedged requests hide most of it; restores vary in time",
        "compare another zone or storage class; watch the p99",
    ),
    "lifecycle.deletes": _failure(
        "new checkpoints share chunks of old ones, which would be lost",
        "exclude the store's prefix; use retention policies of runs",
    ),
    "lifecycle.moves": _warning(
        "reads of shared chunks cost more, and may be slow",
        "exclude the store's prefix",
    ),
    "lists.incomplete": _failure(
        "a collection could delete what a new checkpoint needs", _OTHER_STORAGE
    ),
    "lists.stale": _warning("deleted checkpoints may be shown later", _OTHER_STORAGE),
    "locks.missing": _failure(
        "conditional writes of two processes would both succeed",
        "mount the file system with locks, or use another one",
    ),
    "names.folded": _failure(
        "names that differ in case only would be one object",
        "use a file system that distinguishes upper and lower case",
    ),
    "permissions.create": _failure("nothing can be saved", "grant it"),
    "permissions.delete": _failure(
        "retention frees no bytes, and aborted saves stay", "grant it"
    ),
    "permissions.list": _failure(
        "runs cannot be found, and no garbage can be collected", "grant it"
    ),
    "permissions.overwrite": _failure(
        "records of runs and leases cannot change", "grant it"
    ),
    "permissions.read": _failure("nothing can be restored", "grant it"),
    "permissions.role": _warning(
        "jobs that need it are rejected, except where a rule allows it",
        "storectl auth explain; add a rule to the policy",
    ),
    "policy.none": _warning(
        "one user can delete the checkpoints of another",
        "serve with --policy, if more than one team uses it",
    ),
    "ranges.wrong": _failure(
        "restores fail: each chunk is verified, and rejected",
        "remove the proxy in between, or use another storage",
    ),
    "rate.throttled": _warning(
        "saves and restores of many hosts would be throttled",
        "ask for more quota, or lower ?concurrency=",
    ),
    "reads.stale": _failure(
        "a process could go on from a checkpoint that is not the last",
        "remove the cache in front of the storage, or use another one",
    ),
    "renames.not-atomic": _failure(
        "a crash would leave half-written records", "use a POSIX file system"
    ),
    "requester-pays.on": _failure(
        "storesvc names no project, and requests are rejected",
        "switch requester pays off, or use another bucket",
    ),
    "retention-lock.on": _failure(
        "records of runs, leases and tags cannot change",
        "use a bucket without a retention policy or object lock",
    ),
    "save.wrong": _failure(
        "the place loses data", "use another place, and report this"
    ),
    "soft-delete.on": _warning(
        "each deleted checkpoint costs as much for so long",
        "set its duration to 0: storesvc has undelete",
    ),
    "space.low": _warning(
        "saves are rejected once it is full; nothing is lost",
        "free space, or set a retention policy",
    ),
    "storage-class.cold": _warning(
        "each read costs, and deletions before its minimum time too",
        "use the class STANDARD for a store",
    ),
    "syncs.slow": _warning(
        "each commit waits for several of them",
        "use a faster disk for the store, or a bucket",
    ),
    "version.differs": _warning(
        "one minor version apart is supported, both ways; more is not tested",
        "upgrade the older side",
    ),
    "versioning.on": _warning(
        "deleted checkpoints go on costing as old versions",
        "switch versioning off, or delete old versions by a lifecycle rule",
    ),
}
"""The kinds of problems by code: the check, a full stop, and what is wrong."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    code: str
    """Key of ``PROBLEMS``; the name of the check if there is no problem."""
    severity: Severity
    found: str
    """One sentence: expected and got, or the measured values."""
    meaning: str = ""
    """Consequence for a store in this place; empty for no problem."""
    action: str = ""
    """Remedy; empty for no problem."""

    @property
    def check(self) -> str:
        """Name of the check, such as "conditions"."""
        return self.code.partition(".")[0]


def passed(check: str, found: str) -> Finding:
    """Returns a finding without a problem."""
    return Finding(check, Severity.OK, found)


def skipped(check: str, why: str) -> Finding:
    """Returns the finding of a check that could not be made."""
    return Finding(check, Severity.SKIPPED, why)


def problem(code: str, found: str) -> Finding:
    """Returns the finding of a problem."""
    return Finding(code, PROBLEMS[code].severity, found, *PROBLEMS[code][1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The amount of work of the checks."""

    max_bytes: int = 2 << 30
    """Maximum bytes that the checks write."""
    max_seconds: float = 600.0
    """Time after which no further check begins."""
    sample_count: int = 300
    """Small requests: of 2 % slow ones, at least one is seen with 99.8 %."""
    object_bytes: int = 8 << 20
    """Size of a large object, as of a data file."""
    object_count: int = 64
    """Large objects: each level of concurrency reads at most as many."""
    state_bytes: int = 32 << 20
    """Size of the state that is saved, killed and restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The findings about a place for a store."""

    place: str
    """Root or address that was checked, without secrets."""
    findings: Sequence[Finding]
    measured: Mapping[str, float] = field(default_factory=dict)
    """Measured values by name, each with its unit, such as ``read_p50_ms``."""
    recommended_root: str | None = None
    """The root with the options that were the fastest; None: the place as given."""
    written_bytes: int = 0
    """Bytes that the checks wrote, all deleted again."""

    @property
    def severity(self) -> Severity:
        """The worst of the findings."""
        found = {finding.severity for finding in self.findings}
        for severity in (Severity.FAILURE, Severity.WARNING):
            if severity in found:
                return severity
        return Severity.OK

    @property
    def exit_code(self) -> int:
        """0: a store works here; 1: it works, with warnings; 2: keep no store here."""
        return {Severity.FAILURE: 2, Severity.WARNING: 1}.get(self.severity, 0)

    @property
    def verdict(self) -> str:
        """One sentence for people."""
        return _VERDICTS[self.severity]

    def document(self) -> dict[str, Any]:
        """Returns the diagnosis as JSON, to paste into a report."""
        return {
            "place": self.place,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "recommended_root": self.recommended_root,
            "written_bytes": self.written_bytes,
            "measured": {name: round(v, 3) for name, v in self.measured.items()},
            "findings": [
                asdict(finding) | {"severity": finding.severity.value}
                for finding in self.findings
            ],
        }


_VERDICTS: Final = {
    Severity.OK: "A store works here.",
    Severity.WARNING: "A store works here, with warnings.",
    Severity.FAILURE: "Keep no store here.",
}
