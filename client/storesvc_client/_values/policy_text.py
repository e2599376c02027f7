"""Parses and formats retention policies as text.

::

    policy   = all { "|" all }
    all      = part { "&" part }
    part     = "~" part | "(" policy ")" | rule
    rule     = "latest(" COUNT ")" | "every(" COUNT "steps" | DURATION ")"
             | "newer-than(" DURATION ")" | "steps(" STEP { "," STEP } ")"
             | "best(" COUNT "," METRIC "," "min" | "max" [ "," "or-without" ]
               [ "," "force" ] ")"
             | "tagged" | "pinned"
    DURATION = a text for ``durations.parse_duration``: "7 days", "90m"
    METRIC   = a word, or a JSON string

``parse_policy(format_policy(policy)) == policy`` for every policy.

Python's own parser cannot read it: "every(3d)", "newer-than(12 hours)" and a metric
named "eval/loss" or "lambda" are no Python. Texts come from users, so the time to read
one grows with its length, not with the square of it.
"""

import json
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Final, assert_never

from storesvc.format.names import MAX_STEP
from storesvc_client._values.durations import duration_text, parse_duration
from storesvc_client._values.policies import (
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepNewerThan,
    KeepNot,
    KeepPinned,
    KeepSteps,
    KeepTagged,
    Mode,
    RetentionPolicy,
    WithoutMetric,
    rule_of,
)
from storesvc_client.errors import InvalidRequestError

MAX_NESTING: Final = 32
"""Maximum depth of parentheses and negations; the server allows less."""

_SHOWN: Final = 60
"""Maximum characters of a text that a message repeats."""

_WORD: Final = re.compile(r'[^\s()|&~,"]+')
_TOKEN: Final = re.compile(rf'"(?:[^"\\]|\\.)*"?|[()|&~,]|{_WORD.pattern}')
"""A string that does not end is a token too: the rest is not searched again for each
quotation mark in it."""

_NUMBER: Final = re.compile(r"-?[0-9]{1,19}|-?[0-9]{1,3}(?:_[0-9]{3}){1,6}")
_RULES: Final = (
    "latest(N), every(N steps), every(TIME), newer-than(TIME), "
    "best(N, METRIC, min|max), steps(N, ...), tagged or pinned"
)


def format_policy(policy: RetentionPolicy) -> str:
    """Returns the text of a policy, which ``parse_policy`` reads.

    >>> format_policy(KeepLatest(3) | KeepEvery(steps=10_000))
    'latest(3) | every(10000 steps)'

    Raises:
        InvalidRequestError: It is no retention policy.
    """
    match rule_of(policy):
        case KeepLatest(count):
            return f"latest({count})"
        case KeepEvery(interval=timedelta() as length):
            return f"every({duration_text(length)})"
        case KeepEvery(interval=steps):
            return f"every({steps} {'step' if steps == 1 else 'steps'})"
        case KeepNewerThan(length):
            return f"newer-than({duration_text(length)})"
        case KeepBest(count, metric=metric, mode=mode) as best:
            end = ", or-without" if best.without_metric == "keep" else ""
            end += ", force" if best.force else ""
            return f"best({count}, {_metric_text(metric)}, {mode}{end})"
        case KeepSteps(steps):
            return f"steps({', '.join(map(str, steps))})"
        case KeepAny(policies):
            return " | ".join(map(format_policy, policies))
        case KeepAll(policies):
            return " & ".join(_inside(policy, KeepAny) for policy in policies)
        case KeepNot(negated):
            return f"~{_inside(negated, KeepAny, KeepAll)}"
        case KeepTagged():
            return "tagged"
        case KeepPinned():
            return "pinned"
        case rule:
            assert_never(rule)


def parse_policy(text: str) -> RetentionPolicy:
    """Returns the policy of a text, such as "latest(3) | every(1 day)".

    Raises:
        InvalidRequestError: It is none; names the place in the text.
    """
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"retention policy: expected a text such as 'latest(3)', got {text!r}"
        )
    reader = _Reader(text)
    policy = reader.any()
    reader.end()
    return policy


