"""Calls that a server or a client rejects."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import storesvc_client as store
from storesvc_client.errors import translate_rpc_errors


@contextmanager
def rejected(
    reason: str,
    kind: type[store.StoreError] = store.StoreError,
    *,
    match: str | None = None,
) -> Iterator[pytest.ExceptionInfo[store.StoreError]]:
    """Expects that a call inside, of a client or of a stub, is rejected."""
    with pytest.raises(kind, match=match) as caught, translate_rpc_errors("here"):
        yield caught
    assert reason == caught.value.reason
