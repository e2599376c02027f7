"""Validates bearer tokens: JSON Web Tokens (RFC 7519) with a signature of an issuer.

The steps, in this order:

1. The token is small, has three parts, and its JSON has no key twice.
2. Its header asks for nothing unknown (``crit``), and for an algorithm of the issuer.
3. Its ``iss`` equals a configured issuer; only the keys of that issuer are used.
4. Its signature matches. ``kid`` selects among these keys, and nothing else of the
   header (``jku``, ``x5u``, ``jwk``) is used.
5. Its claims are complete, in time, and for this server.
6. The principal follows from the claims by the template of the issuer.

``joserfc`` verifies the signature; the claims are checked here, each with an error of
its own. Nothing of a token is logged or returned.

The keys of an issuer are read from its URL or file, and kept. They are fresh for ten
minutes, then read again before they are used; if that fails,
they stay in use for a day. A token with a key that is not known causes one read, at
most every half minute; until the next one it cannot be judged. An issuer that does not
answer fails the calls that need its keys; it never stops a server from starting.
"""

import asyncio
import json
import logging
import re
import ssl
import time
import urllib.request
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.error import URLError

from storesvc.auth.policy import Authentication, Principal
from storesvc.errors import (
    InvalidTokenError,
    IssuerUnreachableError,
    TokenAudienceError,
    TokenExpiredError,
)
from storesvc.storage.config_files import read_file
from storesvc.storage.hedging import LogThrottle
from storesvc.storage.location import shows_plaintext
from storesvc.storage.requests import run_in_daemon_thread

if TYPE_CHECKING:
    from joserfc.jwk import KeySet

DEFAULT_ALGORITHMS: Final = ("RS256", "ES256", "EdDSA")
"""Signature algorithms that are accepted unless an issuer names others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """An issuer whose tokens are accepted."""

    name: str
    """Name in logs, and in the names of its groups."""
    issuer: str
    """Value of ``iss``; URL of the issuer."""
    audiences: tuple[str, ...]
    """A token must be issued for one of them."""
    algorithms: tuple[str, ...] = DEFAULT_ALGORITHMS
    jwks_uri: str = ""
    """URL of its keys; empty: as its discovery document says."""
    jwks_file: str = ""
    """File with its keys, instead of a URL."""
    ca_file: str = ""
    """Authorities to trust for its URLs; empty: the authorities of the system."""
    leeway: timedelta = timedelta(seconds=30)
    """Difference between clocks that is accepted."""
    max_lifetime: timedelta = timedelta(hours=24)
    """Maximum time from ``iat`` to ``exp``."""
    principal: str = "user:{sub}"
    """Name of the principal: a fixed prefix, and claims in braces; dots lead into
    nested claims."""
    groups: str = ""
    """Claim with a list of groups; empty: none."""
    require: tuple[tuple[str, str], ...] = ()
    """Claims, by their paths, and the values that they must have."""
    client_id: str = ""
    """OAuth client of ``storectl login``; empty: its people cannot log in."""
    scopes: tuple[str, ...] = ()
    """Scopes that ``storectl login`` requests, besides ``openid``."""


FRESH_SECONDS: Final = 600.0
"""Age up to which keys are used as they are."""

STALE_SECONDS: Final = 86_400.0
"""Age up to which keys are used while the issuer does not answer."""

STALE_WAIT_SECONDS: Final = 2.0
"""Maximum time that a call waits for a read of keys that are no longer fresh."""

RETRY_SECONDS: Final = 30.0
"""Minimum interval between two reads."""

TIMEOUT_SECONDS: Final = 10.0
"""Timeout of a request."""

READ_SECONDS: Final = 3 * TIMEOUT_SECONDS
"""Timeout of a read: of a file, or of the discovery document and the keys."""

MAX_BYTES: Final = 64 << 10
"""Maximum bytes of a response."""

_log = logging.getLogger(__name__)
_lines = LogThrottle()


class IssuerKeys:
    """The keys of one issuer."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self._keys: KeySet | None = None
        self._read_at = -STALE_SECONDS
        """Time of the last successful read, by ``time.monotonic``."""
        self._tried_at = -STALE_SECONDS
        """Time of the last read."""
        self._reading: asyncio.Task[None] | None = None

    async def keys(self, kid: str | None) -> "KeySet":
        """Returns the keys; reads them if they are old, or if they lack a key."""
        began = time.monotonic()
        age = began - self._read_at
        is_known = self._keys is not None and (kid is None or _has(self._keys, kid))
        if not is_known or age > STALE_SECONDS:
            await self._read_once(READ_SECONDS)
        elif age > FRESH_SECONDS:  # a key that its issuer withdrew must not serve
            await self._read_once(STALE_WAIT_SECONDS)
        what = "its keys cannot be read now"
        if self._keys is not None and time.monotonic() - self._read_at <= STALE_SECONDS:
            # An unknown key may be new, unless the keys were read during this call.
            if is_known or self._read_at >= began or _has(self._keys, str(kid)):
                return self._keys
            what = (
                "the key of the token is unknown, and its keys cannot be read again "
                f"within {RETRY_SECONDS:.0f} s of the last time"
            )
        raise IssuerUnreachableError(
            f"issuer {self._issuer.issuer}: {what}; retry in a moment, or ask an "
            "administrator of the store",
            issuer=self._issuer.issuer,
        )

    async def _read_once(self, seconds: float) -> None:
        """Waits for a read of the keys that calls share; none soon after another."""
        if self._reading is None or self._reading.done():
            self._reading = None
            if time.monotonic() - self._tried_at >= RETRY_SECONDS:
                self._tried_at = time.monotonic()
                self._reading = asyncio.create_task(self._read())
        if self._reading is not None:
            # A call that is cancelled, or waits no longer, does not end the read.
            await asyncio.wait([self._reading], timeout=seconds)

    async def _read(self) -> None:
        try:
            async with asyncio.timeout(READ_SECONDS):
                self._keys = await run_in_daemon_thread(read_keys, self._issuer)
        # A URLError and a TimeoutError are OSErrors; deep JSON is a RecursionError.
        except (OSError, ValueError, HTTPException, RecursionError) as e:
            if _lines.admits((self._issuer.name,), now=time.monotonic()):
                _log.warning(
                    "issuer %s: its keys cannot be read: %s", self._issuer.name, e
                )
        else:
            self._read_at = time.monotonic()