class _Reader:
    """Reads a text from left to right; each method takes what it is called."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [(found[0], found.start()) for found in _TOKEN.finditer(text)]
        self._tokens += [("", len(text))] * 2
        self._at = 0
        self._nesting = 0

    @property
    def _next(self) -> str:
        return self._tokens[self._at][0]

    def any(self) -> RetentionPolicy:
        return self._combined(KeepAny, "|", self._all)

    def end(self) -> None:
        if self._next:
            raise self._unexpected("|, & or the end")

    def _all(self) -> RetentionPolicy:
        return self._combined(KeepAll, "&", self._part)

    def _combined(
        self,
        kind: type[KeepAny | KeepAll],
        operator: str,
        operand: Callable[[], RetentionPolicy],
    ) -> RetentionPolicy:
        policies = [operand()]
        while self._took(operator):
            policies.append(operand())
        if len(policies) == 1:
            return policies[0]
        members: list[RetentionPolicy] = []  # combined once: each | copies its operands
        for policy in policies:
            members += policy.policies if isinstance(policy, kind) else (policy,)
        return kind(tuple(members))

    def _part(self) -> RetentionPolicy:
        if self._next not in ("~", "("):
            return self._rule()
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise self._unexpected(f"at most {MAX_NESTING} within each other")
        if self._took("~"):
            policy = ~self._part()
        else:
            self._take("(")
            policy = self.any()
            self._take(")")
        self._nesting -= 1
        return policy

    def _rule(self) -> RetentionPolicy:
        if self._took("tagged"):
            return KeepTagged()
        if self._took("pinned"):
            return KeepPinned()
        rules: dict[str, Callable[[], RetentionPolicy]] = {
            "latest": lambda: KeepLatest(self._number()),
            "every": self._every,
            "newer-than": lambda: KeepNewerThan(self._duration()),
            "best": self._best,
            "steps": self._steps,
        }
        if self._next not in rules:
            raise self._unexpected(f"one of {_RULES}")
        rule = rules[self._next]
        self._at += 1
        self._take("(")
        policy = rule()
        self._take(")")
        return policy

    def _every(self) -> KeepEvery:
        if self._tokens[self._at + 1][0] in ("step", "steps"):
            steps = self._number()
            self._at += 1
            return KeepEvery(steps=steps)
        return KeepEvery(duration=self._duration())

    def _best(self) -> KeepBest:
        count = self._number()
        self._take(",")
        metric = self._metric()
        self._take(",")
        mode: Mode = "min"
        if not self._took("min"):
            self._take("max", expected="min or max")
            mode = "max"
        without: WithoutMetric = "drop"
        force = False
        while not force and self._took(","):
            if without == "drop" and self._took("or-without"):
                without = "keep"
            else:
                self._take("force", expected="or-without or force")
                force = True
        return KeepBest(
            count, metric=metric, mode=mode, without_metric=without, force=force
        )

    def _steps(self) -> KeepSteps:
        steps = [] if self._next == ")" else [self._number()]
        while self._took(","):
            steps.append(self._number())
        return KeepSteps(*steps)

    def _number(self) -> int:
        if not _NUMBER.fullmatch(self._next) or abs(int(self._next)) > MAX_STEP:
            raise self._unexpected("a whole number")
        self._at += 1
        return int(self._tokens[self._at - 1][0])

    def _duration(self) -> timedelta:
        start, words = self._at, []
        while _WORD.fullmatch(self._next):
            words.append(self._next)
            self._at += 1
        try:
            return parse_duration(" ".join(words))
        except InvalidRequestError as e:
            self._at = start
            raise self._unexpected("a time, such as 3d, 12 hours, 90 minutes") from e

    def _metric(self) -> str:
        token = self._next
        if not token.startswith('"') and not _WORD.fullmatch(token):
            raise self._unexpected("the name of a metric")
        try:
            metric = json.loads(token) if token.startswith('"') else token
        except ValueError as e:
            raise self._unexpected("a metric as a JSON string") from e
        self._at += 1
        return str(metric)

    def _took(self, token: str) -> bool:
        if self._next != token:
            return False
        self._at += 1
        return True

    def _take(self, token: str, *, expected: str = "") -> None:
        if not self._took(token):
            raise self._unexpected(expected or token)

    def _unexpected(self, expected: str) -> InvalidRequestError:
        token, place = self._tokens[self._at]
        text = self._text
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        return InvalidRequestError(
            f"retention policy {shown!r}: expected {expected} at character "
            f"{place + 1}, got {repr(token[:_SHOWN]) if token else 'the end'}"
        )


def _inside(policy: RetentionPolicy, *weaker: type[RetentionPolicy]) -> str:
    """The text of a part, in parentheses where it binds less than what is around."""
    text = format_policy(policy)
    return f"({text})" if isinstance(policy, weaker) else text


def _metric_text(metric: str) -> str:
    if _WORD.fullmatch(metric) and metric.isprintable():
        return metric
    return json.dumps(metric)
