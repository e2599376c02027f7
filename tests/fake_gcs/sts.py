"""The exchange of a token for one that a Credential Access Boundary limits.

It parses the boundaries that `storesvc.lending` makes, and no other expression.
"""

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl, unquote

from tests.fake_gcs.grants import OF_ROLE, Grant
from tests.fake_gcs.messages import Answer, Request, json_answer
from tests.fake_gcs.tokens import Tokens

PATH: Final = "/v1/token"
MOST_RULES: Final = 10

_GRANT: Final = "urn:ietf:params:oauth:grant-type:token-exchange"
_TOKEN: Final = "urn:ietf:params:oauth:token-type:access_token"
_BUCKET: Final = re.compile("//storage.googleapis.com/projects/_/buckets/([^/]+)")
_CONDITION: Final = re.compile(
    r"resource\.name\.startsWith\('projects/_/buckets/([^/']+)/objects/([^'\\]+)'\)"
)


def exchange(request: Request, tokens: Tokens) -> Answer:
    """Returns a limited token, or an error of OAuth."""
    form = dict(parse_qsl(bytes(request.body).decode()))
    given = form.get("subject_token", "")
    kinds = [form.get(f"{one}_token_type") for one in ("subject", "requested")]
    if form.get("grant_type") != _GRANT or kinds != [_TOKEN, _TOKEN]:
        return _error("invalid_request", "expected the exchange of an access token")
    if not tokens.counts(given):
        return _error("invalid_grant", "the subject token is invalid or expired")
    try:
        grants = grants_of(json.loads(unquote(form.get("options", ""))))
    except (ValueError, KeyError, TypeError) as e:
        return _error("invalid_request", f"options: {e}")
    lent, seconds = tokens.lend(given, grants)
    document: dict[str, Any] = {
        "access_token": lent,
        "issued_token_type": _TOKEN,
        "token_type": "Bearer",
        "expires_in": int(seconds),
    }
    return json_answer(document)


def grants_of(options: Mapping[str, Any]) -> tuple[Grant, ...]:
    """Returns the grants of a boundary.

    Raises:
        ValueError: It is not one that this module knows.
        KeyError: A field is missing.
    """
    rules = options["accessBoundary"]["accessBoundaryRules"]
    if not 1 <= len(rules) <= MOST_RULES:
        raise ValueError(f"expected 1 to {MOST_RULES} rules, got {len(rules)}")
    return tuple(_grant(rule) for rule in rules)


def _grant(rule: Mapping[str, Any]) -> Grant:
    bucket = _BUCKET.fullmatch(rule["availableResource"])
    expression = rule["availabilityCondition"]["expression"]
    condition = _CONDITION.fullmatch(expression)
    if bucket is None or condition is None or condition[1] != bucket[1]:
        raise ValueError(f"unknown resource or condition: {expression}")
    verbs = frozenset[str]().union(*(OF_ROLE[r] for r in rule["availablePermissions"]))
    return Grant(bucket=bucket[1], prefix=condition[2], verbs=verbs)


def _error(error: str, says: str) -> Answer:
    document = {"error": error, "error_description": says}
    return json_answer(document, status=HTTPStatus.BAD_REQUEST)
