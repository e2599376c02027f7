"""Finds the format and the location that a URL of foreign checkpoints names.

The scheme of the format comes before the location: ``orbax:///ckpts/run``,
``orbax:/ckpts/run``, ``safetensors:gs://bucket/model``.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from storesvc_client._foreign.formats import FORMATS
from storesvc_client._foreign.location import open_location
from storesvc_client.errors import InvalidRequestError

if TYPE_CHECKING:
    from storesvc_client._foreign.foreign_step import ForeignRoot


def foreign_root(
    url: str, *, storage_options: Mapping[str, Any] | None = None
) -> "ForeignRoot":
    """Returns the checkpoints that a URL names; reads nothing of a step.

    Args:
        url: Scheme of the format, a colon, and the location.
        storage_options: Options of fsspec's file system.

    Raises:
        InvalidRequestError: The URL has no scheme of a format, or its location none
            that can be read.
    """
    scheme, colon, place = url.partition(":")
    if not colon or scheme not in FORMATS or not place:
        known = ", ".join(f"{name}:" for name in sorted(FORMATS))
        raise InvalidRequestError(
            f"source {url!r}: expected a format and a location, such as "
            f"orbax:///ckpts/run or safetensors:gs://bucket/model; formats: {known}"
        )
    if place.startswith("//"):  # orbax:///ckpts: a URL with an empty host
        place = place.removeprefix("//")
        if not place.startswith("/"):
            raise InvalidRequestError(
                f"source {url!r}: expected {scheme}:///PATH or {scheme}:SCHEME://HOST/"
                f"PATH, got the host {place.partition('/')[0]!r}"
            )
    module = import_module(f"storesvc_client._foreign.formats.{FORMATS[scheme]}")
    root: ForeignRoot = module.open_root(
        open_location(place, storage_options=storage_options)
    )
    return root
