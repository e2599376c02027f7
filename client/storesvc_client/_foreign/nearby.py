"""Checkpoints that a wrong URL was meant for: of another format, a folder further down,
or the one that a file is a part of. Errors name them."""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, Final

from storesvc.storage.threads import Threads
from storesvc_client._foreign.foreign_step import ForeignRoot
from storesvc_client._foreign.formats import FORMATS
from storesvc_client._foreign.location import Location, open_location
from storesvc_client.errors import NotFoundError, StoreError

SEARCHED: Final = 16
"""Folders that are looked into."""

ORDER: Final = ("orbax", "jax", "safetensors", "eformer", "levanter")
"""The formats, those first whose files are no part of a checkpoint of another."""

_MSGPACK: Final = re.compile(rb"[\x80-\x8f\xde\xdf]")
"""Beginning of a mapping of msgpack."""

SHOWN: Final = 5
"""Folders that an error names."""


def open_root(
    scheme: str, location: Location, options: Mapping[str, Any]
) -> ForeignRoot:
    """Returns the root of a format at a location."""
    module = import_module(f"{__package__}.formats.{FORMATS[scheme]}")
    root: ForeignRoot = module.open_root(location, **options)
    return root


def explain(
    error: NotFoundError, scheme: str, url: str, location: Location, options: Any
) -> NotFoundError:
    """Returns the error of a location without checkpoints of a format, with what is
    there instead.

    Args:
        error: The error.
        scheme: The format.
        url: URL of the location, as it was given.
        location: The location.
        options: Options of fsspec's file system.
    """
    if found := _file_advice(url, options):
        return NotFoundError(
            f"{scheme}:{location.url}: expected a folder, got a file; {found}"
        )
    if other := other_format(scheme, location):
        return NotFoundError(f"{error}; there are some of another format: use {other}")
    if inside := below(scheme, location):
        return NotFoundError(
            f"{error}; there are some in its folders, each of which is opened by its "
            f"own URL: use {inside}"
        )
    return error


def _file_advice(url: str, options: Any) -> str | None:
    """Returns how a file is opened; None if there is no file at a URL."""
    path, question, query = url.partition("?")
    folder, slash, name = path.rstrip("/").rpartition("/")
    with suppress(StoreError):
        above = open_location(
            (folder or slash or ".") + question + query, storage_options=options
        )
        if (size := above.size(name)) is None:
            return None
        if name.endswith(".safetensors"):
            return f"use safetensors:{url}"
        start = above.read_range(name, 0, min(size, 9))
        if _MSGPACK.match(start):
            return (
                "it may be one of msgpack, as Flax writes it: read it with "
                "flax.serialization.msgpack_restore, and save that with Run.save"
            )
        if start[8:] == b"{":
            return f"if it is one of safetensors, name it {name}.safetensors"
        if found := other_format("", above):
            return f"if it is a part of a checkpoint, use {found}"
        return "only files of safetensors are read alone"
    return None


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
    with Threads(SEARCHED) as pool:
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
