"""Retention of a run: which checkpoints stay."""

from collections.abc import Iterator
from typing import Final

from storesvc_client._api.run_record import get_run, set_purge_delay, update_run
from storesvc_client._rpc.run_stub import RunStub
from storesvc_client._values.arguments import DurationLike
from storesvc_client._values.notebook import Rows
from storesvc_client._values.policies import RetentionPolicy, policy_message, policy_of
from storesvc_client._values.values import RetentionDecision, RunInfo
from storesvc_client.errors import translated
from storesvc_proto.v1 import checkpoint_service_pb2 as api

APPLY_SECONDS: Final = 3600.0
"""Timeout of a call that applies a policy; it may delete thousands of checkpoints."""


class Retention:
    """The retention policy of a run; ``run.retention``.

    >>> policy = KeepLatest(3) | KeepEvery(steps=10_000)
    >>> deleted = [d.step for d in run.retention.preview(policy) if not d.kept]
    >>> run.retention.set(policy, purge_delay=3 * 86_400)
    """

    def __init__(self, stub: RunStub) -> None:
        self._stub = stub

    def __repr__(self) -> str:
        return f"<Retention of {self._stub.name}>"

    def get(self) -> RetentionPolicy | None:
        """Returns the policy of the run; None if all checkpoints stay.

        Raises:
            NotFoundError: There is no such run.
        """
        run = get_run(self._stub)
        return policy_of(run.retention) if run.HasField("retention") else None

    def set(
        self,
        policy: RetentionPolicy | None,
        *,
        purge_delay: DurationLike | None = None,
        etag: str | None = None,
    ) -> RunInfo:
        """Sets the policy of the run, and returns the run; creates it if necessary.

        The server deletes the checkpoints that the policy does not keep: now, after
        each commit, and at each collection. ``preview`` lists them in advance. They
        keep their bytes until the purge delay is over.

        Args:
            policy: Such as ``KeepLatest(3) | KeepEvery(steps=10_000)``; None keeps
                all checkpoints.
            purge_delay: How long a deleted checkpoint can be undeleted, a ``timedelta``
                or seconds; 0: not at all. None leaves it unchanged, which is 3 days in
                a new run.
            etag: ``RunInfo.etag``: rejects the change if the run changed since.

        Raises:
            InvalidRequestError: The policy contradicts itself, or keeps nothing.
            ConflictError: The run changed since the etag was read.
        """
        message, paths = api.Run(), ["retention"]
        if policy is not None:
            message.retention.CopyFrom(policy_message(policy))
        if purge_delay is not None:
            paths.append("purge_delay")
            set_purge_delay(self._stub, message, purge_delay)
        return update_run(self._stub, message, paths, etag)

    def preview(self, policy: RetentionPolicy | None = None) -> list[RetentionDecision]:
        """Returns what a policy would keep and delete; deletes nothing.

        Args:
            policy: The policy to evaluate; None: the policy of the run.

        Returns:
            A decision for each checkpoint, the highest step first.

        Raises:
            InvalidRequestError: The policy contradicts itself, or keeps nothing.
            NotFoundError: There is no such run.
        """
        request = api.ApplyRetentionRequest(
            name=self._stub.name.resource, validate_only=True
        )
        if policy is not None:
            request.policy.CopyFrom(policy_message(policy))
        for attempt in self._stub.connection.attempts("ApplyRetention"):
            with attempt:
                decisions = Rows(self._decisions(request))
        return decisions

    def apply(self) -> list[RetentionDecision]:
        """Deletes the checkpoints that the policy of the run does not keep, at once.

        They can be undeleted until their ``purge_time``. After an ``UnavailableError``
        some may be deleted; it is safe to call this again.

        Returns:
            A decision for each checkpoint, the highest step first.

        Raises:
            NotFoundError: There is no such run.
        """
        # The deleting call is not retried, so a server that restarts is awaited here.
        get_run(self._stub)
        request = api.ApplyRetentionRequest(name=self._stub.name.resource)
        return Rows(self._decisions(request))

    def _decisions(
        self, request: api.ApplyRetentionRequest
    ) -> Iterator[RetentionDecision]:
        method = self._stub.service.ApplyRetention
        with translated(self._stub.connection.address):
            for page in method(request, timeout=APPLY_SECONDS):
                yield from map(RetentionDecision.from_message, page.decisions)
