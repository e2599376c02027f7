"""Names of runs and namespaces as people give them, and how the contract has them."""

from collections.abc import Callable
from typing import TypeVar

from storesvc.format.names import InvalidNameError, RunName, check_id
from storesvc_client.errors import DataLossError, InvalidRequestError

N = TypeVar("N")


def run_name(name: object) -> RunName:
    """Returns the run of ``namespace/run``.

    Raises:
        InvalidRequestError: It is something else.
    """
    text = _text(name, "a run, such as 'prod/llama-8b'")
    try:
        return RunName.parse(text)
    except InvalidNameError as e:
        raise InvalidRequestError(str(e)) from None


def received(parse: Callable[[str], N], text: str) -> N:
    """Returns the name that a server sent.

    Raises:
        DataLossError: It is none that a store could hold.
    """
    try:
        return parse(text)
    except InvalidNameError as e:
        raise DataLossError(
            f"the server sent a name that no store holds ({e}); ask another server",
            reason="CORRUPT_DATA",
        ) from None


def namespace_resource(namespace: object) -> str:
    """Returns the name of a namespace on the wire.

    Raises:
        InvalidRequestError: It breaks the rules.
    """
    text = _text(namespace, "a namespace, such as 'prod'")
    try:
        check_id(text, "namespace")
    except InvalidNameError as e:
        raise InvalidRequestError(str(e)) from None
    return f"namespaces/{text}"


def parent_resource(parent: object) -> str:
    """Returns the name of a run, of a namespace, or, for None, of all on the wire.

    Raises:
        InvalidRequestError: It is none of them.
    """
    if parent is None:
        return "namespaces/-"
    if isinstance(parent, str) and "/" in parent:
        return run_name(parent).resource
    return namespace_resource(parent)


def is_text(value: object) -> bool:
    """Returns whether something is a text that can be sent."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False


def _text(value: object, wanted: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"expected {wanted}, got {value!r}")
    return value
