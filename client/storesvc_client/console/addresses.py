"""Addresses of pages, and the storectl commands that print the same.

>>> checkpoint_url("prod/llama-8b", 500)
'/r/prod/llama-8b@500'
>>> command("stat", "prod/llama-8b@500:a b")
"storectl stat 'prod/llama-8b@500:a b'"
"""

import shlex
from collections.abc import Mapping
from urllib.parse import quote, urlencode

from storesvc.format.names import Which
from storesvc_client._values.texts import printable


def command(*words: str) -> str:
    """Returns a storectl command as it is typed in a shell."""
    return shlex.join(("storectl", *map(printable, words)))


def run_url(run: str, **values: str | int) -> str:
    """Returns the address of the page of a run."""
    return with_values(f"/r/{quote(run)}", values)


def checkpoint_url(run: str, which: Which, **values: str | int) -> str:
    """Returns the address of the page of a checkpoint."""
    return with_values(f"/r/{quote(run)}@{quote(str(which), safe='')}", values)


def plot_url(run: str, metric: str) -> str:
    """Returns the address of the points of a metric."""
    return with_values(f"/plot/{quote(run)}", {"metric": metric})


def trace_url(run: str, which: Which) -> str:
    """Returns the address of the timeline of a save."""
    return f"/trace/{quote(run)}@{quote(str(which), safe='')}"


def tree_url(run: str, which: Which, **values: str | int) -> str:
    """Returns the address of rows of the tree of a checkpoint."""
    return with_values(f"/tree/{quote(run)}@{quote(str(which), safe='')}", values)


def leaf_url(run: str, which: Which, key: str) -> str:
    """Returns the address of the page of a leaf."""
    return checkpoint_url(run, which, key=key)


def diff_url(before: str, after: str) -> str:
    """Returns the address of the comparison of two checkpoints."""
    return with_values("/diff", {"a": before, "b": after})


def change_url(action: str, **values: str | int) -> str:
    """Returns the address of the page that asks before a change."""
    return with_values(f"/change/{action}", values)


def with_values(path: str, values: Mapping[str, str | int]) -> str:
    """Returns an address with values in its query."""
    return f"{path}?{urlencode(values, quote_via=quote)}" if values else path
