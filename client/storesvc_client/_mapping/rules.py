"""Documents of rules: a mapping as its author writes it, in TOML or JSON.

::

    version = 1
    otherwise = "keep"

    [[rules]]
    from = "model/layers/{n:int}/self_attn/q_proj/weight"
    to = "params/layers/attn/q/kernel"
    operations = [{transpose = [1, 0]}, {stack = {axis = 0, by = "n"}}]

A rule takes the leaves whose keys match ``from``, one template or a list of them, and
makes the leaves of ``to``. ``drop = true`` in place of ``to`` leaves them out. In place
of ``from``, ``default`` makes a leaf of one value, and ``tie`` one of a leaf of the new
tree, named by its key. ``otherwise`` says what becomes of leaves that no rule takes:
"error", "keep" or "drop".

The operations apply in their order to each array of a list, until one joins or divides
them. Several keys in ``to`` get the parts of a split, or else the same array each.

Here a document is checked as far as it can be without a tree: types, placeholders,
numbers of arrays. ``planning.py`` does the rest.
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from storesvc.format.checksums import digest
from storesvc.format.dtypes import DTYPES, is_floating
from storesvc_client._mapping.templates import INTEGER, Template
from storesvc_client._values.arguments import shown
from storesvc_client.errors import InvalidRequestError

VERSION: Final = 1
"""Version of documents."""

MAX_DOCUMENT_BYTES: Final = 16 << 20
MAX_RULES: Final = 100_000
MAX_LISTED: Final = 1_000
"""Maximum templates of a rule, and sizes of a split."""

MAX_OPERATIONS: Final = 32
"""Maximum operations of a rule."""

OTHERWISE: Final = ("error", "keep", "drop")

Document: TypeAlias = Mapping[str, Any]

_RULE_FIELDS: Final = frozenset(
    {"from", "to", "operations", "drop", "default", "tie", "optional"}
)
_DOCUMENT_FIELDS: Final = frozenset({"version", "otherwise", "rules"})


class Check(NamedTuple):
    """The values that a field may have."""

    expected: str
    accepts: Callable[[Any], bool]
    is_required: bool = True


def _is_integer(value: object) -> bool:
    return type(value) is int and -(2**62) <= value <= 2**62


def _are_integers(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) <= MAX_LISTED
    return is_list and all(map(_is_integer, value))


_FLAG: Final = Check("true or false", lambda value: isinstance(value, bool))
_INTEGER: Final = Check("an integer", _is_integer)
_INTEGERS: Final = Check("a list of integers", _are_integers)
_NEW_SIZES: Final = Check(
    "a list of at least one integer", lambda value: _are_integers(value) and value
)
_SIZES: Final = Check(
    "a list of sizes", lambda value: _are_integers(value) and min([0, *value]) == 0
)
_AXES: Final = Check(
    "an integer from 1 to 1000",
    lambda value: _is_integer(value) and 1 <= value <= MAX_LISTED,
    is_required=False,
)
_PARTS: Final = Check(
    "an integer from 2 to 1000",
    lambda value: _is_integer(value) and 2 <= value <= MAX_LISTED,
)
_NUMBER: Final = Check("a number", lambda value: type(value) in (bool, int, float))
_REAL: Final = Check(
    "a number from -2**127 to 2**127",
    lambda value: type(value) in (int, float) and abs(value) <= 2.0**127,
)
_NAME: Final = Check(
    "a name", lambda value: isinstance(value, str) and value.isidentifier()
)
_KEY: Final = Check("a key", lambda value: isinstance(value, str))
_DTYPE: Final = Check(
    "a dtype such as 'bfloat16'",
    lambda value: isinstance(value, str) and value in DTYPES,
)
_FLOATING: Final = Check(
    "a floating-point dtype",
    lambda value: _DTYPE.accepts(value) and is_floating(value),
    is_required=False,
)
_LAYOUT: Final = Check(
    "'halves' or 'interleaved'", lambda value: value in ("halves", "interleaved")
)

ARITHMETIC: Final = ("add", "subtract", "multiply", "divide")
"""The operations on each element and a number, or the size of an axis to a power."""

_POWER: Final = {"axis": _INTEGER, "power": _REAL, "dtype": _FLOATING}

OPERATIONS: Final[Mapping[str, Check | Mapping[str, Check]]] = {
    "transpose": _INTEGERS,
    "reshape": _INTEGERS,
    "reshape_axes": {"axis": _INTEGER, "count": _AXES, "sizes": _NEW_SIZES},
    "cast": _DTYPE,
    "slice": {"axis": _INTEGER, "start": _INTEGER, "stop": _INTEGER},
    "pad": {"axis": _INTEGER, "size": _INTEGER, "value": _NUMBER},
    "stack": {"axis": _INTEGER, "by": _NAME},
    "unstack": {"axis": _INTEGER, "by": _NAME},
    "concatenate": {"axis": _INTEGER},
    "split": {"axis": _INTEGER, "sizes": _SIZES},
    "interleave": {"axis": _INTEGER},
    "deinterleave": {"axis": _INTEGER, "parts": _PARTS},
    "repeat": {"axis": _INTEGER, "times": _INTEGER},
    "permute_heads": {"axis": _INTEGER, "heads": _INTEGER, "from": _LAYOUT},
    **dict.fromkeys(ARITHMETIC, _REAL),
    "lora_merge": {
        "scale": _REAL,
        "fan_in_fan_out": _FLAG._replace(is_required=False),
    },
    "dequantize": {"block": _SIZES, "to": _DTYPE},
    "dequantize_mxfp4": {"to": _DTYPE},
}
"""The argument of each operation, or its arguments by name."""

COMPUTING: Final[Mapping[str, int]] = {
    **dict.fromkeys(ARITHMETIC, 1),
    "lora_merge": 3,
    "dequantize": 2,
    "dequantize_mxfp4": 2,
}
"""The operations that compute with elements, and how many arrays each makes one of; 1:
of each array one."""

_DEFAULT: Final = {"shape": _SIZES, "dtype": _DTYPE, "value": _NUMBER}


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a rule, with its checked arguments."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        given = self.arguments
        value = given[""] if "" in given else dict(given)
        return f"{self.name} {json.dumps(value)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule."""

    place: str
    """Its place in the document, for messages."""
    sources: tuple[Template, ...] = ()
    targets: tuple[Template, ...] = ()
    """Empty: the leaves are left out."""
    operations: tuple[Operation, ...] = ()
    default: Mapping[str, Any] | None = None
    """Arguments of an array of one value; None if it is made of leaves."""
    tie: str | None = None
    """Key of the leaf of the target that it is made of; None if of others."""
    is_optional: bool = False
    """True if it may match no leaf."""

    def __str__(self) -> str:
        names = ", ".join(map(str, self.sources or self.targets))
        return f"{self.place} ({names if len(names) < 120 else names[:119] + '…'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A checked document of rules."""

    name: str
    """Name of the document, for messages."""
    rules: tuple[Rule, ...]
    otherwise: str = "error"
    document: Document = field(repr=False)
    """The document as it was given."""

    @property
    def digest(self) -> str:
        """Digest of the document, in hexadecimal, whatever its format and name."""
        return digest(json.dumps(self.document, sort_keys=True).encode()).hex()


