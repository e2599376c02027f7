"""Joint restores: all processes of a job restore the checkpoint that process 0
resolves.

The processes meet twice on the job's board. 1. Before the first byte is read: from then
on each may wait for the others, so either all start or none does. 2. After the last
byte: a restore succeeds in all processes, or each raises an error that names the
process that failed. In each meeting process 0 collects the outcomes of all and
publishes the verdict. The verdict published first is final: process 0's, unless another
process has stopped waiting for it.

While they wait or read, processes publish progress texts at intervals, which the
processes that wait for them log.

After a joint restore has failed, the processes agree on whether damage was the cause.
Each publishes what ended its part: damage that it found itself, the failure of another
process, or any other error. Process 0 waits for all of them and publishes its verdict:
the damage, if there is any and nothing else failed.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Final, Literal

from storesvc_client._job.job import (
    Job,
    JointCalls,
    Outcome,
    WaitLogTimer,
    process_name,
)
from storesvc_client._telemetry.reports import ProcessReading
from storesvc_client._values.arguments import NEVER, Deadline
from storesvc_client.errors import (
    DataLossError,
    InvalidRequestError,
    PeerFailedError,
    StoreError,
    UnavailableError,
)

_log = logging.getLogger("storesvc_client")

LEAST_SECONDS: Final = 60.0
"""Time that processes wait for each other even if the deadline of the restore is
nearer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The reason for which one process ended its part."""

    kind: Literal["damage", "peer", "other"]
    """Damage that it found, the failure of another process, or another error."""
    text: str = ""
    """The damage."""

    @classmethod
    def from_error(cls, error: StoreError) -> "Finding":
        if isinstance(error, DataLossError):
            return cls(kind="damage", text=str(error))
        is_peer = isinstance(error, PeerFailedError)
        return cls(kind="peer" if is_peer else "other")


def find_damage(findings: Sequence[Finding]) -> str:
    """Returns the damage that ended a restore; "" if another error took part."""
    if any(finding.kind == "other" for finding in findings):
        return ""
    return next((each.text for each in findings if each.kind == "damage"), "")


def agree_on_damage(
    job: Job, place: str, error: StoreError, *, seconds: float, is_final: bool
) -> str:
    """Returns the damage that ended a restore in all processes; "" if it was another
    error, or if processes do not answer.

    Args:
        place: Key prefix of the restore on the board; "" if the processes did not meet.
        error: Error of this process.
        seconds: Time left for the restore.
        is_final: Whether no other checkpoint is left; process 0's counts.
    """
    if not place:
        return ""
    end = time.monotonic() + max(seconds, LEAST_SECONDS)
    own = Finding.from_error(error)
    with suppress(StoreError):  # the caller raises the original error
        if job.index != 0:
            job.post(_key(place, job.index), json.dumps(asdict(own)))
            if own.kind == "other":
                return ""
            # process 0 may wait as long for another process
            verdict = job.read(
                _key(place, 0), seconds=end + LEAST_SECONDS - time.monotonic()
            )
            return "" if verdict is None else json.loads(verdict)["text"]
        damage = ""
        if not is_final and own.kind != "other":
            damage = find_damage([own, *_gather_findings(job, place, end)])
        job.post(_key(place, 0), json.dumps({"text": damage}))
        return damage
    return ""


def _gather_findings(job: Job, place: str, end: float) -> list[Finding]:
    """Returns the findings of the other processes; an absent one counts as an error."""
    findings = []
    for index in range(1, job.count):
        text = job.read(_key(place, index), seconds=max(0.0, end - time.monotonic()))
        fields = {"kind": "other"} if text is None else json.loads(text)
        findings.append(Finding(**fields))
    return findings


def _key(place: str, index: int) -> str:
    return f"{place}/damage/{index}"


_SHOWN: Final = 4
"""Maximum processes listed in a message."""


def list_failures(failures: Sequence[str]) -> str:
    """Returns the first few failures as one text, for messages."""
    more = f"; and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else ""
    return "; ".join(failures[:_SHOWN]) + more


MEETING_SECONDS: Final = 300.0
"""Maximum time to wait for a process to call restore."""

REFUSED_SECONDS: Final = 10.0
"""Time that a process whose arguments were rejected waits for the others, to publish
its error to them."""

FAILED_SECONDS: Final = 60.0
"""Time that process 0, after a failure, waits for processes that have not called
restore yet: they would otherwise join its next call instead of this one."""

POLL_SECONDS: Final = 1.0
"""Interval at which a waiting process checks whether another one has failed."""

GRACE_SECONDS: Final = 5.0
"""Time that process 0 waits for more failures after the first: a slow storage is slow
for many processes at a time."""

_SECOND_HAND: Final = "second hand"
"""Reason of a failure that only repeats another process's failure."""


