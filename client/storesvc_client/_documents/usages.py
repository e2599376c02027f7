"""Collects what the runs of a namespace or a store use, for ``storectl`` and the
console."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from storesvc_client import Client, DataLossError, Usage

_CALLS: Final = 8
"""Maximum calls at a time: each reads the index of one run."""


def usages_of(
    client: "Client",
    namespace: str | None,
    on_damage: "Callable[[DataLossError], object]",
) -> "list[Usage]":
    """Returns what each run uses, by name, also runs that have only uploads.

    Args:
        client: Client of the store.
        namespace: The namespace; None: all.
        on_damage: Called with the error of each damaged record of a run or an upload.
    """
    from storesvc_client import DataLossError, NotFoundError

    def usage_of(name: str) -> "Usage | DataLossError | None":
        try:
            return client.run(name).usage()
        except DataLossError as e:  # one of its records is damaged
            return e
        except NotFoundError:  # its first save was aborted in the meantime
            return None

    names = {run.name for run in client.runs(namespace, on_damage=on_damage)}
    names |= {upload.run for upload in client.uploads(namespace, on_damage=on_damage)}
    usages: list[Usage] = []
    with ThreadPoolExecutor(_CALLS, "storesvc-usage") as pool:
        for found in pool.map(usage_of, sorted(names)):
            if isinstance(found, DataLossError):
                on_damage(found)
            elif found is not None:
                usages.append(found)
    return usages
