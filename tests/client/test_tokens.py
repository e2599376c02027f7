"""Clients with tokens, of texts, files and functions, against a real server."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import storesvc_client as store
from storesvc.rpc import calls
from storesvc.server.security import make_security
from storesvc_client._rpc import tokens
from storesvc_client._rpc.tokens import parse_expiry
from tests.auth.test_tokens import POLICY, Served
from tests.support.faulty_server import serving
from tests.support.tokens import encoded, issuing

BOUND = POLICY.replace('["prod/*"]', '["**"]')


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Serves callers with tokens; calls end as soon as their token expires."""
    monkeypatch.setattr(calls, "LEEWAY_SECONDS", 0.0)
    with issuing() as issuer:
        policy = tmp_path / "policy.toml"
        policy.write_text(
            BOUND.format(url=issuer.url).replace("groups =", 'leeway = "1s"\ngroups =')
        )
        with serving(tmp_path / "store", security=make_security(policy)) as address:
            yield Served(address, issuer)


def test_a_token_is_a_text_a_file_or_a_function(served: Served, tmp_path: Path) -> None:
    token = served.issuer.token()
    file = tmp_path / "token"
    file.write_text(f"{token}\n")

    for given in (token, file, lambda: token):
        with store.connect(served.address, token=given) as client:
            found = client.identity()
            assert found.principal == "user:alice@corp.example"
            assert found.groups == ("corp/ml",)
            assert found.authentication == "token"
            assert found.is_restricted
            assert found.expire_time is not None
            run = client.run("prod/tokens")
            if run.latest_step() is None:
                run.save(1, {"w": np.arange(10)}).result()
            assert np.array_equal(run.restore()["w"], np.arange(10))


def test_permissions_are_listed_and_tested(served: Served) -> None:
    with store.connect(served.address, token=served.issuer.token()) as client:
        found = client.test_permissions("prod/llama")
        some = client.test_permissions("prod", ["runs.list", "checkpoints.purge"])

        assert "uploads.begin" in found
        assert some == ["runs.list"]
        with pytest.raises(store.InvalidRequestError, match=r"did you mean runs\.list"):
            client.test_permissions("prod", ["runs.lst"])


def test_an_error_names_the_caller_and_the_missing_permission(served: Served) -> None:
    token = served.issuer.token()
    with store.connect(served.address, token=token) as client:
        run = client.run("prod/denied")
        run.save(1, {"w": np.arange(10)}).result()
        with pytest.raises(store.PermissionDeniedError) as caught:
            run.delete(1)

    assert "user:alice@corp.example" in str(caught.value)
    assert caught.value.metadata["permission"] == "checkpoints.delete"
    assert isinstance(caught.value, PermissionError)
    assert token not in str(caught.value)


