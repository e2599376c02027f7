"""A policy file is read whole, and nothing in it is adjusted."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from storesvc.auth import policy_file
from storesvc.auth.policy_file import PolicyFile, parse
from storesvc.errors import InvalidFieldError
from storesvc.storage import config_files

WHOLE = """
anonymous = "reader"

[[issuers]]
name = "corp"
issuer = "https://login.corp.example"
audiences = ["storesvc"]
algorithms = ["ES256"]
jwks_uri = "https://login.corp.example/keys"
jwks_file = "/etc/keys.json"
ca_file = "/etc/ca.pem"
leeway = "5s"
max_lifetime = "1h"
principal = "user:{email}"
groups = "groups"
require = { hd = "corp", "a.b" = "c" }
client_id = "storectl"
scopes = ["groups"]

[trust_domains]
"example.org" = "PEM"

[[bindings]]
role = "writer"
runs = ["prod/*", "lab/exp-?"]
who = ["k8s:train/trainer", "group:corp/ml"]

[[quotas]]
namespaces = ["prod"]
stored_bytes = "10TiB"
stored_bytes_soft = 8796093022208
streams = 64
watches = 32
uploads = 8
bytes_in_flight = "1GiB"
requests_per_second = 200

[quotas_per_principal]
streams = 32
watches = 16
uploads = 4
requests_per_second = 100

