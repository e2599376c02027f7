"""Checkpoints that a wrong URL was meant for: of another format, or a folder further
down. Errors name them."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, Final

from storesvc_client._foreign.foreign_step import ForeignRoot
from storesvc_client._foreign.formats import FORMATS
from storesvc_client._foreign.location import Location
from storesvc_client.errors import StoreError

SEARCHED: Final = 16
"""Folders that are looked into."""

ORDER: Final = ("orbax", "jax", "safetensors", "eformer", "levanter")
"""The formats, those first whose files are no part of a checkpoint of another."""

SHOWN: Final = 5
"""Folders that an error names."""


def open_root(
    scheme: str, location: Location, options: Mapping[str, Any]
) -> ForeignRoot:
    """Returns the root of a format at a location."""
    module = import_module(f"{__package__}.formats.{FORMATS[scheme]}")
    root: ForeignRoot = module.open_root(location, **options)
    return root


def other_format(scheme: str, location: Location) -> str | None:
    """Returns the URLs of the checkpoints of other formats at a location; None: no
    other format has finished ones."""
    others = [other for other in FORMATS if other != scheme]
    found = [url for other in others if (url := _url(other, location))]
    return " or ".join(found) or None


def below(scheme: str, location: Location) -> str | None:
    """Returns the URLs of the checkpoints of any format in the folders at a location;
    None: there are none."""
    folders: list[str] = []
    with suppress(StoreError):
        names = location.names()
        folders = [name.rstrip("/") for name in names if name.endswith("/")]
    searched = folders[:SEARCHED]
    with ThreadPoolExecutor(SEARCHED) as pool:
        urls = pool.map(partial(_url_in, scheme, location), searched)
        found = [url for url in urls if url]
    more = ", ..." if len(found) > SHOWN or len(folders) > SEARCHED else ""
    return " or ".join(found[:SHOWN]) + more if found else None


def _url_in(scheme: str, location: Location, folder: str) -> str | None:
    """Returns the URL of the checkpoints in a folder, of the given format if it has
    some."""
    with suppress(StoreError):
        inside = location.below(folder)
        for each in dict.fromkeys((scheme, *ORDER)):
            if url := _url(each, inside):
                return url
    return None


def _url(scheme: str, location: Location) -> str | None:
    """Returns the URL of the checkpoints of a format at a location; None: none."""
    with suppress(StoreError):
        if open_root(scheme, location, {}).steps():
            return f"{scheme}:{location.url.removeprefix('file://')}"
    return None
