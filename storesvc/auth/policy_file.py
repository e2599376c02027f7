"""The policy file of a server: parsed, and read again when it changes.

The text is TOML. Nothing is adjusted: an unknown key, another type or a value out of
range is an error that names its place. The tables are described in `docs/security.md`.

A new file that cannot be parsed is ignored: the policy before it stays in force, and
the error is logged, until the file changes again. So it does while the file system does
not answer.

>>> document = parse('[[bindings]]\\nrole = "reader"\\nruns = ["**"]\\nwho = ["local"]')
>>> document.policy.bindings[0].role
'reader'
"""

import difflib
import hashlib
import logging
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from storesvc.auth.policy import ALL_RUNS, GROUP, LOCAL, ROLES, Binding, Policy
from storesvc.auth.tokens import DEFAULT_ALGORITHMS, Issuer
from storesvc.errors import InvalidFieldError
from storesvc.storage.config_files import FileCheck, file_state, read_file
from storesvc.storage.location import shows_plaintext

MAX_BYTES: Final = 1 << 20
"""Maximum bytes of a policy file."""

_NONE: Final = "none"
_SIZE: Final = re.compile(r"([1-9][0-9]*) ?(B|KiB|MiB|GiB|TiB|PiB)")
_SIZE_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIME: Final = re.compile(r"([1-9][0-9]*) ?([smhd])")
_TIME_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PART: Final = re.compile(r"[A-Za-z0-9._*?\[\]!-]+")
_SCHEME: Final = re.compile(r"[a-z][a-z0-9-]*:")
_ISSUER_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_RESERVED: Final = ("local", "group:", "spiffe:")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaRule:
    """Maximum amounts; 0: unlimited."""

    namespaces: tuple[str, ...] = ()
    """Patterns of namespaces; empty: the rule of each principal."""
    stored_bytes: int = 0
    """Bytes that the checkpoints of a namespace store."""
    stored_bytes_soft: int = 0
    """Stored bytes above which the server warns."""
    streams: int = 0
    """Streams with data or tables at a time."""
    watches: int = 0
    """Watches at a time."""
    uploads: int = 0
    """Uploads that were begun and have not ended."""
    bytes_in_flight: int = 0
    """Memory for chunks that streams may hold in the server."""
    requests_per_second: int = 0
    """Calls that begin in a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """Limits of the credentials that a server lends."""

    lifetime: timedelta = timedelta(hours=1)
    """Maximum time until clients renew a credential. The provider may end it sooner."""
    gcs: bool = False
    """True to lend for a bucket on Google Cloud Storage."""
    s3_role_arn: str = ""
    """Role to assume for a bucket on S3; empty: lends none there."""
    s3_sts_endpoint: str = ""
    """URL of the token service of S3; empty: the default of AWS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDocument:
    """The contents of a policy file."""

    policy: Policy
    issuers: tuple[Issuer, ...] = ()
    """Issuers whose tokens are accepted."""
    trust_domains: tuple[tuple[str, str], ...] = ()
    """Authorities that issue client certificates of each trust domain, in PEM; empty:
    all that the server trusts issue any."""
    quotas: tuple[QuotaRule, ...] = ()
    """Limits of namespaces; the first rule that matches a namespace applies."""
    principal_quota: QuotaRule | None = None
    """Limits of each principal; None: none."""
    lending: Lending | None = None
    """Configuration of lent credentials; None: none are lent."""


def parse(text: str, *, file: str = "policy", has_local: bool = True) -> PolicyDocument:
    """Parses a policy.

    Args:
        file: Name of the file, for errors.
        has_local: True if callers of this machine are ``local``.

    Raises:
        InvalidFieldError: It is no TOML, or a key or a value is invalid; names its
            place.
    """
    if len(text) > MAX_BYTES:
        raise InvalidFieldError(
            f"{file}: expected at most {MAX_BYTES} bytes, got {len(text)}"
        )
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise InvalidFieldError(
            f"{file}: expected TOML, got a text that is not ({e})"
        ) from e
    if not given:
        raise InvalidFieldError(
            f"{file}: expected tables or keys, got none, as of a file that was cut; "
            'anonymous = "none" alone permits nothing'
        )
    root = _Table(given, file)
    anonymous = root.choice("anonymous", (*ROLES, _NONE), default=_NONE)
    issuers = tuple(map(_issuer, root.tables("issuers")))
    callers = _Callers([each.name for each in issuers], has_local)
    bindings = tuple(_binding(table, callers) for table in root.tables("bindings"))
    quotas = tuple(_quota(table, of_namespaces=True) for table in root.tables("quotas"))
    of_principal = root.table("quotas_per_principal")
    lending = root.table("lending")
    trust_domains = root.texts_by_key("trust_domains")
    root.check_keys()
    _check_unique(file, "issuers", "name", [each.name for each in issuers])
    _check_unique(file, "issuers", "issuer", [each.issuer for each in issuers])
    _check_prefixes(file, [each.principal for each in issuers])
    return PolicyDocument(
        policy=Policy(
            bindings=bindings, anonymous="" if anonymous == _NONE else anonymous
        ),
        issuers=issuers,
        trust_domains=trust_domains,
        quotas=quotas,
        principal_quota=(
            _quota(of_principal, of_namespaces=False) if of_principal else None
        ),
        lending=_lending(lending) if lending else None,
    )