def read_keys(issuer: Issuer) -> "KeySet":
    """Reads the keys of an issuer.

    Raises:
        OSError: It does not answer.
        ValueError: It answers with something else.
    """
    if issuer.jwks_file:
        return _key_set(read_file(Path(issuer.jwks_file)))
    url = issuer.jwks_uri
    if not url:
        root = issuer.issuer.rstrip("/")
        match json.loads(_get(f"{root}/.well-known/openid-configuration", issuer)):
            case {"jwks_uri": str(url), "issuer": issuer.issuer}:
                pass
            case _:
                raise ValueError(
                    f"expected a discovery document of {issuer.issuer} with jwks_uri, "
                    "got another one"
                )
    return _key_set(_get(url, issuer))


def verify(token: str, keys: "KeySet", issuer: Issuer) -> None:
    """Verifies the signature of a token."""
    from joserfc import jws
    from joserfc.errors import JoseError

    try:
        jws.deserialize_compact(token, keys, algorithms=[*issuer.algorithms])
    except (JoseError, ValueError, TypeError) as e:
        raise InvalidTokenError(
            f"token: expected a signature of {issuer.issuer} by one of "
            f"{', '.join(issuer.algorithms)}, got another one; get another token",
            claim="",
        ) from e


def _has(keys: "KeySet", kid: str) -> bool:
    return any(key.kid == kid for key in keys.keys)


