"""A path in a run, as loops form it from ``manager.directory``.

>>> (manager.directory / "100" / "iter").exists()
True

It names a step, an item of it, or a file of a handler. It is no path of a file system:
``os.fspath`` rejects it, as no file is there.
"""

from dataclasses import dataclass

from storesvc_client._api.run import Run
from storesvc_client.errors import NotFoundError
from storesvc_client.orbax.handler_files import list_files
from storesvc_client.orbax.step_items import read_record


@dataclass(frozen=True, slots=True)
class StepPath:
    """The run itself, or a step, an item or a file of a handler in it."""

    run: Run
    parts: tuple[str, ...] = ()
    """Step, item, and the parts of the name of a file."""

    def __truediv__(self, part: object) -> "StepPath":
        more = [each for each in str(part).split("/") if each not in ("", ".")]
        return StepPath(self.run, (*self.parts, *more))

    def __str__(self) -> str:
        address = self.run._session.connection.address  # noqa: SLF001 - for messages
        return "/".join((f"{address}#{self.run.name}", *self.parts))

    @property
    def name(self) -> str:
        """Last part; of the run its name."""
        return self.parts[-1] if self.parts else self.run.name

    @property
    def parent(self) -> "StepPath":
        """The path above; of the run itself."""
        return StepPath(self.run, self.parts[:-1])

    def joinpath(self, *parts: object) -> "StepPath":
        """Returns a path below."""
        found = self
        for part in parts:
            found = found / part
        return found

    def exists(self) -> bool:
        """Returns whether the run, the step, the item or the file is there.

        Raises:
            UnavailableError: The store does not answer.
        """
        return self._children() is not None or self._is_file()

    def is_dir(self) -> bool:
        """Returns whether there may be something below it."""
        return self._children() is not None

    def iterdir(self) -> "list[StepPath]":
        """Returns the steps of the run, the items of a step, or the files of an item.

        Raises:
            NotFoundError: It is not there, or it is a file.
        """
        children = self._children()
        if children is None:
            raise NotFoundError(f"{self}: expected a run, a step or an item, got none")
        return [self / child for child in children]

    def _children(self) -> list[str] | None:
        """Returns the names below; None if it is not there, or a file."""
        if not self.parts:
            try:
                self.run.info()
            except NotFoundError:
                return None
            return [str(step) for step in self.run.steps()]
        step, *below = self.parts
        if not (step.isascii() and step.isdecimal() and str(int(step)) == step):
            return None
        try:
            opened = self.run.open(int(step))
        except NotFoundError:
            return None
        record = read_record(opened)
        if not below:
            return [*record.parts]
        part = record.parts.get(below[0])
        if part is None or len(below) > 1:
            return None
        return self._files(below[0])

    def _is_file(self) -> bool:
        item = StepPath(self.run, self.parts[:2])
        if len(self.parts) < 3 or not item.is_dir():
            return False
        return "/".join(self.parts[2:]) in self._files(self.parts[1])

    def _files(self, item: str) -> list[str]:
        """Returns the names of the files of an item; none if it is no handler's."""
        opened = self.run.open(int(self.parts[0]))
        part = read_record(opened).parts.get(item)
        if part is None or part.kind != "files":
            return []
        archives = opened.items.per_process(part.place)
        place = f"{opened.name} item {item!r}"
        return sorted({n for data in archives for n in list_files(place, data)})
