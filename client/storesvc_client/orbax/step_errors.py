"""Errors about steps that are also those that callers of Orbax catch.

Example:
    try:
        manager.save(step, args=args, force=True)
    except ValueError:  # Orbax's StepAlreadyExistsError is one
        ...
"""

from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError
from orbax.checkpoint.experimental.v1.training import errors

from storesvc_client.errors import AlreadyExistsError, MismatchError, NotFoundError


class StepExistsError(
    AlreadyExistsError,
    errors.StepAlreadyExistsError,  # type: ignore[misc]  # no annotations
    StepAlreadyExistsError,  # type: ignore[misc]  # no annotations
):
    """The step is committed or deleted already; a step is written once.

    It is the ``StepAlreadyExistsError`` of both versions: a ``ValueError`` and a
    ``FileExistsError``.
    """


class StepMissingError(NotFoundError, errors.StepNotFoundError):  # type: ignore[misc]
    """There is no such step, or nothing at a path of it; Orbax raises a
    ``FileNotFoundError``."""


class TreeMismatchError(MismatchError, KeyError):
    """A target has leaves that the step lacks, or lacks some of its leaves.

    Orbax raises a ``ValueError`` (version 0) or a ``KeyError`` (version 1).
    """

    __str__ = Exception.__str__  # a KeyError would show the message in quotes


class ItemMissingError(NotFoundError, KeyError):
    """A step has no item of a name; Orbax raises a ``KeyError``."""

    __str__ = Exception.__str__  # a KeyError would show the message in quotes
