"""Configuration of an issuer of tokens."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Final

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
