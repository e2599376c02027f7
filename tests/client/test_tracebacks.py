"""Tracebacks of a user's program end in one error of the client, without its causes."""

import traceback
from collections.abc import Callable

import numpy as np
import pytest

import storesvc_client as store

TREE = {"w": np.arange(4)}

CALLS: dict[str, Callable[[store.Client], object]] = {
    "info": lambda client: client.info(),
    "runs": lambda client: list(client.runs()),
    "checkpoints": lambda client: list(client.run("a/b").checkpoints()),
    "latest": lambda client: client.run("a/b").latest(),
    "restore": lambda client: client.run("a/b").restore(3),
    "read": lambda client: list(client.run("a/b").open(3).read(["w"])),
    "save": lambda client: client.run("a/b").save(0, TREE).result(),
    "report": lambda client: client.run("a/b").save(0, TREE).report(),
    "delete": lambda client: client.run("a/b").delete(3),
    "tag": lambda client: client.run("a/b").tags.set("best", 3),
    "verify": lambda client: client.run("a/b").verify(3),
    "diff": lambda client: client.run("a/b").diff(3, 4),
    "preview": lambda client: client.run("no/such").retention.preview(
        store.KeepLatest(1)
    ),
    "collect": lambda client: list(client.collect("no/such")),
    "a name": lambda client: client.run("A B"),
    "a namespace": lambda client: list(client.runs("A B")),
}


def ends_loop(client: store.Client) -> None:
    with client.run("a/b").loop(every=store.Steps(1)) as loop:
        for step in (0, 1):
            save = loop.after(step, TREE)
            assert save is not None
            save.exception()


CALLS["loop"] = ends_loop


def shown(client: store.Client, name: str) -> str:
    with pytest.raises(store.StoreError) as caught:
        CALLS[name](client)
    return "".join(traceback.format_exception(caught.value))


def check(text: str) -> None:
    assert 1 == text.count("Traceback (most recent call last)"), text
    assert "site-packages/grpc" not in text
    assert "concurrent/futures" not in text
    assert text.splitlines()[-1].startswith("storesvc_client.errors.")


@pytest.mark.parametrize("name", CALLS)
def test_a_rejected_call_has_one_traceback_of_the_client(name: str) -> None:
    with store.connect("memory://") as client:
        client.run("a/b").save(0, TREE).result()
        if name in ("info", "runs", "checkpoints", "latest", "collect"):
            client.close()  # they are refused only so

        text = shown(client, name)

    check(text)


@pytest.mark.slow
def test_a_missing_server_has_one_traceback_of_the_client() -> None:
    with pytest.raises(store.UnavailableError) as caught:
        store.connect("127.0.0.1:1", timeout=1)

    check("".join(traceback.format_exception(caught.value)))
