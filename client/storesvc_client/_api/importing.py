"""Imports checkpoints that other projects wrote; ``Run.import_from``."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from storesvc_client._rpc.run_stub import RunStub
from storesvc_client._save.description import checked_step
from storesvc_client._session import Session
from storesvc_client._values.arguments import checked_labels
from storesvc_client._values.progress import ProgressCallback
from storesvc_client._values.values import Transfer
from storesvc_client.errors import InvalidRequestError

if TYPE_CHECKING:
    from storesvc_client._foreign.mount import ForeignRun


def imported(
    session: Session,
    stub: RunStub,
    source: "str | ForeignRun",
    *,
    steps: Iterable[int] | None,
    labels: Mapping[str, str] | None,
    progress: ProgressCallback | None,
    jobs: int | None,
) -> Iterator[Transfer]:
    """Imports steps as ``Run.import_from``, and yields each once it is committed."""
    from storesvc_client._foreign.importing import import_steps, wanted_steps
    from storesvc_client._foreign.mount import ForeignRun, open_foreign
    from storesvc_client._foreign.step_filler import JOBS

    what = f"import into {stub.name}"
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise InvalidRequestError(
            f"{what}: jobs=: expected a whole number of at least 1, got {jobs!r}"
        )
    wanted = None
    if steps is not None:
        wanted = [checked_step(str(stub.name), step) for step in steps]
    foreign = open_foreign(source) if isinstance(source, str) else source
    if not isinstance(foreign, ForeignRun):
        raise InvalidRequestError(
            f"{what}: expected a URL, such as orbax:///ckpts/run, or what open_foreign "
            f"returns, got {source!r}"
        )
    yield from import_steps(
        session,
        stub,
        foreign.root,
        steps=wanted_steps(foreign.name, foreign.steps(), wanted),
        labels=checked_labels(what, labels),
        progress=progress,
        jobs=JOBS if jobs is None else jobs,
    )
