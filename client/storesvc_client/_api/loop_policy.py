"""The retention policy that a training loop sets: ``keep=``.

A policy that the run has already is compared, and never overwritten.
"""

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

from storesvc_client._values.policies import Rule, format_policy
from storesvc_client.errors import (
    DataLossError,
    NotFoundError,
    PreconditionError,
    StoreError,
)

if TYPE_CHECKING:
    from storesvc_client._api.run import Run

_log = logging.getLogger("storesvc_client")


class LoopPolicy:
    """The policy of one loop, which the run gets if it has none."""

    def __init__(
        self, run: "Run", keep: Rule | None, purge_delay: timedelta | None
    ) -> None:
        """Prepares to set a policy with its purge delay; None sets none."""
        self._run = run
        self._keep = keep
        self._purge_delay = purge_delay
        self.is_settled = keep is None
        """True if nothing is to be set any more."""
        self._tried_step: int | None = None

    def set(self, *, creates: bool, writes: bool) -> None:
        """Sets the policy of the run, if it has none.

        Args:
            creates: Whether a run that does not exist is created by that.
            writes: False in a process that leaves it to process 0.

        Raises:
            PreconditionError: The run has another policy.
            UnavailableError: The store does not answer.
        """
        if self._keep is None:
            return
        retention = self._run.retention
        try:
            found = retention.get()
        except NotFoundError:
            if not creates:
                return
            found = None
        except DataLossError as e:  # of the newest checkpoint, which restore_or reports
            _log.warning("keep= of %s is compared later: %s", self._run.name, e)
            return
        if found is None:
            if writes:
                retention.set(self._keep, purge_delay=self._purge_delay)
        elif found != self._keep:
            raise PreconditionError(
                f"loop of {self._run.name}: keep=: expected the retention policy of "
                f"the run, {format_policy(found)}, got {format_policy(self._keep)}; "
                "change it with run.retention.set or storectl retain, or leave keep= "
                "out"
            )
        elif self._purge_delay not in (None, delay := self._run.info().purge_delay):
            raise PreconditionError(
                f"loop of {self._run.name}: purge_delay=: expected that of the run, "
                f"{'3 days, 0:00:00' if delay is None else delay}, got "
                f"{self._purge_delay}; change it with run.configure(purge_delay=...), "
                "or leave purge_delay= out"
            )
        # of a metric, it is known only after the first commit whether there is one
        self.is_settled = "best(" not in format_policy(self._keep)

    def set_late(self, saved_step: int | None, *, writes: bool) -> None:
        """Sets the policy of a run that the first commit created, and checks that its
        metrics are saved; logs errors, once after each commit.

        Args:
            saved_step: Step of the newest commit; None if there is none yet.
            writes: False in a process that leaves it to process 0.
        """
        if self.is_settled or saved_step in (None, self._tried_step):
            return
        self._tried_step = saved_step
        try:
            self.set(creates=False, writes=writes)
            if writes:
                self._run.retention.preview()  # rejects a metric that is not saved
            self.is_settled = True
        except StoreError as e:
            _log.error("keep= of %s is not applied: %s", self._run.name, e)
            self.is_settled = isinstance(e, PreconditionError)
