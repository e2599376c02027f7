"""Keeps the logins of a person: ``tokens.json`` next to the configuration of storectl.

Only its owner may read the file, and it is rejected if others may. A login at an issuer
is the device authorization grant (RFC 8628): the person opens a page of the issuer in
any browser, on any machine, and enters a code; until then, the issuer is asked for the
token again and again. Nothing listens here.
"""

import json
import os
import ssl
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from storesvc.storage.location import shows_plaintext
from storesvc_client.cli.contexts import config_path, write_private_file
from storesvc_client.cli.errors import Refusal

TIMEOUT_SECONDS: Final = 10.0
"""Timeout of a request to the issuer."""

MAX_BYTES: Final = 64 << 10
"""Maximum bytes of a response."""

_DEVICE_GRANT: Final = "urn:ietf:params:oauth:grant-type:device_code"
_INTERVAL_SECONDS: Final = 5
_SLOWER_SECONDS: Final = 5  # RFC 8628, 3.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Tokens of a person, and how to renew them."""

    issuer: str
    client_id: str
    audience: str
    token: str
    """The token for the store."""
    refresh_token: str
    """Token that renews the other one; empty: the issuer gave none."""
    expire_time: float
    """When ``token`` expires, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The page on which a person confirms a login, and its code."""

    url: str
    code: str


def log_in(
    *,
    issuer: str,
    client_id: str,
    audience: str,
    scopes: tuple[str, ...],
    show: Callable[[Prompt], None],
) -> Login:
    """Logs in, and returns once the person has confirmed it.

    Raises:
        Refusal: The issuer does not answer or offers no such login, or the person
            declined or was too late.
    """
    endpoints = _discover_issuer(issuer)
    begun = _post_form(
        _endpoint(endpoints, "device_authorization_endpoint", issuer),
        {
            "client_id": client_id,
            "scope": " ".join(dict.fromkeys(("openid", *scopes, "offline_access"))),
            **_for(audience),
        },
    )
    if "error" in begun:
        raise _rejected_error(issuer, begun)
    url = str(begun.get("verification_uri_complete") or begun.get("verification_uri"))
    show(Prompt(url=url, code=str(begun.get("user_code"))))
    end = time.monotonic() + float(begun.get("expires_in", 600))
    interval = float(begun.get("interval", _INTERVAL_SECONDS))
    while time.monotonic() < end:
        time.sleep(interval)
        given = _post_form(
            _endpoint(endpoints, "token_endpoint", issuer),
            {
                "client_id": client_id,
                "device_code": str(begun.get("device_code")),
                "grant_type": _DEVICE_GRANT,
            },
        )
        match given.get("error"):
            case None:
                return _login(issuer, client_id, audience, given, refresh_token="")
            case "authorization_pending":
                continue
            case "slow_down":
                interval += _SLOWER_SECONDS
            case _:
                raise _rejected_error(issuer, given)
    raise Refusal(f"login at {issuer}: it was not confirmed in time; log in again")


def renew_login(login: Login) -> Login:
    """Returns a login with another token."""
    given = _post_form(
        _endpoint(_discover_issuer(login.issuer), "token_endpoint", login.issuer),
        {
            "client_id": login.client_id,
            "grant_type": "refresh_token",
            "refresh_token": login.refresh_token,
            **_for(login.audience),
        },
    )
    if "error" in given:
        raise _rejected_error(login.issuer, given)
    return _login(
        login.issuer,
        login.client_id,
        login.audience,
        given,
        refresh_token=login.refresh_token,
    )


def _login(
    issuer: str,
    client_id: str,
    audience: str,
    given: Mapping[str, Any],
    *,
    refresh_token: str,
) -> Login:
    token = str(given.get("access_token", ""))
    # Issuers without tokens for other services give opaque ones; the identity token is
    # for this client, and servers may accept its audience.
    if token.count(".") != 2:
        token = str(given.get("id_token", ""))
    if token.count(".") != 2:
        raise Refusal(
            f"login at {issuer}: expected a JSON Web Token for {audience}, got another "
            "token; ask an administrator of the issuer"
        )
    return Login(
        issuer=issuer,
        client_id=client_id,
        audience=audience,
        token=token,
        refresh_token=str(given.get("refresh_token", "") or refresh_token),
        expire_time=time.time() + float(given.get("expires_in", 300)),
    )