class _Callers(NamedTuple):
    """The callers that a binding may name."""

    issuers: Sequence[str]
    has_local: bool

    def check(self, place: str, pattern: str) -> None:
        """Rejects a pattern that names another caller than it seems to, or none."""
        issuer, _, name = pattern.removeprefix(GROUP).partition("/")
        if pattern.startswith(GROUP) and not (issuer in self.issuers and name):
            raise InvalidFieldError(
                f"{place}: expected a principal, or group:ISSUER/NAME with an issuer "
                f"of {', '.join(self.issuers) or 'issuers, which has none'}, got "
                f"{pattern!r}"
            )
        if pattern == LOCAL.name and not self.has_local:
            raise InvalidFieldError(
                f"{place}: expected a principal of a token or a certificate, got "
                "'local', which no caller is at a host that others can reach: "
                "sidecars and port-forwards call from this machine, too"
            )


def _binding(table: "_Table", callers: _Callers) -> Binding:
    binding = Binding(
        role=table.choice("role", tuple(ROLES)),
        runs=table.texts("runs"),
        who=table.texts("who"),
    )
    for at, pattern in enumerate(binding.runs):
        parts = pattern.split("/")
        is_pair = len(parts) == 2 and all(map(_PART.fullmatch, parts))
        is_valid = is_pair and "**" not in pattern.removesuffix("/**")
        if not (is_valid or pattern == ALL_RUNS):
            raise InvalidFieldError(
                f"{table.place}.runs[{at}]: expected NAMESPACE/RUN, with * and ? in "
                f"each part, or ** for all runs, got {pattern!r}"
            )
    for at, pattern in enumerate(binding.who):
        callers.check(f"{table.place}.who[{at}]", pattern)
    table.check_keys()
    return binding


def _issuer(table: "_Table") -> Issuer:
    issuer = Issuer(
        name=table.text("name"),
        issuer=table.text("issuer"),
        audiences=table.texts("audiences"),
        algorithms=table.texts("algorithms", default=DEFAULT_ALGORITHMS),
        jwks_uri=table.text("jwks_uri", default=""),
        jwks_file=table.text("jwks_file", default=""),
        ca_file=table.text("ca_file", default=""),
        leeway=table.duration("leeway", default=timedelta(seconds=30)),
        max_lifetime=table.duration("max_lifetime", default=timedelta(hours=24)),
        principal=table.text("principal"),
        groups=table.text("groups", default=""),
        require=table.texts_by_key("require"),
        client_id=table.text("client_id", default=""),
        scopes=table.texts("scopes", default=()),
    )
    table.check_keys()
    if not _ISSUER_NAME.fullmatch(issuer.name):
        raise InvalidFieldError(
            f"{table.place}.name: expected letters, digits and ._-, got {issuer.name!r}"
        )
    for key, url in (("issuer", issuer.issuer), ("jwks_uri", issuer.jwks_uri)):
        if url and shows_plaintext(url):
            raise InvalidFieldError(
                f"{table.place}.{key}: expected https://, or http:// on this machine, "
                f"got {url!r}"
            )
    for algorithm in issuer.algorithms:
        if not re.fullmatch(r"(RS|PS|ES)(256|384|512)|EdDSA|Ed25519", algorithm):
            raise InvalidFieldError(
                f"{table.place}.algorithms: expected algorithms with a public key, "
                f"such as {', '.join(DEFAULT_ALGORITHMS)}, got {algorithm!r}"
            )
    _check_template(f"{table.place}.principal", issuer.principal)
    return issuer