def parse_rules(text: bytes, *, name: str, is_toml: bool) -> Rules:
    """Returns the rules of a document.

    Raises:
        InvalidRequestError: It is none; the message names the place.
    """
    if len(text) > MAX_DOCUMENT_BYTES:
        raise InvalidRequestError(
            f"{name}: expected at most {MAX_DOCUMENT_BYTES} bytes, got {len(text)}"
        )
    try:
        decoded = text.decode()
        document = tomllib.loads(decoded) if is_toml else json.loads(decoded)
    except (ValueError, RecursionError) as e:
        kind = "TOML" if is_toml else "JSON"
        raise InvalidRequestError(f"{name}: expected {kind}, got: {e}") from e
    return check_rules(document, name=name)


def check_rules(document: object, *, name: str) -> Rules:
    """Returns the rules of a parsed document.

    Raises:
        InvalidRequestError: It is none; the message names the place.
    """
    try:
        return _check_document(document, name)
    except RecursionError:
        raise InvalidRequestError(
            f"{name}: expected a document of rules, got one that is nested too deeply"
        ) from None


def _check_document(document: object, name: str) -> Rules:
    found = _table(name, document, _DOCUMENT_FIELDS)
    if found.get("version") != VERSION or isinstance(found["version"], bool):
        raise InvalidRequestError(
            f"{name}: expected version = {VERSION}, got {shown(found.get('version'))}"
        )
    otherwise = found.get("otherwise", OTHERWISE[0])
    if otherwise not in OTHERWISE:
        raise InvalidRequestError(
            f"{name}: expected otherwise = one of {', '.join(OTHERWISE)}, got "
            f"{shown(otherwise)}"
        )
    rules = _list(f"{name}: rules", found.get("rules", []), MAX_RULES)
    return Rules(
        name=name,
        rules=tuple(
            _check_rule(f"rule {number}", rule, name)
            for number, rule in enumerate(rules, start=1)
        ),
        otherwise=otherwise,
        document=found,
    )


