"""Errors about steps that are also those that callers of Orbax catch.

Example:
    try:
        manager.save(step, args=args, force=True)
    except ValueError:  # Orbax's StepAlreadyExistsError is one
        ...
"""

from storesvc_client.errors import AlreadyExistsError, NotFoundError


class StepExistsError(AlreadyExistsError, FileExistsError, ValueError):
    """The step is committed or deleted already; a step is written once.

    Orbax raises a ``ValueError`` (version 0) or a ``FileExistsError`` (version 1).
    """


class StepMissingError(NotFoundError, FileNotFoundError):
    """There is no such step, or nothing at a path of it; Orbax raises a
    ``FileNotFoundError``."""


class ItemMissingError(NotFoundError, KeyError):
    """A step has no item of a name; Orbax raises a ``KeyError``."""

    __str__ = Exception.__str__  # a KeyError would show the message in quotes
