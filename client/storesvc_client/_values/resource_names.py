"""Converts names of runs and namespaces to resource names of the contract."""

from collections.abc import Callable
from typing import TypeVar

from storesvc.format.keys import InvalidItemError
from storesvc.format.names import InvalidNameError, RunName, check_id
from storesvc_client.errors import DataLossError, InvalidRequestError

N = TypeVar("N")


def run_name(name: object) -> RunName:
    """Returns the parsed name of ``namespace/run``.

    Raises:
        InvalidRequestError: It is no name of a run.
    """
    text = _text(name, "a run, such as 'prod/llama-8b'")
    try:
        return RunName.parse(text)
    except InvalidNameError as e:
        raise InvalidRequestError(str(e)) from None


def received(parse: Callable[[str], N], text: str) -> N:
    """Parses a resource name that a server sent.

    Raises:
        DataLossError: No store could have such a name.
    """
    try:
        return parse(text)
    except (InvalidNameError, InvalidItemError) as e:
        raise DataLossError(
            f"the server sent a name that no store holds ({e}); ask another server",
            reason="CORRUPT_DATA",
        ) from None


def namespace_resource(namespace: object) -> str:
    """Returns the resource name of a namespace.

    Raises:
        InvalidRequestError: The name is not valid.
    """
    text = _text(namespace, "a namespace, such as 'prod'")
    try:
        check_id(text, "namespace")
    except InvalidNameError as e:
        raise InvalidRequestError(str(e)) from None
    return f"namespaces/{text}"


def parent_resource(parent: object) -> str:
    """Returns the resource name of a run, a namespace, or (for None) the store.

    Raises:
        InvalidRequestError: It is no such name.
    """
    if parent is None:
        return "namespaces/-"
    if isinstance(parent, str) and "/" in parent:
        return run_name(parent).resource
    return namespace_resource(parent)


def is_text(value: object) -> bool:
    """Returns whether a value is a text that UTF-8 can encode."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:  # a lone surrogate
        return False


def _text(value: object, wanted: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"expected {wanted}, got {value!r}")
    return value
