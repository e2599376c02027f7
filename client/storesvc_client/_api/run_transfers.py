"""Checkpoints that enter a run from elsewhere: imports from other projects, and copies
between runs."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Self

from storesvc_client._api.copying import RunCopy
from storesvc_client._api.importing import imported
from storesvc_client._rpc.run_stub import RunStub
from storesvc_client._session import Session
from storesvc_client._values.progress import ProgressCallback
from storesvc_client._values.values import Transfer
from storesvc_client.errors import InvalidRequestError

if TYPE_CHECKING:
    from storesvc_client._foreign.mount import ForeignRun


class RunTransfers:
    """The part of ``Run`` that imports and copies."""

    name: str
    _session: Session
    _stub: RunStub

    def import_from(
        self,
        source: "str | ForeignRun",
        *,
        steps: Iterable[int] | None = None,
        labels: Mapping[str, str] | None = None,
        progress: ProgressCallback | None = None,
        jobs: int | None = None,
    ) -> list[Transfer]:
        """Imports checkpoints that another project wrote, the lowest step first, and
        returns once all are committed. Needs no jax, and none of the project's code.

        Each becomes a checkpoint of this run at the same step, with its metrics, and
        with labels that record where it comes from: ``import.url``, ``import.format``,
        ``import.digest`` of the files that describe it, ``import.time``, and
        ``import.create_time`` if they state it. Chunks that an earlier checkpoint has
        are not stored again. A step that was imported from the same files is skipped,
        so an import that was interrupted is repeated to finish it.

        Args:
            source: Format and location of the checkpoints, such as
                "orbax:///ckpts/run" or "safetensors:gs://bucket/model"; or what
                ``open_foreign`` returns.
            steps: Steps to import; None: all finished ones.
            labels: Texts to keep with each checkpoint, besides these.
            progress: Called with a ``Progress`` of each checkpoint; see
                ``ProgressCallback``.
            jobs: Maximum reads in flight; None: 16.

        Returns:
            A ``Transfer`` for each step, also for those that were skipped.

        Raises:
            NotFoundError: The location has no such step, or none at all.
            AlreadyExistsError: The run has another checkpoint at one of the steps;
                nothing was imported.
            PreconditionError: A step holds something that a checkpoint cannot hold.
            DataLossError: Files of a step are damaged; the steps before it are
                imported.
            UnavailableError: The location or the store does not answer.
        """
        return list(
            run_import(
                self,
                source,
                steps=steps,
                labels=labels,
                progress=progress,
                jobs=jobs,
            )
        )

    def copy_to(
        self,
        target: Self,
        *,
        steps: Iterable[int] | None = None,
        tags: bool = True,
        move_tags: bool = False,
        retention: bool = False,
        progress: ProgressCallback | None = None,
    ) -> list[Transfer]:
        """Copies checkpoints to another run, of any store, and returns once all are
        committed. Needs no jax.

        Chunks keep their bytes, and are compared with their checksums twice, when they
        are read and when they are stored. Those that the target has are not read.
        Metrics, labels, items, documents and pins are copied, and the labels and the
        purge delay of the run if the target does not exist. Checkpoints are created in
        the order of their creation, with the labels ``copy.url``, ``copy.time``, and
        ``copy.uid`` and ``copy.create_time`` of the checkpoint that was saved. A
        checkpoint with the same ``copy.uid`` is skipped, so a copy that was interrupted
        is repeated to finish it, and one that is repeated moves nothing.

        >>> with connect("gs://lab/store") as lab:
        ...     run.copy_to(lab.run("prod/llama-8b"), steps=[100])

        Args:
            target: The run to copy to.
            steps: Steps to copy; None: all.
            tags: Whether to set the tags of the copied checkpoints.
            move_tags: Whether tags that name other checkpoints in the target move.
            retention: Whether to set the retention policy, which may then delete
                checkpoints of the target.
            progress: Called with a ``Progress`` of each checkpoint; see
                ``ProgressCallback``.

        Returns:
            A ``Transfer`` for each checkpoint, also for those that were skipped.

        Raises:
            NotFoundError: There is no such run or step.
            InvalidRequestError: The target is this run, or no run.
            AlreadyExistsError: The target has another checkpoint at one of the steps;
                nothing was copied.
            DataLossError: A checkpoint is damaged; those before it are copied.
            PreconditionError: Tags name other checkpoints in the target; everything
                else is copied.
            UnavailableError: One of the stores does not answer.
        """
        copy = run_copy(self, target, progress)
        done = list(copy.checkpoints(steps))
        if tags:
            copied = [one.checkpoint.step for one in done]
            copy.tags(copied, move=move_tags)
        if retention:
            copy.retention()
        return done


def run_import(
    run: RunTransfers,
    source: "str | ForeignRun",
    *,
    steps: Iterable[int] | None,
    labels: Mapping[str, str] | None,
    progress: ProgressCallback | None,
    jobs: int | None,
) -> Iterator[Transfer]:
    """Imports as ``Run.import_from``, and yields each checkpoint once it is
    committed."""
    return imported(
        run._session,  # noqa: SLF001 - not public
        run._stub,  # noqa: SLF001 - not public
        source,
        steps=steps,
        labels=labels,
        progress=progress,
        jobs=jobs,
    )


def run_copy(
    source: RunTransfers, target: RunTransfers, progress: ProgressCallback | None = None
) -> RunCopy:
    """Returns the copy from a run to another.

    Raises:
        InvalidRequestError: The target is the same run, or no run.
    """
    if not isinstance(target, RunTransfers):
        raise InvalidRequestError(
            f"copy of {source.name}: expected a run to copy to, got {target!r}"
        )
    return RunCopy(
        (source._session, source._stub),  # noqa: SLF001 - not public
        (target._session, target._stub),  # noqa: SLF001 - not public
        progress,
    )
