"""The keys of issuers: read from their URLs or files, and kept.

Keys are fresh for ten minutes, then read again before they are used; if that fails,
they stay in use for a day. A token with a key that is not known causes one read, at
most every half minute; until the next one it cannot be judged. An issuer that does not
answer fails the calls that need its keys; it never stops a server from starting.
"""

import asyncio
import json
import logging
import ssl
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.error import URLError

from storesvc.errors import InvalidTokenError, IssuerUnreachableError
from storesvc.identity.issuer_config import Issuer
from storesvc.storage.config_files import read_file
from storesvc.storage.hedged_calls import run_in_daemon_thread
from storesvc.storage.hedging import LogThrottle
from storesvc.storage.location import shows_plaintext

if TYPE_CHECKING:
    from joserfc.jwk import KeySet

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

_DISCOVERY: Final = "/.well-known/openid-configuration"
_KEY_TYPES: Final = ("RSA", "EC", "OKP")

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
        """Returns the keys; reads them if they are old, or if a key is not among them.

        Args:
            kid: Name of the key of a token; None: it names none.

        Raises:
            IssuerUnreachableError: There are no keys, and none can be read now.
        """
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
        """Reads the keys, together with other calls that wait for it, for some time at
        most; does nothing soon after another read."""
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
        found = json.loads(_get(issuer.issuer.rstrip("/") + _DISCOVERY, issuer))
        match found:
            case {"jwks_uri": str(url), "issuer": issuer.issuer}:
                pass
            case _:
                raise ValueError(
                    f"expected a discovery document of {issuer.issuer} with jwks_uri, "
                    "got another one"
                )
    return _key_set(_get(url, issuer))


def verify(token: str, keys: "KeySet", issuer: Issuer) -> None:
    """Verifies the signature of a token.

    Raises:
        InvalidTokenError: It does not match a key, or is of another algorithm.
    """
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
        and key.get("kty") in _KEY_TYPES
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
    """Returns the response of a URL of an issuer."""
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
