"""Restores by all processes of a job: which checkpoint it is, process 0 tells.

They meet twice: before the first byte is read, from where on each may wait for the
others, so either all begin or none does; and after the last, so that a restore ends
well in all of them, or in each with an error that names who failed it. Each time
process 0 hears all and tells the verdict. What stands on the board first counts: that
of process 0, unless another could not wait for it so long.

While they wait or read, each tells now and then what it waits for, so that those who
wait for it can log it.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Final

from storesvc_client._job.job import Job, Outcome, process_name
from storesvc_client._job.rendezvous import Calls
from storesvc_client._job.wait_log import Looks
from storesvc_client._restore.joint_outcomes import (
    absent,
    failed,
    late,
    listed,
    outcome_of,
)
from storesvc_client._values.durations import NEVER, Deadline
from storesvc_client._values.values import ProcessReading
from storesvc_client.errors import (
    InvalidRequestError,
    PeerFailedError,
    StoreError,
    UnavailableError,
)

PATIENCE_SECONDS: Final = 300.0
"""How long a process is waited for that does not come, at most."""

REFUSED_SECONDS: Final = 10.0
"""How long who is refused before it asks for anything waits for the others, to tell
them."""

FAILED_SECONDS: Final = 60.0
"""How long process 0 waits, once it knows of a failure, for those who have not asked:
they would take its next call for this one."""

TURN_SECONDS: Final = 1.0
"""How often who waits looks whether another process has failed."""

GRACE_SECONDS: Final = 5.0
"""How long process 0 listens for more failures once it knows of one: a slow storage is
slow for many processes at a time."""

_SECOND_HAND: Final = "second hand"
"""Why a process has failed that was told so by another."""

_log = logging.getLogger(__name__)


@contextmanager
def together(job: Job | None, run: str) -> "Generator[JointRestore | None]":
    """Yields the restore of all processes of a job, who are told where this one fails.

    Args:
        job: The processes; None: this one is alone, and so it is None that is yielded.
        run: Which all of them read.
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
    """One restore of a job, or only its beginning, where all processes open the same
    checkpoint."""

    def __init__(self, job: Job, run: str) -> None:
        """Knows nothing of the others yet.

        Args:
            job: The processes.
            run: Which all of them read.
        """
        self.job = job
        self._calls = Calls(job, f"read/{run}")
        self._what = run
        self._place = ""
        """On the board, where the processes meet; "": not known yet."""
        self._number: int | None = None
        """Of the call of this process, which waits for its place; process 0 has
        none."""
        self._absent = set(range(1, job.count))
        """Who does not take part yet, as far as process 0 knows."""
        self._deadline = NEVER
        self._seconds = math.inf
        """How long a process is waited for that does not come ..."""
        self._end = math.inf
        """... which is until then."""
        self._is_begun = False
        self._news = count()
        self._failed_at = math.inf
        """When this process first knew that another had failed."""

    @property
    def own_name(self) -> str:
        """What messages call this process."""
        return self._name(self.job.index)

    def begin(self, asked: str, resolve: Callable[[], str], deadline: Deadline) -> str:
        """Returns the name of the checkpoint: what process 0 finds, for all.

        Args:
            asked: What is to be read, as messages call it: "prod/llama-8b@latest".
            resolve: Finds it.
            deadline: Until when to wait for the others, here and in ``check``; five
                minutes at most.

        Raises:
            StoreError: What process 0 was refused with.
            InvalidRequestError: It asks for another.
            UnavailableError: It does not ask for any.
        """
        self._what = asked
        self._deadline = deadline
        self._seconds = min(deadline.seconds, PATIENCE_SECONDS)
        self._end = min(deadline.end, time.monotonic() + PATIENCE_SECONDS)
        if self.job.index == 0:
            return self._lead(resolve)
        self._number = self._calls.begin()
        key = self._calls.place_key(self._number)
        # process 0 may have waited for its store as long
        end = self._end + GRACE_SECONDS
        place, _ = self._awaited(key, 0, end, grace=math.inf)
        self._place = place or self._calls.take_back(self._number)
        if not self._place:
            raise self._absence(0).error
        text = self.job.told(self._asked_key)
        assert text is not None  # it is told before any place is
        told = Outcome.of_text(text)
        if told.failure:
            raise told.error
        if told.asked != asked:
            raise InvalidRequestError(
                f"restore of {asked}: {self._name(0)} asks for {told.asked} at the "
                "same time; ask for the same in all processes of the job, or with "
                "Distributed(processes='this')"
            )
        return told.name

    def check(self, digest: str, choice: str) -> str:
        """Returns once all processes are about to read the same: what process 0 has
        chosen.

        Args:
            digest: Of what this process has planned for all of them.
            choice: Of this process.

        Raises:
            InvalidRequestError: One has planned otherwise; names it.
            PeerFailedError: One has failed; says why.
            UnavailableError: One does not read; names it.
        """
        if self.job.index == 0:
            verdict = self._stands("begin", self._compared(digest, choice))
        else:
            self._tell("begin", Outcome(name=digest))
            # process 0 may have come later, and waited as long for some of the others
            end = min(self._end + self._seconds, self._deadline.end) + GRACE_SECONDS
            key = self._key("begin", 0)
            text, news = self._awaited(key, 0, end, grace=2 * GRACE_SECONDS)
            if text is None:
                failure = self.failure()
                why = self._failed(failure) if failure else self._lateness(0, news)
                verdict = self._stands("begin", why)
            else:
                verdict = Outcome.of_text(text)
        if verdict.failure:
            raise verdict.error
        self._is_begun = True
        return verdict.name

    def end(self, own: ProcessReading, *, seconds: float) -> ProcessReading:
        """Returns once all processes have ended: what was read by the one that took the
        longest.

        Args:
            own: What this process read.
            seconds: How long the others may take.

        Raises:
            PeerFailedError: Some have failed, or have not ended in that time; names
                them, and what they lack.
        """
        end = time.monotonic() + seconds + GRACE_SECONDS
        if self.job.index == 0:
            verdict = self._stands("end", self._slowest(own, end))
        else:
            self._tell("end", outcome_of(own))
            # it may have begun later, by as long as it was waited for
            end += self._seconds + GRACE_SECONDS
            text, news = self._awaited(
                self._key("end", 0), 0, end, grace=2 * GRACE_SECONDS
            )
            if text is None:
                told = self.failure() or f"{self._name(0)} has not ended{news}"
                verdict = self._stands("end", self._failed(told))
            else:
                verdict = Outcome.of_text(text)
        if verdict.failure:
            raise PeerFailedError(verdict.failure)
        return ProcessReading(**json.loads(verdict.name))

    def failure(self) -> str:
        """Returns what the first process that failed, while all read, has told; "":
        none has, as far as it is known."""
        with suppress(StoreError):
            return self.job.told(self._failure_key) or ""
        return ""

    def fail(self, error: BaseException) -> str:
        """Tells why this process has failed, and returns why others have, as far as
        that is known; "": it is not.

        Where it was to begin already, or had ended well, it changes nothing.
        """
        others: list[str] = []
        with suppress(StoreError):  # the error that this is about is the one to raise
            if not self._place and not self._met_late(error):
                return ""
            told = self._own_failure(error)
            is_second_hand = isinstance(error, PeerFailedError)
            if not is_second_hand:
                self.job.tell(self._failure_key, told)
            is_first = self.job.index == 0
            if is_first:
                self._tell("begin", self._failed(told))
                self._gather(-math.inf, grace=0)  # who asks now is told, too
            else:
                self._tell("begin", Outcome(failure=told))
                reason = _SECOND_HAND if is_second_hand else ""
                self._tell("end", Outcome(failure=told, reason=reason))
                return ""
            try:
                if self._is_begun and isinstance(error, UnavailableError):
                    _, others = self._heard(time.monotonic() + GRACE_SECONDS)
            finally:
                self._tell("end", self._failed(told, *others))
        return listed(others)

    @contextmanager
    def telling(self, describe: Callable[[], str]) -> Generator[None]:
        """Tells the others now and then how far this process is.

        Args:
            describe: Returns it; called by another thread.
        """
        ended = threading.Event()

        def tell() -> None:
            looks = Looks()
            with suppress(StoreError):  # who is not told news is told the end
                while not ended.wait(looks.left):
                    if looks.are_due():
                        self._tell_news(describe())

        thread = threading.Thread(target=tell, name="storesvc-news", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _lead(self, resolve: Callable[[], str]) -> str:
        """The name of the checkpoint, once all others take part and are told it."""
        refusal: StoreError | None = None
        try:
            told = Outcome(name=resolve(), asked=self._what)
        except StoreError as e:
            refusal = e
            told = Outcome(failure=str(e), kind=type(e).__name__, reason=e.reason)
        self._open(told)
        if refusal is not None:
            # they may come much later, and would wait for a call that was made already
            self._gather(self._end, grace=math.inf)
            raise refusal
        self._gather(self._end, grace=FAILED_SECONDS)
        if failure := self.failure():
            raise self._stands("begin", self._failed(failure)).error
        if self._absent:
            raise self._stands("begin", self._absence(min(self._absent))).error
        return told.name

    def _open(self, told: Outcome) -> None:
        """Makes a place for all, and tells there what process 0 asks for."""
        place = self._calls.lead()
        self.job.tell(f"{place}/asked", told.to_text())
        self._place = place

    def _gather(self, end: float, *, grace: float) -> None:
        """Gives all others the place. Meanwhile, who is waited for is logged.

        Args:
            end: Until when the others are waited for.
            grace: How long at most once one has failed, which is told to those who are
                here, and to those who come.
        """
        looks, has_told, seconds = Looks(), False, 0.0
        while True:
            for index in sorted(self._absent):
                if self._calls.take(index, self._place, seconds=seconds):
                    self._absent.remove(index)
                seconds = 0.0
            if self._failed_at == math.inf and (failure := self.failure()):
                self._failed_at = time.monotonic()
                self._stands("begin", self._failed(failure))
            left = min(end, self._failed_at + grace) - time.monotonic()
            if not self._absent or left <= 0:
                return
            if not has_told:
                self._tell_wait(min(self._absent), looks, "")
                has_told = True
            seconds = min(left, TURN_SECONDS, looks.left)
            if looks.are_due():
                self._log_wait(min(self._absent), looks, "")

    def _met_late(self, error: BaseException) -> bool:
        """Whether the others are met by a process that has failed before it met them,
        so that they can be told; waits for them where it was refused at once."""
        is_first, is_refused = self.job.index == 0, self._number is None
        waits = is_refused and isinstance(error, Exception)
        end = time.monotonic() + (REFUSED_SECONDS if waits else 0.0)
        if is_first:
            self._open(self._failed(self._own_failure(error)))
            self._gather(end, grace=math.inf)
            return True
        try:
            if self._number is None:
                self._number = self._calls.begin()
                key = self._calls.place_key(self._number)
                self._awaited(key, 0, end, grace=math.inf)
        finally:  # Ctrl-C, too
            if self._number is not None:
                self._place = self._calls.take_back(self._number)
        return bool(self._place)

    def _own_failure(self, error: BaseException) -> str:
        return f"{self.own_name}: {str(error) or type(error).__name__}"

    def _name(self, index: int) -> str:
        """What messages call a process."""
        return process_name(self.job, index)

    @property
    def _failure_key(self) -> str:
        """Of what the first process that failed has told."""
        return f"{self._place}/failure"

    @property
    def _asked_key(self) -> str:
        """Of what process 0 asks for."""
        return f"{self._place}/asked"

    def _key(self, part: str, index: int) -> str:
        """Of what a process tells at the beginning or end: process 0, the verdict."""
        return f"{self._place}/{part}/{index}"

    def _tell(self, part: str, outcome: Outcome) -> None:
        self.job.tell(self._key(part, self.job.index), outcome.to_text())

    def _stands(self, part: str, verdict: Outcome) -> Outcome:
        """The verdict that stands, be it this or one that was there before."""
        self.job.tell(self._key(part, 0), verdict.to_text())
        text = self.job.told(self._key(part, 0))
        assert text is not None
        return Outcome.of_text(text)

    def _compared(self, digest: str, choice: str) -> Outcome:
        """The verdict of process 0 on the beginning."""
        for index in range(1, self.job.count):
            key = self._key("begin", index)
            text, news = self._awaited(key, index, self._end, grace=0)
            if text is None:
                failure = self.failure()
                if failure:
                    return self._failed(failure)
                return self._lateness(index, news)
            told = Outcome.of_text(text)
            if told.failure:
                return self._failed(self.failure() or told.failure)
            if told.name != digest:
                return Outcome(
                    failure=f"restore of {self._what}: "
                    f"{self._name(index)} asks for other leaves, shardings "
                    f"or another checkpoint than {self._name(0)}; restore "
                    "alike in all processes, or with Distributed(processes='this')",
                    kind=InvalidRequestError.__name__,
                )
        return Outcome(name=choice)

    def _slowest(self, own: ProcessReading, end: float) -> Outcome:
        """The verdict of process 0 on the end."""
        readings, failures = self._heard(end)
        if failures:
            return self._failed(*failures)
        return outcome_of(max([own, *readings], key=lambda each: each.seconds))

    def _heard(self, end: float) -> tuple[list[ProcessReading], list[str]]:
        """What the others read, and why some have not: first those who say why."""
        readings, absent = list[ProcessReading](), list[str]()
        first_hand, second_hand = list[str](), list[str]()
        for index in range(1, self.job.count):
            key = self._key("end", index)
            text, news = self._awaited(key, index, end, grace=GRACE_SECONDS)
            if text is None:
                absent.append(f"{self._name(index)} has not ended{news}")
            elif (outcome := Outcome.of_text(text)).failure:
                is_second_hand = outcome.reason == _SECOND_HAND
                (second_hand if is_second_hand else first_hand).append(outcome.failure)
            else:
                readings.append(ProcessReading(**json.loads(outcome.name)))
        told = first_hand or second_hand
        failure = self.failure()
        is_new = not failure.startswith(f"{self.own_name}: ") and failure not in told
        if absent and failure and is_new:  # of one that had read all of its own
            told = [failure, *told]
        return readings, [*told, *absent]

    def _awaited(
        self, key: str, index: int, end: float, *, grace: float
    ) -> tuple[str | None, str]:
        """What a process tells, and its last news. Meanwhile, who is waited for is
        logged.

        Args:
            key: Under which it tells.
            index: Of the process.
            end: Until when it is waited for; then it is None that it tells.
            grace: How long it is waited for at most once any process has failed.
        """
        looks, news, number = Looks(), "", 0
        while True:
            now = time.monotonic()
            left = max(0.0, min(end, self._failed_at + grace) - now)
            text = self.job.told(key, seconds=min(left, TURN_SECONDS, looks.left))
            while self._place and (
                told := self.job.told(self._news_key(index, number))
            ):
                news, number = f": {told}", number + 1
            if text is not None or not left:
                return text, news
            if self._place and self._failed_at == math.inf and self.failure():
                self._failed_at = time.monotonic()
            if looks.are_due():
                self._log_wait(index, looks, news)

    def _log_wait(self, index: int, looks: Looks, news: str) -> None:
        waits = self._tell_wait(index, looks, news)
        _log.warning("restore of %s waits for %s", self._what, waits)

    def _tell_wait(self, index: int, looks: Looks, news: str) -> str:
        """Tells those who wait for this process who it waits for itself; returns it."""
        waited = f"for {looks.waited:.0f} s now"
        waits = f"{self._name(index)} of {self.job.count}, {waited}{news}"
        if self._place:
            with suppress(StoreError):  # who is not told news is told the end
                self._tell_news(f"it waits for {waits}")
        return waits

    def _tell_news(self, news: str) -> None:
        self.job.tell(self._news_key(self.job.index, next(self._news)), news)

    def _news_key(self, index: int, number: int) -> str:
        return f"{self._place}/news/{index}/{number}"

    def _absence(self, index: int) -> Outcome:
        """What is told where a process does not ask."""
        return absent(self._what, self._one_of_all(index), self._seconds)

    def _lateness(self, index: int, news: str) -> Outcome:
        """The verdict where a process that has asked does not begin."""
        return late(self._what, self._one_of_all(index), self._seconds, news)

    def _failed(self, *told: str) -> Outcome:
        """The verdict where processes have failed."""
        return failed(self._what, told)

    def _one_of_all(self, index: int) -> str:
        return f"{self._name(index)} of {self.job.count}"
