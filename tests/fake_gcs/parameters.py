"""Parameters that all kinds of requests share."""

from collections.abc import Mapping
from typing import Any, Final

from tests.fake_gcs.messages import Request
from tests.fake_gcs.objects import Conditions

PROPERTIES: Final = (
    "cacheControl",
    "contentDisposition",
    "contentEncoding",
    "contentLanguage",
    "contentType",
    "customTime",
    "metadata",
)
"""Properties of an object that clients may set and change."""


def conditions_of(request: Request, prefix: str = "if") -> Conditions:
    """Returns the preconditions of a request.

    Args:
        request: The request.
        prefix: Prefix of the parameters' names.

    Raises:
        RefusedError: A parameter is not a number.
    """
    return Conditions(
        generation=request.number(f"{prefix}GenerationMatch"),
        not_generation=request.number(f"{prefix}GenerationNotMatch"),
        metageneration=request.number(f"{prefix}MetagenerationMatch"),
        not_metageneration=request.number(f"{prefix}MetagenerationNotMatch"),
    )


def properties_of(document: Mapping[str, Any], content_type: str) -> dict[str, Any]:
    """Returns the properties of an object in a document; the content type is used if
    the document has none."""
    given = {name: document[name] for name in PROPERTIES if name in document}
    return {"contentType": content_type or "application/octet-stream"} | given