[lending]
lifetime = "30m"
gcs = true
s3_role_arn = "arn:aws:iam::1:role/store"
s3_sts_endpoint = "https://sts.example"
"""

ISSUER = """[[issuers]]
name = "corp"
issuer = "https://a"
audiences = ["storesvc"]
principal = "user:{sub}"
"""

BINDING = '[[bindings]]\nrole = "reader"\nruns = ["**"]\nwho = ["local"]\n'


def test_each_key_of_each_table_is_read() -> None:
    found = parse(WHOLE)

    (issuer,), (binding,), (quota,) = found.issuers, found.policy.bindings, found.quotas
    assert found.policy.anonymous == "reader"
    assert (issuer.name, issuer.algorithms, issuer.leeway) == (
        "corp",
        ("ES256",),
        timedelta(seconds=5),
    )
    assert (issuer.jwks_file, issuer.ca_file) == ("/etc/keys.json", "/etc/ca.pem")
    assert issuer.max_lifetime == timedelta(hours=1)
    assert issuer.require == (("hd", "corp"), ("a.b", "c"))
    assert (issuer.client_id, issuer.scopes) == ("storectl", ("groups",))
    assert found.trust_domains == (("example.org", "PEM"),)
    assert binding.runs == ("prod/*", "lab/exp-?")
    assert (quota.stored_bytes, quota.stored_bytes_soft) == (10 << 40, 8 << 40)
    assert (quota.streams, quota.watches, quota.uploads) == (64, 32, 8)
    assert (quota.bytes_in_flight, quota.requests_per_second) == (1 << 30, 200)
    assert found.principal_quota is not None
    assert found.principal_quota.requests_per_second == 100
    assert found.lending is not None
    assert (found.lending.lifetime, found.lending.gcs) == (timedelta(minutes=30), True)


def test_a_policy_of_nothing_permits_nothing() -> None:
    found = parse('anonymous = "none"')

    assert (found.policy.bindings, found.policy.anonymous) == ((), "")
    assert (found.issuers, found.quotas, found.lending) == ((), (), None)


def second_issuer(principal: str) -> str:
    """Returns a table of an issuer that is not the one of ``ISSUER``."""
    text = ISSUER.replace('"corp"', '"partner"').replace("https://a", "https://b")
    return text.replace("user:{sub}", principal)


@pytest.mark.parametrize(
    "principal", ["user:{sub}", "user:{email}", "user:corp/{sub}", "user:{a}/{b}"]
)
def test_issuers_that_could_name_one_caller_are_rejected(principal: str) -> None:
    parse(ISSUER + second_issuer("partner:{sub}"))
    with pytest.raises(InvalidFieldError, match=r"issuers\[1\]\.principal: expec"):
        parse(ISSUER + second_issuer(principal))


def test_nobody_is_local_where_other_machines_connect() -> None:
    assert parse(BINDING).policy.bindings[0].who == ("local",)
    with pytest.raises(InvalidFieldError, match=r"who\[0\]: expected.*token"):
        parse(BINDING, has_local=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("role = ", "expected TOML"),
        ("anonymus = 'none'", "unknown key 'anonymus'.*did you mean anonymous"),
        ("anonymous = 'root'", "anonymous: expected one of reader.*got 'root'"),
        ("bindings = 7", "bindings: expected tables, got 7"),
        ("bindings = [7]", r"bindings: expected tables, got \[7\]"),
        (BINDING.replace('"reader"', '"reder"'), r"bindings\[0\]\.role: expected one"),
        (BINDING.replace('role = "reader"\n', ""), r"\[0\]\.role: expected.*got none"),
        (BINDING.replace('["**"]', '["a/**/b"]'), r"runs\[0\]: expected NAMESPACE/RUN"),
        (BINDING.replace('["**"]', '["a**/b"]'), r"runs\[0\]: expected NAMESPACE/RUN"),
        (BINDING.replace('["**"]', '["prod"]'), r"runs\[0\]: expected NAMESPACE/RUN"),
        (BINDING.replace('["**"]', '["a:/b"]'), r"runs\[0\]: expected NAMESPACE/RUN"),
        (BINDING.replace('["**"]', "[]"), r"runs: expected a list of texts, got \[\]"),
        (BINDING.replace('["local"]', '"local"'), r"who: expected a list of texts"),
        ("", "policy.toml: expected tables or keys, got none"),
        ("# only a comment", "expected tables or keys, got none"),
        *(
            (
                ISSUER + BINDING.replace('["local"]', f'["{group}"]'),
                r"who\[0\]: expected.*group:ISSUER/NAME with an issuer of corp",
            )
            for group in (
                "group:",
                "group:ml",
                "group:*",
                "group:corp",
                "group:corp/",
                "group:no/ml",
            )
        ),
        (ISSUER.replace('"corp"', '"a/b"'), r"issuers\[0\]\.name: expected letters"),
        (ISSUER.replace('"corp"', '"*"'), r"issuers\[0\]\.name: expected letters"),
        *(
            (ISSUER.replace("https://a", url), r"issuer: expected https://")
            for url in ("ftp://a", "file:///a", "http://a", "http://127.a.example", "a")
        ),
        (ISSUER + 'jwks_uri = "http://a"', r"jwks_uri: expected https://"),
        (ISSUER + "require = { hd = 1 }", "require: expected a table of texts"),
        (ISSUER.replace("{sub}", "{a}{b}"), "principal: expected a text between"),
        *(
            (f"[[quotas]]\nnamespaces=['a']\n{key} = {value}", r"less than 2\^63")
            for key, value in (
                ("stored_bytes", 2**63),
                ("stored_bytes", "'8192PiB'"),
                ("requests_per_second", 2**63),
            )
        ),
        (BINDING + "rol = 1", r"bindings\[0\]: unknown key 'rol'.*did you mean role"),
        (ISSUER.replace("audiences", "audience"), r"audiences: expected.*got none"),
        (ISSUER + 'algorithms = ["HS256"]', r"algorithms: expected.*got 'HS256'"),
        (ISSUER + 'algorithms = ["none"]', r"algorithms: expected.*got 'none'"),
        (ISSUER.replace("user:{sub}", "{sub}"), "principal: expected a fixed prefix"),
        (
            ISSUER.replace("user:{sub}", "user:all"),
            "principal: expected a fixed prefix",
        ),
        (ISSUER.replace("user:", "group:"), "principal: expected a fixed prefix"),
        (ISSUER.replace("user:", "spiffe:"), "principal: expected a fixed prefix"),
        (ISSUER + 'leeway = "soon"', "leeway: expected a time"),
        (ISSUER + "leeway = 30", "leeway: expected a time"),
        (ISSUER + ISSUER, r"issuers\[1\]\.name: expected a value that no table before"),
        ("[[quotas]]\nnamespaces=['a']\nstreams = 0", r"streams: expected a number"),
        ("[[quotas]]\nnamespaces=['a']\nstreams = true", r"streams: expected a number"),
        ("[[quotas]]\nnamespaces=['a']\nstored_bytes = '1 TB'", "expected bytes"),
        (
            "[[quotas]]\nnamespaces=['a']\nstored_bytes = 1\nstored_bytes_soft = 2",
            "stored_bytes_soft: expected at most stored_bytes",
        ),
        ("[quotas_per_principal]\nstored_bytes = 1", "unknown key 'stored_bytes'"),
        ("[lending]\ngcs = 1", "gcs: expected true or false, got 1"),
        ("[lending]\ngsc = true", "unknown key 'gsc'.*did you mean gcs"),
    ],
    ids=str,
)
def test_a_wrong_policy_is_rejected_with_its_place(text: str, message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        parse(text, file="policy.toml")


def test_every_table_rejects_unknown_keys() -> None:
    for table in ("issuers", "bindings", "quotas", "quotas_per_principal", "lending"):
        lines = WHOLE.splitlines()
        at = next(i for i, line in enumerate(lines) if line.strip("[]") == table)
        text = "\n".join([*lines[: at + 1], "unknown = 1", *lines[at + 1 :]])
        with pytest.raises(InvalidFieldError, match="unknown key 'unknown'"):
            parse(text)


def test_a_policy_file_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(policy_file, "CHECK_SECONDS", 0.0)
    path = tmp_path / "policy.toml"
    path.write_text('anonymous = "reader"')
    file = PolicyFile(path)
    digest = file.digest
    assert file.current().policy.anonymous == "reader"

    path.write_text('anonymous = "wrong"')
    assert file.current().policy.anonymous == "reader"
    assert "keeping the previous policy" in caplog.text
    assert file.digest == digest

    path.write_text('anonymous = "writer" ')
    assert file.current().policy.anonymous == "writer"
    assert file.digest != digest

    path.unlink()
    assert file.current().policy.anonymous == "writer"


def test_a_file_that_hangs_keeps_the_policy_and_delays_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(policy_file, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(config_files, "WAIT_SECONDS", 0.01)
    path = tmp_path / "policy.toml"
    path.write_text('anonymous = "reader"')
    file = PolicyFile(path)
    answered = threading.Event()
    # a system call of this file only; a mount that hangs needs root
    real = Path.stat
    monkeypatch.setattr(
        Path,
        "stat",
        lambda self, **how: (self == path and answered.wait(), real(self, **how))[1],
    )
    path.write_text('anonymous = "writer" ')
    for _ in range(3):
        assert file.current().policy.anonymous == "reader"
    assert 1 == caplog.text.count("the file system does not answer")

    answered.set()
    while file.current().policy.anonymous != "writer":
        time.sleep(0.01)


def test_a_file_that_was_cut_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(policy_file, "CHECK_SECONDS", 0.0)
    path = tmp_path / "policy.toml"
    quota = '[[quotas]]\nnamespaces = ["a"]\nstreams = 1\n'
    path.write_text(BINDING + quota)
    file = PolicyFile(path)
    for text in ("", "\n", BINDING, BINDING + "[[quotas]]\n"):
        path.write_text(text)
        assert len(file.current().quotas) == 1
    assert "got the beginning of the one in force" in caplog.text

    path.write_text(BINDING + "# without quotas\n")
    while file.current().quotas:
        time.sleep(0.01)


@pytest.mark.parametrize("data", [b"\xff", None])
def test_an_unusable_policy_file_is_rejected(
    tmp_path: Path, data: bytes | None
) -> None:
    path = tmp_path / "policy.toml"
    if data is None:
        path.mkdir()
    else:
        path.write_bytes(data)

    with pytest.raises(InvalidFieldError, match=os.fspath(path)):
        PolicyFile(path)
