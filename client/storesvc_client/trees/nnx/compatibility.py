"""The model that was saved, and the one that is given: are they the same?

All differences go into one error, or into the log where the caller asked for that.
They quote what somebody stored, so they are made safe to print.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

from storesvc_client._pytree.leaves import list_problems
from storesvc_client._values.options import OnMismatch
from storesvc_client._values.values import LeafInfo
from storesvc_client.errors import MismatchError, StructureError
from storesvc_client.trees.nnx.recipes import Recipe
from storesvc_client.trees.structure import (
    Difference,
    is_execution,
    merge_configs,
    merge_layers,
)

__all__ = ["Stored", "compare", "recipe_of", "refuse", "report_as_saved"]


class Stored(Protocol):
    """A checkpoint, or what is about to become one."""

    @property
    def name(self) -> str:
        """The name of the checkpoint, for messages."""

    @property
    def document(self) -> bytes:
        """The document about its tree; b"" without one."""

    @property
    def leaves(self) -> Mapping[str, LeafInfo]:
        """Its leaves by key."""


MAX_TEXT: Final = 300
"""Characters of one difference in a message."""

_SHOWN: Final = 5
"""Places of the structure that one message lists beside fields of the config."""

_log = logging.getLogger("storesvc_client")


def recipe_of(stored: Stored, on_mismatch: OnMismatch) -> Recipe | None:
    """Returns what a checkpoint tells of its model; None where it tells nothing.

    Raises:
        StructureError: It is damaged, and differences are to be refused.
    """
    if not stored.document:
        return None
    try:
        return Recipe.unpack(stored.document)
    except StructureError as e:
        if on_mismatch == "raise":
            raise
        _log.warning("%s: nothing is compared with its model: %s", stored.name, e)
        return None


def compare(
    stored: Stored,
    recipe: Recipe | None,
    target: Recipe,
    *,
    on_mismatch: OnMismatch,
    casting: bool,
) -> None:
    """Refuses a model or an optimizer that is not the one that was saved.

    Args:
        stored: The checkpoint.
        recipe: What it tells of its model; None: nothing.
        target: What is about to be built.
        on_mismatch: Whether to refuse a difference, or to log it. One in the config
            alone, which may say what no computation depends on, is logged.
        casting: Whether parameters are cast to another dtype.

    Raises:
        MismatchError: They differ.
    """
    if recipe is None:
        return
    settings = recipe.config_differences(target, casting=casting)
    places = recipe.optimizer_differences(target.opt_state)
    places += recipe.model_differences(target, casting=casting)
    execution = [each for each in (*settings, *places) if is_execution(each)]
    if execution:
        _log.info(
            "%s is computed otherwise than where it was saved: %s",
            stored.name,
            list_problems(_told(_lines(execution))),
        )
    config, found = _lines({*settings} - {*execution}), _lines({*places} - {*execution})
    if config and len(found) > _SHOWN:
        # the config names in the caller's words what the structure shows everywhere
        found[_SHOWN:] = [f"and {len(found) - _SHOWN} more places of the structure"]
    if found and on_mismatch == "raise":
        advice = "mend what is given, or restore with on_mismatch='log' what fits"
        refuse(stored, [*config, *found], advice=advice)
    if config or found:
        _log.warning(
            "%s was saved from another model: %s",
            stored.name,
            list_problems(_told([*config, *found])),
        )


def report_as_saved(stored: Stored, changed: Sequence[Difference]) -> None:
    """Logs of which leaves the saved dtype is restored, where the caller's code makes
    another."""
    if changed:
        _log.info(
            "%s comes back with the dtypes that were saved: %s",
            stored.name,
            list_problems(_told(_lines(changed))),
        )


def refuse(stored: Stored, problems: list[str], *, advice: str) -> None:
    """Refuses differences, if there are any.

    Args:
        stored: The checkpoint.
        problems: The differences.
        advice: What to do about them.

    Raises:
        MismatchError: There are.
    """
    if problems:
        raise MismatchError(
            f"{stored.name} was saved from another model or optimizer: "
            f"{list_problems(_told(problems))}; {advice}"
        )


def _lines(differences: Iterable[Difference]) -> list[str]:
    """A line for each difference, the shortest first."""
    merged = map(str, merge_layers(merge_configs(differences)))
    return sorted(merged, key=lambda line: (len(line), line))


def _told(problems: list[str]) -> list[str]:
    """The problems without what a terminal would obey, none of them long: they quote
    what somebody stored."""
    return [
        (text if text.isprintable() else ascii(text)[1:-1])[:MAX_TEXT]
        for text in problems
    ]
