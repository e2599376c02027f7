"""What a run keeps: its retention policy, its purge delay, its labels."""

import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Final

from google.protobuf.duration_pb2 import Duration

from storesvc_client._rpc.run_stub import RunBase
from storesvc_client._values.arguments import checked_labels, checked_text
from storesvc_client._values.durations import duration_message
from storesvc_client._values.policies import RetentionPolicy
from storesvc_client._values.policy_messages import policy_message, policy_of
from storesvc_client._values.values import RetentionDecision, RunInfo
from storesvc_client.errors import InvalidRequestError, translated
from storesvc_proto.v1 import checkpoint_service_pb2 as api

APPLY_SECONDS: Final = 3600.0
"""How long a policy may take to be applied: it may delete thousands."""


class RunRetention(RunBase):
    """The part of a run that sets it up."""

    def info(self) -> RunInfo:
        """Returns what is known of the run.

        Raises:
            NotFoundError: There is no such run.
        """
        return RunInfo.from_message(self._get())

    def retention(self) -> RetentionPolicy | None:
        """Returns the policy that says which checkpoints stay; None: all do.

        Raises:
            NotFoundError: There is no such run.
        """
        run = self._get()
        return policy_of(run.retention) if run.HasField("retention") else None

    def retain(
        self,
        policy: RetentionPolicy | None,
        *,
        purge_delay: timedelta | None = None,
        etag: str | None = None,
    ) -> RunInfo:
        """Makes a policy that of the run, and returns the run; creates it where it does
        not exist.

        The store deletes by itself, from time to time, what the policy does not keep.
        ``preview_retention`` tells beforehand what that will be.

        Args:
            policy: Such as ``KeepLatest(3) | KeepEvery(steps=10_000)``; None keeps
                all checkpoints.
            purge_delay: How long a deleted checkpoint can be undeleted; None leaves it
                as it is.
            etag: ``RunInfo.etag``: refuses a run that has changed since.

        Raises:
            InvalidRequestError: The policy contradicts itself, or keeps nothing.
            ConflictError: The run has another etag.
        """
        message, paths = api.Run(), ["retention"]
        if policy is not None:
            message.retention.CopyFrom(policy_message(policy))
        if purge_delay is not None:
            paths.append("purge_delay")
            message.purge_delay.CopyFrom(self._delay_message(purge_delay))
        return self._update(message, paths, etag)

    def configure(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        purge_delay: timedelta | None = None,
        etag: str | None = None,
    ) -> RunInfo:
        """Sets labels or the purge delay of the run, and returns it; creates it where
        it does not exist.

        Args:
            labels: All of them; None leaves them as they are.
            purge_delay: How long a deleted checkpoint can be undeleted; None leaves it
                as it is.
            etag: ``RunInfo.etag``: refuses a run that has changed since.

        Raises:
            InvalidRequestError: Nothing is to be set, or it breaks a bound.
            ConflictError: The run has another etag.
        """
        message, paths = api.Run(), []
        if labels is not None:
            paths.append("labels")
            message.labels.update(checked_labels(self.name, labels))
        if purge_delay is not None:
            paths.append("purge_delay")
            message.purge_delay.CopyFrom(self._delay_message(purge_delay))
        if not paths:
            raise InvalidRequestError(
                f"{self.name}: expected labels= or purge_delay= to configure, got none"
            )
        return self._update(message, paths, etag)

    def preview_retention(
        self, policy: RetentionPolicy | None = None
    ) -> list[RetentionDecision]:
        """Returns what would become of each checkpoint, newest step first; deletes
        nothing.

        Args:
            policy: One to try; None: that of the run.

        Raises:
            InvalidRequestError: The policy contradicts itself, or keeps nothing.
            NotFoundError: There is no such run.
        """
        request = api.ApplyRetentionRequest(
            name=self._name.resource, validate_only=True
        )
        if policy is not None:
            request.policy.CopyFrom(policy_message(policy))
        for attempt in self._connection.attempts("ApplyRetention"):
            with attempt:
                decisions = list(self._decisions(request))
        return decisions

    def apply_retention(self) -> list[RetentionDecision]:
        """Deletes, softly, what the policy of the run does not keep, at once, and
        returns what became of each checkpoint, newest step first.

        What changes meanwhile is left for the next time. After an
        ``UnavailableError`` some may be deleted; it is safe to call again.

        Raises:
            NotFoundError: There is no such run.
        """
        self._get()  # of a server that comes back now, patiently: the next call is not
        request = api.ApplyRetentionRequest(name=self._name.resource)
        return list(self._decisions(request))

    def _decisions(
        self, request: api.ApplyRetentionRequest
    ) -> Iterator[RetentionDecision]:
        with translated(self._connection.address):
            for page in self._stub.ApplyRetention(request, timeout=APPLY_SECONDS):
                yield from map(RetentionDecision.from_message, page.decisions)

    def _get(self) -> api.Run:
        request = api.GetRunRequest(name=self._name.resource)
        return self._ask(self._stub.GetRun, request).run

    def _update(self, run: api.Run, paths: list[str], etag: str | None) -> RunInfo:
        run.name = self._name.resource
        request = api.UpdateRunRequest(
            run=run,
            etag=checked_text(f"{self.name}: etag=", etag),
            request_id=str(uuid.uuid4()),
        )
        request.update_mask.paths.extend(paths)
        # the same request each time: the store tells a repetition by its id
        for attempt in self._connection.attempts("UpdateRun"):
            with attempt, translated(self._connection.address):
                response = self._stub.UpdateRun(
                    request, timeout=self._connection.timeout
                )
        return RunInfo.from_message(response.run)

    def _delay_message(self, delay: timedelta) -> Duration:
        return duration_message(delay, f"purge_delay= of {self.name}")
