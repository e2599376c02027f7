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
"""

import json
import re
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from storesvc.access.principals import Authentication, Principal
from storesvc.errors import (
    InvalidTokenError,
    TokenAudienceError,
    TokenExpiredError,
)
from storesvc.identity.issuer_config import Issuer

MAX_TOKEN_BYTES: Final = 8 << 10
"""Maximum bytes of a token; gRPC limits all metadata of a call to as many."""

MAX_GROUPS: Final = 256
"""Maximum groups of a token."""

MAX_NAME_BYTES: Final = 256
"""Maximum bytes of the name of a principal or a group."""

_TYPES: Final = ("jwt", "at+jwt", "application/at+jwt")
_CLAIM: Final = re.compile(r"\{([^{}]+)\}")
_PATTERN: Final = re.compile(r"[*?\[\]]")
_EPOCH_LIMIT: Final = 1 << 40


@dataclass(frozen=True, slots=True)
class UnverifiedToken:
    """A token that is well formed; its signature is not verified."""

    text: str
    header: Mapping[str, Any]
    claims: Mapping[str, Any]

    @property
    def kid(self) -> str | None:
        """Name of the key."""
        return self.header.get("kid")


def unverified(text: str) -> UnverifiedToken:
    """Parses a token.

    Raises:
        InvalidTokenError: It is malformed.
    """
    if len(text) > MAX_TOKEN_BYTES:
        raise InvalidTokenError(
            f"token: expected at most {MAX_TOKEN_BYTES} bytes, got {len(text)}; "
            "request one with fewer claims"
        )
    parts = text.split(".")
    if len(parts) != 3 or not text.isascii():
        raise _malformed(f"three parts, got {len(parts)}")
    header, claims = _decoded("header", parts[0]), _decoded("claims", parts[1])
    if "crit" in header:
        raise _malformed("a header without crit, got one with it")
    kid, kind = header.get("kid"), header.get("typ", "JWT")
    if kid is not None and not isinstance(kid, str):
        raise _malformed("a kid that is a text, got another value")
    if not isinstance(kind, str) or kind.lower() not in _TYPES:
        raise _malformed("the type JWT or at+jwt, got another one")
    if not isinstance(header.get("alg"), str):
        raise _malformed("the name of an algorithm, got none")
    return UnverifiedToken(text, header, claims)


def principal_of(
    issuer: Issuer, claims: Mapping[str, Any], *, now: datetime
) -> Principal:
    """Returns the principal of verified claims.

    Args:
        issuer: The issuer whose key signed them.
        claims: The claims.
        now: The time.

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
        if _nested(claims, path) != value:
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
    """Returns the time at which a token expires."""
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
    if not 0 <= value < _EPOCH_LIMIT:  # false for NaN, too
        raise _claim(claim, "a number of seconds since 1970")
    return float(value)


def _name(issuer: Issuer, claims: Mapping[str, Any]) -> str:
    """Returns the name of the principal by the template of the issuer."""
    parts = _CLAIM.split(issuer.principal)  # text, claim, text, claim, text
    for at in range(1, len(parts), 2):
        found = _nested(claims, parts[at])
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


def _nested(claims: Any, path: str) -> Any:
    """Returns a claim by its path; None if there is none. A key may have dots, such as
    ``kubernetes.io``."""
    if not isinstance(claims, Mapping):
        return None
    if path in claims:
        return claims[path]
    dots = [at for at, character in enumerate(path) if character == "."]
    nested = (_nested(claims.get(path[:at]), path[at + 1 :]) for at in dots)
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


def _decoded(part: str, text: str) -> dict[str, Any]:
    try:
        data = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        found = json.loads(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        raise _malformed(f"a {part} in JSON and base64url, got another text") from e
    if not isinstance(found, dict):
        raise _malformed(f"a {part} that is a JSON object, got another value")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _malformed(expected: str) -> InvalidTokenError:
    return InvalidTokenError(f"token: expected {expected}; get another one", claim="")


def _claim(claim: str, expected: str) -> InvalidTokenError:
    return InvalidTokenError(
        f"token: claim {claim}: expected {expected}, got another value or none; ask "
        "the issuer for a token with it",
        claim=claim,
    )