def _key_set(data: bytes) -> "KeySet":
    """Parses public keys for signatures; leaves others out."""
    from joserfc.errors import JoseError
    from joserfc.jwk import KeySet

    found = json.loads(data)
    listed: Any = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(listed, list):
        raise ValueError(  # noqa: TRY004 - of a document, not of an argument
            "expected a JSON Web Key Set, got another document"
        )
    usable = [
        key
        for key in listed
        if isinstance(key, dict)
        and key.get("kty") in ("RSA", "EC", "OKP")
        and key.get("use", "sig") == "sig"
    ]
    try:
        return KeySet.import_key_set({"keys": usable})
    except (JoseError, TypeError, KeyError) as e:
        raise ValueError(f"expected public keys, got others ({e})") from e


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: the URLs of issuers are configured."""

    def redirect_request(self, *args: Any) -> None:  # noqa: ARG002 - its signature
        """Rejects a redirect."""
        raise URLError("expected no redirect, got one")


def _get(url: str, issuer: Issuer) -> bytes:
    if shows_plaintext(url):
        raise ValueError(f"expected an https URL, got {url}")
    context = ssl.create_default_context(cafile=issuer.ca_file or None)
    opener = urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=context), _NoRedirects()
    )
    with opener.open(url, timeout=TIMEOUT_SECONDS) as response:
        data: bytes = response.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"expected at most {MAX_BYTES} bytes, got more from {url}")
    return data


MAX_TOKEN_BYTES: Final = 8 << 10
"""Maximum bytes of a token; gRPC limits all metadata of a call to as many."""

MAX_GROUPS: Final = 256
"""Maximum groups of a token."""

MAX_NAME_BYTES: Final = 256
"""Maximum bytes of the name of a principal or a group."""

_CLAIM: Final = re.compile(r"\{([^{}]+)\}")
_PATTERN: Final = re.compile(r"[*?\[\]]")


@dataclass(frozen=True, slots=True)
class UnverifiedToken:
    """A token that is well formed; its signature is not verified."""

    text: str
    header: Mapping[str, Any]
    claims: Mapping[str, Any]

    @property
    def kid(self) -> str | None:
        return self.header.get("kid")


def parse_unverified(text: str) -> UnverifiedToken:
    if len(text) > MAX_TOKEN_BYTES:
        raise InvalidTokenError(
            f"token: expected at most {MAX_TOKEN_BYTES} bytes, got {len(text)}; "
            "request one with fewer claims"
        )
    parts = text.split(".")
    if len(parts) != 3 or not text.isascii():
        raise _malformed_error(f"three parts, got {len(parts)}")
    header, claims = _decode_part("header", parts[0]), _decode_part("claims", parts[1])
    if "crit" in header:
        raise _malformed_error("a header without crit, got one with it")
    kid, kind = header.get("kid"), header.get("typ", "JWT")
    if kid is not None and not isinstance(kid, str):
        raise _malformed_error("a kid that is a text, got another value")
    types = ("jwt", "at+jwt", "application/at+jwt")
    if not isinstance(kind, str) or kind.lower() not in types:
        raise _malformed_error("the type JWT or at+jwt, got another one")
    if not isinstance(header.get("alg"), str):
        raise _malformed_error("the name of an algorithm, got none")
    return UnverifiedToken(text, header, claims)


def make_principal(
    issuer: Issuer, claims: Mapping[str, Any], *, now: datetime
) -> Principal:
    """Returns the principal of verified claims.

    Raises:
        TokenExpiredError: The token has expired.
        TokenAudienceError: It was issued for another audience.
        InvalidTokenError: Another claim is missing or breaks a rule; names it.
    """
    expires = _checked_times(issuer, claims, now.timestamp())
    audiences = claims.get("aud")
    audiences = [audiences] if isinstance(audiences, str) else audiences
    if not isinstance(audiences, list) or not audiences:
        raise _claim("aud", "a text, or a list of texts")
    if not any(each in issuer.audiences for each in audiences if isinstance(each, str)):
        raise TokenAudienceError(
            f"token: expected the audience {' or '.join(issuer.audiences)}, got "
            "another one; request a token for this server",
            claim="aud",
        )
    if not isinstance(claims.get("sub"), str) or not claims["sub"]:
        raise _claim("sub", "a text")
    for path, value in issuer.require:
        if _find_claim(claims, path) != value:
            raise _claim(path, f"the text {value!r}")
    verified = claims.get("email_verified", True)
    if "{email}" in issuer.principal and verified not in (True, "true"):
        raise _claim("email_verified", "true: else the caller may have chosen email")
    return Principal(
        name=_name(issuer, claims),
        authentication=Authentication.TOKEN,
        groups=_groups(issuer, claims),
        expire_time=datetime.fromtimestamp(expires, UTC),
    )


def _checked_times(issuer: Issuer, claims: Mapping[str, Any], now: float) -> float:
    leeway = issuer.leeway.total_seconds()
    expires, issued = _time(claims, "exp"), _time(claims, "iat")
    if now >= expires + leeway:
        ago = datetime.fromtimestamp(expires, UTC)
        raise TokenExpiredError(
            f"token: it expired at {ago:%Y-%m-%dT%H:%M:%SZ}; get another one",
            claim="exp",
        )
    if issued > now + leeway:
        raise _claim("iat", "a time that is not in the future")
    if "nbf" in claims and _time(claims, "nbf") > now + leeway:
        raise _claim("nbf", "a time that is not in the future")
    most = issuer.max_lifetime.total_seconds()
    if expires - issued > most:
        raise _claim("exp", f"at most {most:.0f} s after iat")
    return expires


def _time(claims: Mapping[str, Any], claim: str) -> float:
    value = claims.get(claim)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _claim(claim, "a number of seconds")
    if not 0 <= value < 1 << 40:  # false for NaN, too
        raise _claim(claim, "a number of seconds since 1970")
    return float(value)


def _name(issuer: Issuer, claims: Mapping[str, Any]) -> str:
    parts = _CLAIM.split(issuer.principal)  # text, claim, text, claim, text
    for at in range(1, len(parts), 2):
        found = _find_claim(claims, parts[at])
        # With the text that ends it in a claim, two callers could have one name.
        end = parts[at + 1][:1] if at + 2 < len(parts) else ""
        if not isinstance(found, str) or not _is_name(found) or (end and end in found):
            more = f" and without {end!r}" if end else ""
            raise _claim(parts[at], f"a printable text without patterns{more}")
        parts[at] = found
    name = "".join(parts)
    if len(name.encode()) > MAX_NAME_BYTES:
        raise _claim("sub", f"a principal of at most {MAX_NAME_BYTES} bytes")
    return name


def _find_claim(claims: Any, path: str) -> Any:
    """Returns a claim by its path; None if there is none."""
    if not isinstance(claims, Mapping):
        return None
    if path in claims:
        return claims[path]
    # A key may have dots, such as ``kubernetes.io``.
    dots = [at for at, character in enumerate(path) if character == "."]
    nested = (_find_claim(claims.get(path[:at]), path[at + 1 :]) for at in dots)
    return next((found for found in nested if found is not None), None)


def _groups(issuer: Issuer, claims: Mapping[str, Any]) -> frozenset[str]:
    if not issuer.groups or issuer.groups not in claims:
        return frozenset()
    found = claims[issuer.groups]
    if not isinstance(found, list) or len(found) > MAX_GROUPS:
        raise _claim(issuer.groups, f"a list of at most {MAX_GROUPS} texts")
    if not all(isinstance(each, str) and _is_name(each) for each in found):
        raise _claim(issuer.groups, "printable texts without patterns")
    # Each issuer has its own groups: groups of another one have another prefix.
    return frozenset(f"{issuer.name}/{each}" for each in found)


def _is_name(text: str) -> bool:
    # Bindings are patterns: a name with their characters could be mistaken for one.
    is_short = 0 < len(text.encode(errors="replace")) <= MAX_NAME_BYTES
    return is_short and text.isprintable() and not _PATTERN.search(text)


def _decode_part(part: str, text: str) -> dict[str, Any]:
    try:
        data = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        # int rejects the constants that are no JSON: NaN and the infinities.
        found = json.loads(data, object_pairs_hook=_unique, parse_constant=int)
    except (ValueError, RecursionError) as e:
        raise _malformed_error(
            f"a {part} in JSON and base64url, got another text"
        ) from e
    if not isinstance(found, dict):
        raise _malformed_error(f"a {part} that is a JSON object, got another value")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _malformed_error(expected: str) -> InvalidTokenError:
    return InvalidTokenError(f"token: expected {expected}; get another one", claim="")


def _claim(claim: str, expected: str) -> InvalidTokenError:
    return InvalidTokenError(
        f"token: claim {claim}: expected {expected}, got another value or none; ask "
        "the issuer for a token with it",
        claim=claim,
    )