def _check_template(place: str, template: str) -> None:
    """Checks that no claim of a token can choose the kind of its principal."""
    is_fixed = _SCHEME.match(template) is not None and "{" in template
    if "}{" in template:
        raise InvalidFieldError(
            f"{place}: expected a text between two claims, got {template!r}: two "
            "callers could have one name"
        )
    if not is_fixed or template.startswith(_RESERVED):
        raise InvalidFieldError(
            f"{place}: expected a fixed prefix other than group: and spiffe:, and a "
            f'claim, such as "user:{{email}}", got {template!r}'
        )


def _check_prefixes(file: str, templates: list[str]) -> None:
    """Checks that no two issuers can name the same principal."""
    prefixes = [template.partition("{")[0] for template in templates]
    for at, prefix in enumerate(prefixes):
        for other in prefixes[:at]:
            if prefix.startswith(other) or other.startswith(prefix):
                raise InvalidFieldError(
                    f"{file}: issuers[{at}].principal: expected a prefix that neither "
                    f"begins with {other!r} of another issuer nor the other way "
                    f"round, got {prefix!r}: both could name the same caller"
                )


def _quota(table: "_Table", *, of_namespaces: bool) -> QuotaRule:
    rule = QuotaRule(
        namespaces=table.texts("namespaces") if of_namespaces else (),
        stored_bytes=table.size("stored_bytes") if of_namespaces else 0,
        stored_bytes_soft=table.size("stored_bytes_soft") if of_namespaces else 0,
        streams=table.count("streams"),
        watches=table.count("watches"),
        uploads=table.count("uploads"),
        bytes_in_flight=table.size("bytes_in_flight"),
        requests_per_second=table.count("requests_per_second"),
    )
    table.check_keys()
    if rule.stored_bytes and rule.stored_bytes_soft > rule.stored_bytes:
        raise InvalidFieldError(
            f"{table.place}.stored_bytes_soft: expected at most stored_bytes, got "
            f"{rule.stored_bytes_soft} above {rule.stored_bytes}"
        )
    return rule


def _lending(table: "_Table") -> Lending:
    lending = Lending(
        lifetime=table.duration("lifetime", default=timedelta(hours=1)),
        gcs=table.flag("gcs"),
        s3_role_arn=table.text("s3_role_arn", default=""),
        s3_sts_endpoint=table.text("s3_sts_endpoint", default=""),
    )
    table.check_keys()
    return lending


def _check_unique(file: str, table: str, key: str, values: list[str]) -> None:
    for at, value in enumerate(values):
        if value in values[:at]:
            raise InvalidFieldError(
                f"{file}: {table}[{at}].{key}: expected a value that no table before "
                f"it has, got {value!r} again"
            )


