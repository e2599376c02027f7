"""Defines the kinds of problems of a place, and the verdict that follows from them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
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


PROBLEMS: Final[Mapping[str, Problem]] = {
    code: Problem(Severity(severity), meaning, action)
    for code, severity, meaning, action in re.findall(
        r"^\| `(.+)` \| (\w+) \| (.+) \| (.+) \|$",
        Path(__file__).with_name("problems.md").read_text(),
        re.MULTILINE,
    )
}
"""The kinds of problems by code: the check, a full stop, and what is wrong. The file is
the table of the documentation, too."""


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
    return Finding(code, PROBLEMS[code].severity, found, *PROBLEMS[code][1:])


def judge(code: str, wrong: str, fine: str) -> list[Finding]:
    """Returns the problem if there is something wrong, or else that all is fine."""
    return [problem(code, wrong) if wrong else passed(code.partition(".")[0], fine)]


_SKEW_SECONDS: Final = 2.0
"""Difference of clocks from which it is a finding; collection allows an hour."""


def judge_clock(skew_seconds: float, whose: str) -> list[Finding]:
    """Returns what it means that another clock is ahead by so many seconds."""
    shown = f"the clock of {whose} is {abs(skew_seconds):.1f} s "
    shown += "ahead" if skew_seconds > 0 else "behind"
    differs = abs(skew_seconds) > _SKEW_SECONDS
    return judge("clock.differs", shown if differs else "", shown)


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

    @property
    def stored_bytes(self) -> int:
        """Space that the checks of a directory take."""
        return self.object_count * self.object_bytes + 6 * self.state_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The findings about a place for a store."""

    place: str
    """Root or address that was checked, without secrets."""
    findings: Sequence[Finding]
    measured: Mapping[str, float] = field(default_factory=dict)
    """Measured values by name, each with its unit, such as ``read_p50_ms``."""
    written_bytes: int = 0
    """Bytes that the checks wrote, all deleted again."""

    @property
    def exit_code(self) -> int:
        """0: a store works here; 1: it works, with warnings; 2: keep no store here."""
        codes = {Severity.FAILURE: 2, Severity.WARNING: 1}
        return max((codes.get(each.severity, 0) for each in self.findings), default=0)

    @property
    def verdict(self) -> str:
        """One sentence for people."""
        return _VERDICTS[self.exit_code]

    def document(self) -> dict[str, Any]:
        """Returns the diagnosis as JSON, to paste into a report."""
        return {
            "place": self.place,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "written_bytes": self.written_bytes,
            "measured": {name: round(v, 3) for name, v in self.measured.items()},
            "findings": [
                asdict(finding) | {"severity": finding.severity.value}
                for finding in self.findings
            ],
        }


_VERDICTS: Final = (
    "A store works here.",
    "A store works here, with warnings.",
    "Keep no store here.",
)
"""The verdicts by exit code."""
