"""Compares the saved model with the given one.

All differences go into one error, or into the log if the caller asked for that. They
quote stored text, which is untrusted, so they are escaped for terminals.
"""

import logging
from collections.abc import (
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Final, Protocol

from storesvc.format.trees import Tree
from storesvc_client._pytree.leaves import list_problems
from storesvc_client._values.arguments import checked_patterns
from storesvc_client._values.key_patterns import (
    Patterns,
    matching_keys,
    nearest_keys,
)
from storesvc_client._values.options import OnMismatch
from storesvc_client._values.values import LeafInfo
from storesvc_client.errors import MismatchError, NotFoundError, StructureError
from storesvc_client.trees.nnx.recipes import Recipe
from storesvc_client.trees.structure import (
    Difference,
    is_execution,
    merge_configs,
    merge_layers,
)

__all__ = [
    "Stored",
    "compare",
    "log_saved_dtypes",
    "recipe_of",
    "reject_differences",
    "select_leaves",
]


class Stored(Protocol):
    """A checkpoint, or a tree that is about to be saved as one."""

    @property
    def name(self) -> str:
        """Name of the checkpoint, for messages."""

    @property
    def document(self) -> bytes:
        """Document about the tree; b"" if there is none."""

    @property
    def leaves(self) -> Mapping[str, LeafInfo]:
        """Leaves by key."""

    @property
    def _tree(self) -> Tree:
        """All leaves in rows."""


@dataclass(frozen=True, slots=True)
class SelectedLeaves:
    """A checkpoint of which only some leaves count."""

    name: str
    document: bytes
    leaves: Mapping[str, LeafInfo]
    _tree: Tree


def select_leaves(stored: Stored, select: Patterns | None) -> Stored:
    """Returns a checkpoint as if it had only the leaves that match.

    Raises:
        NotFoundError: A pattern matches none.
    """
    if select is None:
        return stored
    found = set[str]()
    for pattern in checked_patterns(f"restore of {stored.name}: select=", select):
        keys = matching_keys(pattern, stored.leaves)
        if not keys:
            nearest = ", ".join(nearest_keys(pattern, stored.leaves))
            raise NotFoundError(
                f"no leaf of {stored.name} matches {pattern!r}; nearest: {nearest}"
            )
        found.update(keys)
    leaves = {key: leaf for key, leaf in stored.leaves.items() if key in found}
    return SelectedLeaves(stored.name, stored.document, leaves, stored._tree)  # noqa: SLF001 - not public


MAX_TEXT: Final = 300
"""Maximum characters of one difference in a message."""

_SHOWN: Final = 5
"""Maximum structure differences that one message lists next to config fields."""

_log = logging.getLogger("storesvc_client")


def recipe_of(stored: Stored, on_mismatch: OnMismatch) -> Recipe | None:
    """Returns the recipe of a checkpoint, or None if it has none.

    Raises:
        StructureError: It is corrupt, and ``on_mismatch`` is "raise".
    """
    if not stored.document:
        return None
    try:
        return Recipe.unpack(stored.document)
    except StructureError as e:
        if on_mismatch == "raise":
            raise
        _log.warning(
            "%s: its model is not compared, because the recipe cannot be read: %s",
            stored.name,
            e,
        )
        return None


def compare(
    stored: Stored,
    recipe: Recipe | None,
    target: Recipe,
    *,
    on_mismatch: OnMismatch,
) -> None:
    """Rejects a model or an optimizer that differs from the saved one.

    Args:
        stored: The checkpoint.
        recipe: Recipe of the checkpoint; None: nothing is compared.
        target: Recipe of the model to build.
        on_mismatch: "raise" rejects differences, "log" logs them. Differences only in
            the config, which may not affect any computation, are logged.

    Raises:
        MismatchError: They differ.
    """
    if recipe is None:
        return
    settings = recipe.config_differences(target)
    places = recipe.optimizer_differences(target.opt_state)
    places += recipe.field_differences(target)
    places += recipe.model_differences(target)
    execution = [each for each in (*settings, *places) if is_execution(each)]
    if execution:
        _log.info(
            "%s: the model is computed in another way than when it was saved: %s",
            stored.name,
            list_problems(_printable(_lines(execution))),
        )
    config, found = _lines({*settings} - {*execution}), _lines({*places} - {*execution})
    if config and len(found) > _SHOWN:
        # The config shows in the caller's terms the differences that the structure
        # shows in every layer.
        found[_SHOWN:] = [f"and {len(found) - _SHOWN} more places of the structure"]
    if found and on_mismatch == "raise":
        reject_differences(stored, [*config, *found])
    if config or found:
        _log.warning(
            "%s was saved from another model: %s",
            stored.name,
            list_problems(_printable([*config, *found])),
        )


def log_saved_dtypes(stored: Stored, changed: Sequence[Difference]) -> None:
    """Logs the leaves restored in their saved dtype although the code creates
    another."""
    if changed:
        _log.info(
            "%s: leaves are restored with their saved dtypes: %s",
            stored.name,
            list_problems(_printable(_lines(changed))),
        )


def reject_differences(
    stored: Stored, problems: list[str], *, advice: str = ""
) -> None:
    """Rejects differences, if there are any.

    Args:
        stored: The checkpoint.
        problems: Differences to list.
        advice: Text that says how to fix them, after "; "; "": a caller adds it.

    Raises:
        MismatchError: There are differences.
    """
    if problems:
        raise MismatchError(
            f"{stored.name} was saved from another model or optimizer: "
            f"{list_problems(_printable(problems))}{advice}",
            metadata={} if advice else {"hints": ""},
        )


def _lines(differences: Iterable[Difference]) -> list[str]:
    """Returns one line for each difference, the shortest first."""
    merged = map(str, merge_layers(merge_configs(differences)))
    return sorted(merged, key=lambda line: (len(line), line))


def _printable(problems: list[str]) -> list[str]:
    """Returns the problems escaped for terminals and shortened; they quote stored
    text."""
    return [
        (text if text.isprintable() else ascii(text)[1:-1])[:MAX_TEXT]
        for text in problems
    ]