class _Table:
    """Reads the values of a table by key; rejects other types and unknown keys."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self._values = values
        self.place = place
        self._known: list[str] = []

    def tables(self, key: str) -> "list[_Table]":
        """Returns an array of tables; empty if there is none."""
        found = self._found(key, list, "tables", default=[])
        place = f"{self.place}: {key}"
        if not all(isinstance(each, dict) for each in found):
            raise InvalidFieldError(f"{place}: expected tables, got {found!r:.80}")
        return [_Table(each, f"{place}[{at}]") for at, each in enumerate(found)]

    def table(self, key: str) -> "_Table | None":
        found = self._found(key, dict, "a table", default=None)
        return None if found is None else _Table(found, f"{self.place}: {key}")

    def text(self, key: str, *, default: str | None = None) -> str:
        """Returns a text that is not empty; without a default it is required."""
        found = self._found(key, str, "a text", default=default)
        if found is None or (not found and default is None):
            raise self._invalid(key, "a text", found)
        return str(found)

    def texts(
        self, key: str, *, default: tuple[str, ...] | None = None
    ) -> tuple[str, ...]:
        """Returns a list of texts; without a default it must have one at least."""
        found = self._found(key, list, "a list of texts", default=default)
        if found is None or (default is None and not found):
            raise self._invalid(key, "a list of texts", found)
        if not all(isinstance(each, str) and each for each in found):
            raise self._invalid(key, "a list of texts", found)
        return tuple(found)

    def choice(
        self, key: str, choices: tuple[str, ...], *, default: str | None = None
    ) -> str:
        """Returns one of some texts."""
        found = self._found(key, str, "a text", default=default)
        if found not in choices:
            raise self._invalid(key, f"one of {', '.join(choices)}", found)
        return str(found)

    def texts_by_key(self, key: str) -> tuple[tuple[str, str], ...]:
        """Returns the keys and texts of a table; empty if there is none."""
        found = self._found(key, dict, "a table of texts", default={})
        if not all(isinstance(value, str) for value in found.values()):
            raise self._invalid(key, "a table of texts", found)
        return tuple(found.items())

    def flag(self, key: str) -> bool:
        """Returns a boolean; False if it is not given."""
        return bool(self._found(key, bool, "true or false", default=False))

    def count(self, key: str) -> int:
        """Returns a number above 0; 0 if it is not given: unlimited."""
        found = self._found(key, int, "a number", default=0)
        if isinstance(found, bool) or (key in self._values and found <= 0):
            raise self._invalid(key, "a number above 0", found)
        return self._check_bound(key, int(found))

    def size(self, key: str) -> int:
        """Returns a number of bytes; 0 if it is not given: unlimited."""
        if isinstance(self._values.get(key), int):
            return self.count(key)
        found = self._found(key, str, 'bytes, such as "10TiB"', default="")
        match = _SIZE.fullmatch(found)
        if match is None and key in self._values:
            raise self._invalid(key, 'bytes, such as "10TiB"', found)
        shift = 10 * _SIZE_UNITS.index(match[2]) if match else 0
        return self._check_bound(key, int(match[1]) << shift if match else 0)

    def duration(self, key: str, *, default: timedelta) -> timedelta:
        found = self._found(key, str, 'a time, such as "30s" or "24h"', default=None)
        if found is None:
            return default
        match = _TIME.fullmatch(found)
        if match is None:
            raise self._invalid(key, 'a time, such as "30s" or "24h"', found)
        return timedelta(seconds=int(match[1]) * _TIME_UNITS[match[2]])

    def check_keys(self) -> None:
        """Rejects keys that nothing has read."""
        for key in self._values:
            if key not in self._known:
                near = difflib.get_close_matches(key, self._known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise InvalidFieldError(
                    f"{self.place}: unknown key {key!r}, expected some of "
                    f"{', '.join(self._known)}{hint}"
                )

    def _found(self, key: str, kind: type, expected: str, *, default: Any) -> Any:
        self._known.append(key)
        found = self._values.get(key, default)
        if key in self._values and not isinstance(found, kind):
            raise self._invalid(key, expected, found)
        return found

    def _check_bound(self, key: str, found: int) -> int:
        if found >= 1 << 63:  # messages cannot have it
            raise self._invalid(key, "less than 2^63", self._values[key])
        return found

    def _invalid(self, key: str, expected: str, found: object) -> InvalidFieldError:
        got = "none" if found is None else repr(found)[:80]
        joint = "." if "[" in self.place or self.place.count(": ") else ": "
        return InvalidFieldError(
            f"{self.place}{joint}{key}: expected {expected}, got {got}"
        )


CHECK_SECONDS: Final = 1.0
"""Interval at which the file is looked at."""

_log = logging.getLogger(__name__)


class PolicyFile:
    """The policy of a server."""

    def __init__(self, path: Path, *, has_local: bool = True) -> None:
        """Reads the file.

        Raises:
            InvalidFieldError: It cannot be read or parsed.
        """
        self._path = path
        self._has_local = has_local
        self._check = FileCheck(self._reload, what=f"policy {path}")
        self._data = b""
        self._state = file_state(path)
        self._document, self._digest = self._read()
        self._checked = time.monotonic()
        _log.info("policy: %s, %s", path, self._digest)

    @property
    def digest(self) -> str:
        """Identifies the policy in force, as the log has it: replicas with another
        policy differ in it."""
        return self._digest

    def current(self) -> PolicyDocument:
        now = time.monotonic()
        if now - self._checked >= CHECK_SECONDS:
            self._checked = now
            self._check.run()
        return self._document

    def _reload(self) -> None:
        state = file_state(self._path)
        if state == self._state:
            return
        self._state = state
        try:
            self._document, self._digest = self._read()
        except InvalidFieldError as e:
            _log.warning("keeping the previous policy: %s", e)
        else:
            _log.info("reloaded the policy: %s, %s", self._path, self._digest)

    def _read(self) -> tuple[PolicyDocument, str]:
        try:
            data = read_file(self._path)
        except OSError as e:
            raise InvalidFieldError(
                f"policy: cannot read {self._path}: {e.strerror}"
            ) from e
        try:
            text = data.decode()
        except UnicodeDecodeError as e:
            raise InvalidFieldError(
                f"{self._path}: expected UTF-8, got other bytes"
            ) from e
        if data != self._data and self._data.startswith(data.rstrip()):
            raise InvalidFieldError(
                f"{self._path}: expected a whole policy, got the beginning of the one "
                "in force, as of a file that was cut; add a comment if that is meant"
            )
        document = parse(text, file=str(self._path), has_local=self._has_local)
        self._data = data
        return document, hashlib.sha256(data).hexdigest()[:16]