def _check_rule(place: str, given: object, name: str) -> Rule:
    where = f"{name}: {place}"
    found = _table(where, given, _RULE_FIELDS)
    drops = _check_value(f"{where}: drop", found.get("drop", False), _FLAG)
    made_of = [name for name in ("from", "default", "tie") if name in found]
    if len(made_of) != 1:
        raise InvalidRequestError(
            f"{where}: expected from, or default for a leaf of one value, or tie for "
            f"one of the new tree, got {' and '.join(made_of) or 'none of them'}"
        )
    if ("to" in found) == drops:
        raise InvalidRequestError(
            f"{where}: expected to, or drop = true, got "
            + ("both" if drops else "neither")
        )
    if drops and ("operations" in found or made_of != ["from"]):
        raise InvalidRequestError(
            f"{where}: expected from and drop = true alone, got "
            f"{', '.join(sorted(found))}"
        )
    default = None
    if "default" in found:
        default = _check_fields(f"{where}: default", found["default"], _DEFAULT)
    listed = _list(f"{where}: operations", found.get("operations", []), MAX_OPERATIONS)
    rule = Rule(
        place=place,
        sources=_templates(f"{where}: from", found["from"]) if "from" in found else (),
        targets=_templates(f"{where}: to", found["to"]) if "to" in found else (),
        operations=tuple(_check_operation(where, each) for each in listed),
        default=default,
        tie=_check_value(f"{where}: tie", found["tie"], _KEY)
        if "tie" in found
        else None,
        is_optional=_check_value(
            f"{where}: optional", found.get("optional", False), _FLAG
        ),
    )
    try:
        _check_names(rule)
    except ValueError as e:
        raise InvalidRequestError(f"{where}: {e}") from e
    return rule


def _check_names(rule: Rule) -> None:
    """Checks the placeholders of a rule, and how many arrays it has."""
    for each in rule.sources:
        each.check_source()
    known = dict(rule.sources[0].kinds) if rule.sources else {}
    for each in rule.sources:
        if each.kinds != known:
            raise ValueError(
                "expected the same placeholders in each key of from, got "
                f"{str(rule.sources[0])!r} and {str(each)!r}"
            )
    width = max(1, len(rule.sources))
    for operation in rule.operations:
        width = follow(operation, known, width)
    for each in rule.targets:
        if each.kinds.keys() != known.keys() or any(
            kind and kind != known[name] for name, kind in each.kinds.items()
        ):
            found = ", ".join(f"{{{key}{kind}}}" for key, kind in known.items())
            raise ValueError(
                f"expected the placeholders {found or '(none)'} in to, got "
                f"{str(each)!r}; stack takes one away, unstack adds one"
            )
    if rule.targets and width not in (1, len(rule.targets)):
        raise ValueError(
            f"expected {width} keys in to, one for each array, got "
            f"{len(rule.targets)}; concatenate or stack joins arrays"
        )