def test_a_file_is_read_again_when_it_changes(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(served.issuer.token())
    with store.connect(served.address, token=file) as client:
        before = client.identity().principal
        part = tmp_path / "part"
        part.write_text(served.issuer.token(email="bob@corp.example"))
        part.replace(file)

        assert before == "user:alice@corp.example"
        assert client.identity().principal == "user:bob@corp.example"


def test_a_file_that_becomes_unusable_is_rejected_by_each_call(
    served: Served, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(served.issuer.token())
    with store.connect(served.address, token=file) as client:
        file.write_text("a b")
        for _ in range(2):
            with pytest.raises(store.UnauthenticatedError, match="got spaces"):
                client.identity()
        file.write_text(served.issuer.token(email="bob@corp.example"))

        assert client.identity().principal == "user:bob@corp.example"


def test_a_function_is_called_again_before_its_token_expires(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def token() -> str:
        given.append(1)
        return served.issuer.token()

    with store.connect(served.address, token=token) as client:
        client.identity()
        assert len(given) == 1
        later = time.time() + 600 - tokens.RENEWAL_SECONDS + 1
        monkeypatch.setattr(tokens, "time", SimpleNamespace(time=lambda: later))
        client.identity()
        assert len(given) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got an empty text"),
        ("a b", "got spaces, line breaks"),
        ("a\nb", "got spaces, line breaks"),
        ("tökén", "got spaces, line breaks or characters outside ASCII"),
        ("x" * 9000, "got 9000 bytes"),
    ],
)
def test_an_unusable_token_is_rejected_before_any_call(
    served: Served, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "token"
    file.write_text(text)

    for given in (text, file, lambda: text):
        with pytest.raises(store.UnauthenticatedError, match=message):
            store.connect(served.address, token=given)


def test_a_file_that_all_may_write_is_rejected(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(served.issuer.token())
    file.chmod(0o646)
    with pytest.raises(store.UnauthenticatedError, match=f"chmod o-w {file}, and"):
        store.connect(served.address, token=file)

    file.chmod(file.stat().st_mode & ~0o002)  # chmod o-w
    store.connect(served.address, token=file).close()


def test_a_file_that_cannot_be_read_is_named(served: Served, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(store.UnauthenticatedError, match=os.fspath(path)):
            store.connect(served.address, token=path)


def test_an_expired_token_is_rejected_before_any_call(served: Served) -> None:
    token = served.issuer.token(iat=1, exp=1000)

    with pytest.raises(store.UnauthenticatedError, match="expired at 1970-01-01"):
        store.connect(served.address, token=token)


@pytest.mark.parametrize(
    "host",
    [
        "192.0.2.1",
        "127.attacker.example",
        "127.0.0.1.attacker.example",
        "localhost.attacker.example",
        "127.0.0.1.",
        "127.1",
        "localhost.",
        "[::ffff:192.0.2.1]",
    ],
)
def test_a_token_goes_with_tls_or_to_this_machine_only(host: str) -> None:
    for target in (f"{host}:7070", f"dns:///{host}:7070", f"127.0.0.1:1,{host}:2"):
        with pytest.raises(store.InvalidRequestError, match="expected TLS with a tok"):
            store.connect(target, token="x.y.z", insecure=True)


def test_a_token_that_cannot_be_sent_is_rejected() -> None:
    with pytest.raises(store.InvalidRequestError, match="no token with a root"):
        store.connect("memory://", token="x.y.z")
    with pytest.raises(store.InvalidRequestError, match="expected a text, a path"):
        store.connect("127.0.0.1:1", token=7)  # type: ignore[arg-type]  # wrong on purpose


def rotating(served: Served, file: Path, seconds: float) -> Callable[[], None]:
    """Writes tokens of a short life to a file, as an agent does; returns its end."""
    stop = threading.Event()

    def write() -> None:
        part = file.with_suffix(".part")
        part.write_text(served.issuer.token(exp=int(time.time()) + 2))
        part.replace(file)

    def rotate() -> None:
        while not stop.wait(seconds):
            write()

    write()
    thread = threading.Thread(target=rotate)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()

    return end


@pytest.mark.slow
def test_saves_restores_and_watches_outlive_their_tokens(
    served: Served, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    end = rotating(served, file, 0.5)
    try:
        with store.connect(served.address, token=file) as client:
            run = client.run("prod/rotated")
            events: list[Any] = []

            def watch() -> None:
                for event in run.watch():
                    events.append(event.checkpoint and event.checkpoint.step)
                    if len(events) == 4:
                        return

            watching = threading.Thread(target=watch)
            watching.start()
            time.sleep(0.5)
            generator = np.random.default_rng(0)
            for step in range(4):
                tree = {"w": generator.random(8 << 20)}
                run.save(step, tree).result()
                assert np.array_equal(run.restore(step)["w"], tree["w"])
                time.sleep(1.0)
            watching.join(30)
            assert events == [0, 1, 2, 3]
    finally:
        end()


def test_the_expiry_of_a_token_is_read_from_its_claims() -> None:
    def token(claims: Any) -> str:
        return f"x.{encoded(claims)}.y"

    assert parse_expiry(token({"exp": 7})) == 7.0
    unknown = ["x", "x.y", token([]), token({}), token({"exp": "7"}), "x.!.y"]
    assert [None] * 6 == [parse_expiry(text) for text in unknown]
    assert parse_expiry(token(json.dumps({"exp": True}).encode())) is None