@contextmanager
def join_restore(job: Job | None, run: str) -> "Generator[JointRestore | None]":
    """Yields the joint restore of a job's processes; publishes an error raised in the
    context to the other processes.

    Args:
        job: The processes; if None, this process is alone and None is yielded.
    """
    if job is None:
        yield None
        return
    joint = JointRestore(job, run)
    try:
        yield joint
    except BaseException as e:
        others = joint.fail(e)
        if others:
            assert isinstance(e, UnavailableError)
            raise UnavailableError(f"{e}; {others}", reason=e.reason) from e
        raise


class JointRestore:
    """One restore by all processes of a job, or one opening of a checkpoint, which is
    the first half of a restore."""

    def __init__(self, job: Job, run: str) -> None:
        """Creates the restore; the other processes are not contacted yet."""
        self.job = job
        self._calls = JointCalls(job, f"read/{run}")
        self._place = ""
        """Key prefix on the board for this call; "" while unknown."""
        self._what = run
        self._number: int | None = None
        """Number of this process's call, until it has a key prefix; None in process
        0."""
        self._absent = set(range(1, job.count))
        """Processes that have not called restore yet, as known to process 0."""
        self._deadline = NEVER
        self._seconds = math.inf
        """Maximum wait for a process that does not arrive ..."""
        self._end = math.inf
        """... and the time at which that wait ends."""
        self._is_begun = False
        self._progress_count = count()
        self._failed_at = math.inf
        """Time at which this process learned of the first failure of another."""

    @property
    def own_name(self) -> str:
        """Name of this process in messages."""
        return self._name(self.job.index)

    def begin(self, asked: str, resolve: Callable[[], str], deadline: Deadline) -> str:
        """Returns the resource name of the checkpoint that process 0 resolves for all.

        Args:
            asked: What to read, as shown in messages: "prod/llama-8b@latest".
            deadline: Deadline for the other processes, here and in ``check``; limited
                to five minutes.

        Raises:
            StoreError: Process 0 could not resolve it.
            InvalidRequestError: Process 0 restores something else.
            UnavailableError: Process 0 does not call restore in time.
        """
        self._what = asked
        self._deadline = deadline
        self._seconds = min(deadline.seconds, MEETING_SECONDS)
        self._end = min(deadline.end, time.monotonic() + MEETING_SECONDS)
        if self.job.index == 0:
            return self._lead(resolve)
        self._number = self._calls.begin()
        key = self._calls.place_key(self._number)
        # process 0 may have waited as long for its server
        end = self._end + GRACE_SECONDS
        place, _ = self._await_key(key, 0, end, grace=math.inf)
        self._place = place or self._calls.take_back(self._number)
        if not self._place:
            raise self._absence(0).error
        text = self.job.read(f"{self._place}/asked")
        assert text is not None  # published before any key prefix
        outcome = Outcome.of_text(text)
        if outcome.failure:
            raise outcome.error
        if outcome.asked != asked:
            raise InvalidRequestError(
                f"restore of {asked}: {self._name(0)} restores {outcome.asked} at the "
                "same time; restore the same checkpoint in all processes of the job, "
                "or use Distributed(processes='this')"
            )
        return outcome.name

    def check(self, digest: str, choice: str) -> str:
        """Waits until all processes are ready to read; returns process 0's choice.

        Args:
            digest: Digest of the plan that this process made for all.

        Raises:
            InvalidRequestError: The plan of a process differs; the message names it.
            PeerFailedError: A process failed; the message gives the cause.
            UnavailableError: A process is not ready in time; the message names it.
        """
        # 1. Meet before the first byte.
        if self.job.index == 0:
            verdict = self._publish_verdict(
                "begin", self._compare_start(digest, choice)
            )
        else:
            self._publish("begin", Outcome(name=digest))
            # process 0 may have started later and waited as long for other processes
            end = min(self._end + self._seconds, self._deadline.end) + GRACE_SECONDS
            key = self._key("begin", 0)
            text, progress = self._await_key(key, 0, end, grace=2 * GRACE_SECONDS)
            if text is None:
                failure = self.failure()
                why = (
                    self._failure_outcome(failure)
                    if failure
                    else self._lateness(0, progress)
                )
                verdict = self._publish_verdict("begin", why)
            else:
                verdict = Outcome.of_text(text)
        if verdict.failure:
            raise verdict.error
        self._is_begun = True
        return verdict.name

    def end(self, own: ProcessReading, *, seconds: float) -> ProcessReading:
        """Waits until all processes have ended; returns the reading of the slowest one.

        Args:
            seconds: Time that the others may still take.
        """
        # 2. Meet after the last byte.
        end = time.monotonic() + seconds + GRACE_SECONDS
        if self.job.index == 0:
            readings, failures = self._collect(end)
            slowest = max([own, *readings], key=lambda each: each.seconds)
            outcome = Outcome(name=json.dumps(asdict(slowest)))
            if failures:
                outcome = self._failure_outcome(*failures)
            verdict = self._publish_verdict("end", outcome)
        else:
            self._publish("end", Outcome(name=json.dumps(asdict(own))))
            # process 0 may have started later, by at most the time it was waited for
            end += self._seconds + GRACE_SECONDS
            text, progress = self._await_key(
                self._key("end", 0), 0, end, grace=2 * GRACE_SECONDS
            )
            if text is None:
                failure = self.failure() or f"{self._name(0)} has not ended{progress}"
                verdict = self._publish_verdict("end", self._failure_outcome(failure))
            else:
                verdict = Outcome.of_text(text)
        if verdict.failure:
            raise PeerFailedError(verdict.failure)
        return ProcessReading(**json.loads(verdict.name))

    def failure(self) -> str:
        """Returns the failure that the first failed process published; "" if none is
        known."""
        with suppress(StoreError):
            return self.job.read(self._failure_key) or ""
        return ""

    def agree_on_damage(self, error: StoreError, *, is_final: bool) -> str:
        """Returns the damage that ended this restore in all processes; see
        ``agree_on_damage``."""
        return agree_on_damage(
            self.job, self._place, error, seconds=self._deadline.left, is_final=is_final
        )

    def fail(self, error: BaseException) -> str:
        """Publishes why this process failed; returns the known failures of others, or
        "".

        Does nothing to a meeting that this process has already passed.
        """
        others: list[str] = []
        with suppress(StoreError):  # the caller raises the original error
            if not self._place and not self._met_late(error):
                return ""
            failure = self._own_failure(error)
            # First the cause, which ends the waits of processes that still read.
            is_second_hand = isinstance(error, PeerFailedError)
            if not is_second_hand:
                self.job.post(self._failure_key, failure)
            # Then the outcome of each meeting, so that no process waits for this one.
            is_first = self.job.index == 0
            if is_first:
                self._publish("begin", self._failure_outcome(failure))
                self._gather(-math.inf, grace=0)  # for processes waiting by now
            else:
                self._publish("begin", Outcome(failure=failure))
                reason = _SECOND_HAND if is_second_hand else ""
                self._publish("end", Outcome(failure=failure, reason=reason))
                return ""
            try:
                if self._is_begun and isinstance(error, UnavailableError):
                    _, others = self._collect(time.monotonic() + GRACE_SECONDS)
            finally:
                self._publish("end", self._failure_outcome(failure, *others))
        return list_failures(others)

    @contextmanager
    def publishing(self, describe: Callable[[], str]) -> Generator[None]:
        """Publishes the progress of this process at intervals within the context, as
        ``describe`` returns it in another thread."""
        ended = threading.Event()

        def publish() -> None:
            timer = WaitLogTimer()
            with suppress(StoreError):  # progress is optional; the end is published
                while not ended.wait(timer.left):
                    if timer.is_due():
                        self._publish_progress(describe())

        thread = threading.Thread(target=publish, name="storesvc-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _lead(self, resolve: Callable[[], str]) -> str:
        """Resolves the checkpoint in process 0 and waits for all others to call
        restore; returns its name."""
        refusal: StoreError | None = None
        try:
            outcome = Outcome(name=resolve(), asked=self._what)
        except StoreError as e:
            refusal = e
            outcome = Outcome(failure=str(e), kind=type(e).__name__, reason=e.reason)
        self._open(outcome)
        if refusal is not None:
            # Wait even for late processes: they would join a call that is already over.
            self._gather(self._end, grace=math.inf)
            raise refusal
        self._gather(self._end, grace=FAILED_SECONDS)
        if failure := self.failure():
            raise self._publish_verdict("begin", self._failure_outcome(failure)).error
        if self._absent:
            verdict = self._absence(min(self._absent))
            raise self._publish_verdict("begin", verdict).error
        return outcome.name

    def _open(self, outcome: Outcome) -> None:
        """Creates the key prefix of this call; publishes process 0's request there."""
        # The request first: a process that gets the prefix reads it without a wait.
        place = self._calls.lead()
        self.job.post(f"{place}/asked", outcome.to_text())
        self._place = place

    def _gather(self, end: float, *, grace: float) -> None:
        """Hands the key prefix to all other processes until ``end``, or for ``grace``
        seconds after a failure, which is published; logs which one is waited for."""
        timer, is_published, seconds = WaitLogTimer(), False, 0.0
        while True:
            for index in sorted(self._absent):
                if self._calls.take(index, self._place, seconds=seconds):
                    self._absent.remove(index)
                seconds = 0.0
            if self._failed_at == math.inf and (failure := self.failure()):
                self._failed_at = time.monotonic()
                self._publish_verdict("begin", self._failure_outcome(failure))
            left = min(end, self._failed_at + grace) - time.monotonic()
            if not self._absent or left <= 0:
                return
            if not is_published:
                self._publish_wait(min(self._absent), timer, "")
                is_published = True
            seconds = min(left, POLL_SECONDS, timer.left)
            if timer.is_due():
                self._log_wait(min(self._absent), timer, "")

    def _met_late(self, error: BaseException) -> bool:
        """Returns whether a process that failed before the first meeting has met the
        others after all, so that it can publish its failure; if its arguments were
        rejected, waits some seconds for them."""
        is_first, is_refused = self.job.index == 0, self._number is None
        waits = is_refused and isinstance(error, Exception)
        end = time.monotonic() + (REFUSED_SECONDS if waits else 0.0)
        if is_first:
            self._open(self._failure_outcome(self._own_failure(error)))
            self._gather(end, grace=math.inf)
            return True
        try:
            if self._number is None:
                self._number = self._calls.begin()
                key = self._calls.place_key(self._number)
                self._await_key(key, 0, end, grace=math.inf)
        finally:  # Ctrl-C, too
            if self._number is not None:
                self._place = self._calls.take_back(self._number)
        return bool(self._place)

    def _own_failure(self, error: BaseException) -> str:
        return f"{self.own_name}: {str(error) or type(error).__name__}"

    def _name(self, index: int) -> str:
        return process_name(self.job, index)

    @property
    def _failure_key(self) -> str:
        return f"{self._place}/failure"

    def _key(self, part: str, index: int) -> str:
        """Returns the key of a process's outcome in a meeting; process 0's is the
        verdict."""
        return f"{self._place}/{part}/{index}"

    def _publish(self, part: str, outcome: Outcome) -> None:
        self.job.post(self._key(part, self.job.index), outcome.to_text())

    def _publish_verdict(self, part: str, verdict: Outcome) -> Outcome:
        """Publishes a verdict unless there is one; returns the published one."""
        # A key is written once, so all processes read the same verdict, also if two
        # of them publish one.
        self.job.post(self._key(part, 0), verdict.to_text())
        text = self.job.read(self._key(part, 0))
        assert text is not None
        return Outcome.of_text(text)

    def _compare_start(self, digest: str, choice: str) -> Outcome:
        """Returns process 0's verdict on the start."""
        for index in range(1, self.job.count):
            key = self._key("begin", index)
            text, progress = self._await_key(key, index, self._end, grace=0)
            if text is None:
                failure = self.failure()
                if failure:
                    return self._failure_outcome(failure)
                return self._lateness(index, progress)
            outcome = Outcome.of_text(text)
            if outcome.failure:
                return self._failure_outcome(self.failure() or outcome.failure)
            if outcome.name != digest:
                return Outcome(
                    failure=f"restore of {self._what}: "
                    f"{self._name(index)} restores other leaves, shardings "
                    f"or another checkpoint than {self._name(0)}; restore "
                    "the same in all processes, or use Distributed(processes='this')",
                    kind=InvalidRequestError.__name__,
                )
        return Outcome(name=choice)

    def _collect(self, end: float) -> tuple[list[ProcessReading], list[str]]:
        """Returns what the others read, and the failures: processes that published a
        cause come before those that have not ended."""
        readings, absent = list[ProcessReading](), list[str]()
        first_hand, second_hand = list[str](), list[str]()
        for index in range(1, self.job.count):
            key = self._key("end", index)
            text, progress = self._await_key(key, index, end, grace=GRACE_SECONDS)
            if text is None:
                absent.append(f"{self._name(index)} has not ended{progress}")
            elif (outcome := Outcome.of_text(text)).failure:
                is_second_hand = outcome.reason == _SECOND_HAND
                (second_hand if is_second_hand else first_hand).append(outcome.failure)
            else:
                readings.append(ProcessReading(**json.loads(outcome.name)))
        failures = first_hand or second_hand
        failure = self.failure()
        is_new = (
            not failure.startswith(f"{self.own_name}: ") and failure not in failures
        )
        if absent and failure and is_new:  # from a process that had read its own share
            failures = [failure, *failures]
        return readings, [*failures, *absent]

    def _await_key(
        self, key: str, index: int, end: float, *, grace: float
    ) -> tuple[str | None, str]:
        """Waits for a process to publish a key, until ``end``, or for ``grace`` seconds
        after a failure of any process; returns its text, or None, and the last progress
        of that process. Logs long waits."""
        timer, progress, number = WaitLogTimer(), "", 0
        while True:
            now = time.monotonic()
            left = max(0.0, min(end, self._failed_at + grace) - now)
            text = self.job.read(key, seconds=min(left, POLL_SECONDS, timer.left))
            while self._place and (
                found := self.job.read(self._progress_key(index, number))
            ):
                progress, number = f": {found}", number + 1
            if text is not None or not left:
                return text, progress
            if self._place and self._failed_at == math.inf and self.failure():
                self._failed_at = time.monotonic()
            if timer.is_due():
                self._log_wait(index, timer, progress)

    def _log_wait(self, index: int, timer: WaitLogTimer, progress: str) -> None:
        waits = self._publish_wait(index, timer, progress)
        _log.warning("restore of %s waits for %s", self._what, waits)

    def _publish_wait(self, index: int, timer: WaitLogTimer, progress: str) -> str:
        """Publishes which process this one waits for; returns that text."""
        waited = f"for {timer.waited_seconds:.0f} s now"
        waits = f"{self._name(index)} of {self.job.count}, {waited}{progress}"
        if self._place:
            with suppress(StoreError):  # progress is optional; the end is published
                self._publish_progress(f"it waits for {waits}")
        return waits

    def _publish_progress(self, progress: str) -> None:
        number = next(self._progress_count)
        self.job.post(self._progress_key(self.job.index, number), progress)

    def _progress_key(self, index: int, number: int) -> str:
        return f"{self._place}/news/{index}/{number}"

    def _absence(self, index: int) -> Outcome:
        """Returns the verdict if a process does not call restore in time."""
        return Outcome(
            failure=f"restore of {self._what}: {self._name(index)} of {self.job.count} "
            f"has not called it within {self._seconds:g} s; restore in all processes "
            "of the job, or with Distributed(processes='this')",
            kind=UnavailableError.__name__,
        )

    def _lateness(self, index: int, progress: str) -> Outcome:
        """Returns the verdict if a process has called restore, but is late to read."""
        return Outcome(
            failure=f"restore of {self._what}: {self._name(index)} of {self.job.count} "
            f"is not ready to read after {self._seconds:g} s{progress}; check that "
            "process, or pass a longer deadline=",
            kind=UnavailableError.__name__,
        )

    def _failure_outcome(self, *failures: str) -> Outcome:
        """Returns the verdict if processes have failed."""
        return Outcome(
            failure=f"restore of {self._what} failed in another process of the job: "
            f"{list_failures(failures)}",
            kind=PeerFailedError.__name__,
        )
