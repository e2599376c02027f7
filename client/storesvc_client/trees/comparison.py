"""The model that was saved, and the one that is given: are they the same?

All differences go into one error, or into the log where the caller asked for that.
They quote what somebody stored, so they are made safe to print.
"""

import logging
from typing import Final, Literal, TypeAlias

from storesvc_client._opened import OpenCheckpoint
from storesvc_client.errors import MismatchError, StructureError
from storesvc_client.trees.flattening import list_problems
from storesvc_client.trees.recipes import Recipe

__all__ = ["Structure", "compare", "recipe_of", "refuse"]

Structure: TypeAlias = Literal["check", "report"]
"""Whether differences are refused, or logged."""

MAX_TEXT: Final = 300
"""Characters of one difference in a message."""

_SHOWN: Final = 5
"""Places of the structure that one message lists beside fields of the config."""

_log = logging.getLogger("storesvc_client")


def recipe_of(opened: OpenCheckpoint, structure: Structure) -> Recipe | None:
    """Returns what a checkpoint tells of its model; None where it tells nothing.

    Raises:
        StructureError: It is damaged, and differences are to be refused.
    """
    if not opened.structure:
        return None
    try:
        return Recipe.unpack(opened.structure)
    except StructureError as e:
        if structure == "check":
            raise
        _log.warning("%s: nothing is compared with its model: %s", opened.name, e)
        return None


def compare(
    opened: OpenCheckpoint,
    recipe: Recipe | None,
    target: Recipe,
    *,
    structure: Structure,
    casting: bool,
) -> None:
    """Refuses a model or an optimizer that is not the one that was saved.

    Args:
        opened: The checkpoint.
        recipe: What it tells of its model; None: nothing.
        target: What is about to be built.
        structure: Whether to refuse a difference, or to log it. One in the config
            alone, which may say what no computation depends on, is logged.
        casting: Whether parameters are cast to another dtype.

    Raises:
        MismatchError: They differ.
    """
    if recipe is None:
        return
    config = recipe.config_differences(target, casting=casting)
    found = recipe.optimizer_differences(target)
    found += recipe.model_differences(target, casting=casting)
    if config and len(found) > _SHOWN:
        # the config names in the caller's words what the structure shows everywhere
        found[_SHOWN:] = [f"and {len(found) - _SHOWN} more places of the structure"]
    if found and structure == "check":
        advice = "mend what is given, or restore with structure='report' what fits"
        refuse(opened, [*config, *found], advice=advice)
    if config or found:
        _log.warning(
            "%s was saved from another model: %s",
            opened.name,
            list_problems(_told([*config, *found])),
        )


def refuse(opened: OpenCheckpoint, problems: list[str], *, advice: str) -> None:
    """Refuses differences, if there are any.

    Args:
        opened: The checkpoint.
        problems: The differences.
        advice: What to do about them.

    Raises:
        MismatchError: There are.
    """
    if problems:
        raise MismatchError(
            f"{opened.name} was saved from another model or optimizer: "
            f"{list_problems(_told(problems))}; {advice}"
        )


def _told(problems: list[str]) -> list[str]:
    """The problems without what a terminal would obey, none of them long: they quote
    what somebody stored."""
    return [
        (text if text.isprintable() else ascii(text)[1:-1])[:MAX_TEXT]
        for text in problems
    ]
