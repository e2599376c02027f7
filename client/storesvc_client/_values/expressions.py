"""Expressions: operands joined by ``&``, ``|``, ``~`` and parentheses.

Retention policies and conditions on records are expressions; each has operands and
errors of its own::

    expression = all { "|" all }
    all        = part { "&" part }
    part       = "~" part | "(" expression ")" | operand
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")

MAX_NESTING: Final = 32
"""Maximum depth of parentheses and negations; the server allows less in policies."""


class Token(NamedTuple):
    """A sign or a word of a text."""

    kind: str
    """Name of the group of the pattern that it matches; "" at the end of the text."""
    text: str
    """Its text; "" at the end."""
    start: int


class ExpressionReader(ABC, Generic[T]):
    """Reads an expression from left to right."""

    after_part: ClassVar[str]
    """Signs that may follow a part in parentheses, for errors."""
    after_expression: ClassVar[str]
    """Signs that may follow the whole expression."""
    nesting: ClassVar[str]
    """The limit of the nesting."""

    def __init__(self, text: str, tokens: re.Pattern[str]) -> None:
        self.text = text
        found = [
            Token(m.lastgroup or "", m[0], m.start()) for m in tokens.finditer(text)
        ]
        # Two, so that a reader can look behind the next token.
        self.tokens = [*found, *[Token("", "", len(text))] * 2]
        self.at = 0
        """Index of the next token."""
        self._depth = 0

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    def read(self) -> T:
        """Returns the value of the whole text."""
        value = self._expression()
        if self.next.text:
            raise self.unexpected_error(self.after_expression)
        return value

    def took(self, text: str) -> bool:
        """Takes the next token if it is this one."""
        if self.next.text != text:
            return False
        self.at += 1
        return True

    def take(self, text: str, *, expected: str = "") -> None:
        """Takes the next token, which must be this one."""
        if not self.took(text):
            raise self.unexpected_error(expected or text)

    @abstractmethod
    def unexpected_error(self, expected: str) -> Exception:
        """Returns the error of the next token."""

    @abstractmethod
    def operand(self) -> T:
        """Takes an operand."""

    @abstractmethod
    def negate(self, part: T) -> T:
        """Returns the negation of a part."""

    @abstractmethod
    def join(self, sign: str, parts: Sequence[T]) -> T:
        """Returns parts joined by "|" or "&"."""

    def _expression(self) -> T:
        return self._take_joined("|", lambda: self._take_joined("&", self._part))

    def _take_joined(self, sign: str, take: Callable[[], T]) -> T:
        parts = [take()]
        while self.took(sign):
            parts.append(take())
        return parts[0] if len(parts) == 1 else self.join(sign, parts)

    def _part(self) -> T:
        if self.next.text not in ("~", "("):
            return self.operand()
        if self._depth == MAX_NESTING:
            raise self.unexpected_error(self.nesting)
        self._depth += 1
        if self.took("~"):
            part = self.negate(self._part())
        else:
            self.take("(")
            part = self._expression()
            self.take(")", expected=self.after_part)
        self._depth -= 1
        return part