def follow(operation: Operation, known: dict[str, str], width: int) -> int:
    """Returns how many arrays there are after an operation; changes the placeholders
    as it does."""
    match operation.name, operation.arguments:
        case "stack", {"by": str(by)}:
            if known.get(by) != INTEGER:
                raise ValueError(
                    f"stack: expected by = the name of a placeholder {{name:int}} of "
                    f"from, got {by!r}"
                )
            del known[by]
        case "unstack", {"by": str(by)}:
            if by in known:
                raise ValueError(
                    "unstack: expected by = the name of a placeholder that only to "
                    f"has, got {by!r}"
                )
            known[by] = INTEGER
        case "concatenate" | "interleave", _:
            if width < 2:
                raise ValueError(
                    f"{operation.name}: expected several keys in from, got one"
                )
            return 1
        case "split" | "deinterleave", given:
            if width != 1:
                raise ValueError(f"{operation.name}: expected one array, got {width}")
            return given["parts"] if "parts" in given else len(given["sizes"])
        case name, _ if COMPUTING.get(name, 1) > 1:
            if width != COMPUTING[name]:
                raise ValueError(
                    f"{name}: expected {COMPUTING[name]} keys in from, got {width}"
                )
            return 1
        case _:
            pass
    return width


def _check_operation(place: str, given: object) -> Operation:
    names = ", ".join(OPERATIONS)
    if not isinstance(given, Mapping) or len(given) != 1:
        raise InvalidRequestError(
            f"{place}: operations: expected tables of one operation each, such as "
            f"{{transpose = [1, 0]}}, got {shown(given)}; operations: {names}"
        )
    ((name, value),) = given.items()
    if name not in OPERATIONS:
        raise InvalidRequestError(
            f"{place}: operations: expected one of {names}, got {shown(name)}"
        )
    where, check = f"{place}: {name}", OPERATIONS[name]
    if name in ARITHMETIC and isinstance(value, Mapping):
        return Operation(name, {"": _check_fields(where, value, _POWER)})
    if isinstance(check, Check):
        return Operation(name, {"": _check_value(where, value, check)})
    return Operation(name, _check_fields(where, value, check))


def _check_value(place: str, value: Any, check: Check) -> Any:
    if not check.accepts(value):
        raise InvalidRequestError(
            f"{place}: expected {check.expected}, got {shown(value)}"
        )
    return value


def _check_fields(
    place: str, value: object, checks: Mapping[str, Check]
) -> dict[str, Any]:
    required = frozenset(key for key, check in checks.items() if check.is_required)
    found = _table(place, value, frozenset(checks), required)
    for key, given in found.items():
        _check_value(f"{place}: {key}", given, checks[key])
    return found


def _table(
    place: str,
    value: object,
    fields: frozenset[str],
    required: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{place}: expected a table, got {shown(value)}")
    unknown, absent = value.keys() - fields, required - value.keys()
    if unknown or absent:
        got = f"{shown(min(unknown, key=str))}" if unknown else f"no {min(absent)}"
        raise InvalidRequestError(
            f"{place}: expected the fields {', '.join(sorted(fields))}, got {got}"
        )
    return dict(value)


def _list(place: str, value: object, most: int) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or len(value) > most:
        got = len(value) if isinstance(value, list | tuple) else shown(value)
        raise InvalidRequestError(
            f"{place}: expected a list of at most {most}, got {got}"
        )
    return value


def _templates(place: str, value: object) -> tuple[Template, ...]:
    texts = _list(place, [value] if isinstance(value, str) else value, MAX_LISTED)
    found = list[Template]()
    for text in texts:
        if not isinstance(text, str):
            raise InvalidRequestError(f"{place}: expected keys, got {shown(text)}")
        try:
            found.append(Template.parse(text))
        except ValueError as e:
            raise InvalidRequestError(f"{place}: {e}") from e
    if not found:
        raise InvalidRequestError(f"{place}: expected at least one key, got none")
    return tuple(found)