def _for(audience: str) -> dict[str, str]:
    """Returns the parameters that request an audience: ``resource`` (RFC 8707) takes
    only URIs; other issuers have ``audience``."""
    if urlsplit(audience).scheme:
        return {"audience": audience, "resource": audience}
    return {"audience": audience}


def _discover_issuer(issuer: str) -> dict[str, Any]:
    return _answer(issuer.rstrip("/") + "/.well-known/openid-configuration", None)


def _endpoint(document: Mapping[str, Any], key: str, issuer: str) -> str:
    found = document.get(key)
    if not isinstance(found, str):
        raise Refusal(
            f"login at {issuer}: expected {key} in its discovery document, got none; "
            "it offers no login with a code: use --token-file"
        )
    return found


def _post_form(url: str, form: Mapping[str, str]) -> dict[str, Any]:
    return _answer(url, urlencode({k: v for k, v in form.items() if v}).encode())


def _answer(url: str, form: bytes | None) -> dict[str, Any]:
    """Returns the JSON that an issuer responds with, also with an error of OAuth."""
    if shows_plaintext(url):
        raise Refusal(f"{url}: expected an https URL")
    opener = urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=ssl.create_default_context())
    )
    try:
        with opener.open(url, form, timeout=TIMEOUT_SECONDS) as response:
            data = response.read(MAX_BYTES)
    except urllib.error.HTTPError as e:
        data = e.read(MAX_BYTES)
    except (OSError, HTTPException) as e:  # a URLError is an OSError
        reason = getattr(e, "reason", None) or e
        raise Refusal(f"{url}: does not answer: {reason}; log in again later") from e
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Refusal(f"{url}: expected JSON of an issuer, got another response")
    return found


def _rejected_error(issuer: str, given: Mapping[str, Any]) -> Refusal:
    why = str(given.get("error_description") or given.get("error"))[:200]
    return Refusal(f"login at {issuer}: rejected: {why}; log in again")


RENEWAL_SECONDS: Final = 60.0
"""Time before the expiry of a token at which it is renewed."""


def logins_path() -> Path:
    return config_path().with_name("tokens.json")


def stored_login(store: str) -> Login | None:
    found = _read().get(store)
    if found is None:
        return None
    try:
        return Login(**found)
    except TypeError as e:
        raise _wrong(logins_path()) from e


def keep_login(store: str, login: Login | None) -> None:
    """Keeps the login for a store; None forgets it."""
    logins = {name: value for name, value in _read().items() if name != store}
    if login is not None:
        logins[store] = asdict(login)
    path = logins_path()
    try:
        write_private_file(path, json.dumps(logins, indent=1))
    except OSError as e:
        raise Refusal(f"{path}: cannot be written: {e.strerror}") from e


def login_token(store: str) -> Callable[[], str] | None:
    """Returns a function that returns the token for a store, and renews it before it
    expires; None if there is no login."""
    if stored_login(store) is None:
        return None

    def token() -> str:
        login = stored_login(store)
        if login is None:
            raise Refusal(f"{store}: the login has ended; run storectl login")
        if login.refresh_token and time.time() >= login.expire_time - RENEWAL_SECONDS:
            login = renew_login(login)
            keep_login(store, login)
        return login.token

    return token


def _read() -> dict[str, Any]:
    path = logins_path()
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read()
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise Refusal(f"{path}: {e.strerror}; expected a file to read") from e
    if mode & 0o077:
        raise Refusal(
            f"{path}: expected a file that only its owner may read, got the mode "
            f"{mode:o}; chmod 600 {path}, and log in again: others may have the tokens"
        )
    try:
        found = json.loads(data)
    except ValueError as e:
        raise _wrong(path) from e
    is_valid = isinstance(found, dict) and all(
        isinstance(value, dict) for value in found.values()
    )
    if not is_valid:
        raise _wrong(path)
    return dict(found)


def _wrong(path: Path) -> Refusal:
    return Refusal(
        f"{path}: expected the logins of storectl, got other text; remove it, and "
        "log in again"
    )
