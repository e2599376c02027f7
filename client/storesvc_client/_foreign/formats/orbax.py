"""Checkpoints of Orbax, versions 0 and 1: managers, single steps, and single trees.

::

    ROOT/STEP/                    step of a manager: [PREFIX_]STEP, zero padded or not
      _CHECKPOINT_METADATA        JSON: times, metrics, custom metadata
      commit_success.txt          written last, where a rename is not atomic
      ITEM/_METADATA              an item that is a tree, see ``orbax_metadata.py``
      ITEM/manifest.ocdbt, d/     its arrays, or a folder for each array
      ITEM/...                    any other item, see ``orbax_items.py``

Source of the format: orbax-checkpoint 0.12, ``_src/path/step.py`` for names of steps
and unfinished ones, ``_src/metadata/`` for the files, ``_src/serialization/`` for
arrays. Leaves have the keys of the tree if an item "default" or "state" is the only
tree, else ``ITEM/...``.
"""

import re
from collections.abc import Collection, Sequence
from typing import Final

from storesvc.storage.threads import Threads
from storesvc_client._foreign.foreign_step import ForeignStep
from storesvc_client._foreign.formats.orbax_items import COMMITTED
from storesvc_client._foreign.formats.orbax_step import (
    MARKS,
    STEP_METADATA,
    TREE_METADATA,
    UNFINISHED,
    UNREADABLE,
    StepReader,
    check_is_step,
    folders_of,
    is_checkpoint,
)
from storesvc_client._foreign.location import Location
from storesvc_client._foreign.step_search import join, names_text
from storesvc_client.errors import NotFoundError, PreconditionError

_STEP: Final = re.compile(r"(?:.*_)?(\d{1,18})")
_LISTED_AT_ONCE: Final = 16
_SEARCHED: Final = 16
"""Folders among which the trees of a step without metadata are searched, and the files
of a folder that may be left over."""


def open_root(
    location: Location,
    *,
    trust_uncommitted: bool = False,
    without: Collection[str] = (),
) -> "OrbaxRoot":
    """Returns the checkpoints at a location; lists it.

    Args:
        location: A manager's directory, one step of it, or one saved tree.
        trust_uncommitted: Whether a step in a bucket without ``commit_success.txt``
            counts as finished, as one that was copied there from a file system.
        without: Names of items to leave out of each step.

    Raises:
        NotFoundError: The location holds no checkpoints of Orbax.
    """
    root = OrbaxRoot(
        location, trust_uncommitted=trust_uncommitted, without=frozenset(without)
    )
    root.check()
    return root


class OrbaxRoot:
    """The checkpoints of Orbax at a location."""

    def __init__(
        self, location: Location, *, trust_uncommitted: bool, without: frozenset[str]
    ) -> None:
        self._location = location
        self._without = without
        self._is_trusted = location.has_renames or trust_uncommitted
        self.url: str = f"orbax:{location.url}"

    def check(self) -> None:
        """Rejects a location without any step, finished or not.

        Raises:
            NotFoundError: There is none.
        """
        names = self._location.names()
        if not any(_step_of(name) is not None for name in names):
            self._folders(names)

    def steps(self) -> Sequence[int]:
        """See ``ForeignRoot``."""
        folders = self._folders(self._location.names())
        found = [(step, name) for step, each in folders.items() for name in each]
        with Threads(_LISTED_AT_ONCE) as pool:
            finished = pool.map(lambda each: self._is_finished(each[1]), found)
        rows = zip(found, finished, strict=True)
        return sorted({step for (step, _), is_finished in rows if is_finished})

    def open(self, step: int) -> ForeignStep:
        """See ``ForeignRoot``."""
        folders = self._folders(self._location.names()).get(step, [])
        finished = [folder for folder in folders if self._is_finished(folder)]
        for folder in finished:
            check_is_step(self._location, folder)
        if len(finished) > 1:
            raise PreconditionError(
                f"{self.url}: expected one folder of step {step}, got "
                f"{' and '.join(finished)}; move one of them away"
            )
        if not finished:
            what = f"an unfinished one, {folders[0]!r}" if folders else "none"
            advice = "list its steps"
            if folders and not self._is_trusted:
                advice = (
                    f"it has no {COMMITTED}: if it was copied from a file "
                    "system, accept it with trust_uncommitted=True "
                    "(--trust-uncommitted)"
                )
            raise NotFoundError(
                f"{self.url}: expected a finished step {step}, got {what}; {advice}"
            )
        return StepReader(
            self._location, finished[0], step, without=self._without
        ).read()

    def _folders(self, names: Sequence[str]) -> dict[int, list[str]]:
        """Returns the folders of each step, finished or not; "" for a location that is
        a step itself.

        Raises:
            NotFoundError: There is none.
        """
        own = self._location.url.rstrip("/").rpartition("/")[2]
        if UNFINISHED in own:
            raise NotFoundError(
                f"{self.url}: expected finished checkpoints, got one that was being "
                "written; use another one"
            )
        if not MARKS.isdisjoint(names):
            return {int(own) if own.isdecimal() and own.isascii() else 0: [""]}
        found: dict[int, list[str]] = {}
        for name in names:
            step = _step_of(name)
            if step is not None:
                found.setdefault(step, []).append(name.rstrip("/"))
        if not found and self._has_tree(names):
            return {int(own) if own.isdecimal() and own.isascii() else 0: [""]}
        if not found and not self._is_begun(names):
            raise NotFoundError(
                f"{self.url}: expected checkpoints of Orbax, folders such as 100/ or a "
                f"file {STEP_METADATA}, got {names_text(names)}; check the location "
                "and the format"
            )
        return found

    def _is_begun(self, names: Sequence[str]) -> bool:
        """Returns whether a manager has begun there, without a step so far; an item
        "metadata" of a step that lost its own metadata has the name of a folder of
        older managers."""
        below = self._location.names("metadata") if "metadata/" in names else ()
        return "_ROOT_METADATA" in below or (
            "metadata" in below and folders_of(names) == ["metadata"]
        )

    def _has_tree(self, names: Sequence[str]) -> bool:
        """Returns whether a folder without metadata is a step: one of its folders is a
        tree, and none is a checkpoint itself, as in a folder of checkpoints."""
        folders = folders_of(names)[:_SEARCHED]
        listed = [self._location.names(folder) for folder in folders]
        return any(TREE_METADATA in each for each in listed) and not any(
            is_checkpoint(self._location, folder, each)
            for folder, each in zip(folders, listed, strict=True)
        )

    def _is_finished(self, folder: str) -> bool:
        """Returns whether the writer finished a step: on a file system it renamed it,
        elsewhere it wrote a file last."""
        if not self._is_trusted:
            return self._location.size(join(folder, COMMITTED)) is not None
        return not self._location.is_local or not _is_leftover(self._location, folder)


def _is_leftover(location: Location, folder: str) -> bool:
    """Returns whether there is no file below a folder with the name of a step, as after
    a deletion or a copy that was interrupted."""
    left, listed = [folder], 0
    try:
        while left and listed < _SEARCHED:
            place = left.pop()
            names, listed = location.names(place), listed + 1
            if not all(name.endswith("/") for name in names):
                return False
            left += [join(place, name.rstrip("/")) for name in names]
    except UNREADABLE:
        return False  # opening it says why
    return not left


def _step_of(name: str) -> int | None:
    """Returns the step of a folder's name; None if it is not that of a step."""
    if not name.endswith("/") or UNFINISHED in name or not name.isascii():
        return None
    found = _STEP.fullmatch(name[:-1])
    return int(found[1]) if found else None
