"""Storages that ignore preconditions: no store is created there, even if many clients
try at the same time."""

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import storesvc_client as store
from soak.outcomes import CannotRunError, Outcome
from tests.fake_gcs import FakeGcs
from tests.support.gcs_calls import BUCKET
from tests.support.other_emulators import (
    ARE_INSTALLED,
    CONDITIONS,
    fake_gcs_server,
    gcp_storage_emulator,
    listening,
    names,
)

ROUNDS: Final = 10
AT_ONCE: Final = 8
"""Clients that try to create the store at the same time."""


def unconditional_storages() -> Outcome:
    """Creates stores in storages that ignore each kind of condition."""
    if not ARE_INSTALLED:
        raise CannotRunError("the emulators of others are not installed")
    outcome = Outcome()
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = ""
    for what, pattern in CONDITIONS.items():
        with FakeGcs(buckets=[BUCKET], ignored=[pattern]) as emulator:
            _race(outcome, f"ours without conditions of the {what}", emulator.url)
    for emulate in (fake_gcs_server, gcp_storage_emulator):
        with _scratch() as scratch, listening(emulate(scratch)) as url:
            _race(outcome, emulate.__name__, url)
    return outcome


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="storesvc-soak-") as scratch:
        yield Path(scratch)


def _race(outcome: Outcome, name: str, url: str) -> None:
    with ThreadPoolExecutor(AT_ONCE) as clients:
        for number in range(ROUNDS):
            root = f"gs://{BUCKET}/{number}?endpoint={url}"
            lost = list(filter(None, clients.map(_made, [root] * AT_ONCE)))
            outcome.add(f"{name}, round {number}", lost)
    stores = [found for found in names(url) if "probes/" not in found]
    outcome.add(f"{name}: what is left", [f"left {found}" for found in stores])


def _made(root: str) -> str:
    """Returns all outcomes other than the expected rejection."""
    try:
        with store.connect(root, timeout=60):
            return "a store was made"
    except store.InvalidRequestError as e:
        return "" if "ignores the condition" in str(e) else str(e)
    except store.StoreError as e:
        return f"{type(e).__name__}: {e}"
