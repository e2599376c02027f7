"""Files of a model other than its weights: config, tokenizer, settings of generation.

They are the items of a checkpoint, or files of a directory that the caller gives. The
hub serves the same names as an export writes. Names of items have neither dots nor
slashes, and a directory has no files whose names are paths.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from storesvc.format.keys import parse_item_key
from storesvc_client._export.elements import Source
from storesvc_client._export.safetensors import TensorFile, make_tensor, read_tensors
from storesvc_client._export.target import COPY_BYTES, Target, translate_os_errors
from storesvc_client._telemetry.progress import Meter
from storesvc_client._values.messages import UNKNOWN
from storesvc_client._values.models import KINDS
from storesvc_client.errors import InvalidRequestError, PreconditionError

_ITEMS: Final = frozenset({"json", "text", "bytes"})
"""Kinds of items that are files."""

_ENDS: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Ends of names that Hugging Face's libraries read next to weights."""

_CONFIG: Final = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A file that an export writes next to the weights."""

    name: str
    size_bytes: int
    read: Callable[[], Iterator[bytes | memoryview]]
    """Yields its bytes."""

    def is_written(self, target: Target) -> bool:
        """Returns whether the target has the file, as an export that failed left it.

        Raises:
            PreconditionError: The target has another file of this name.
        """
        size = target.size(self.name)
        if size is None:
            return False
        at = 0
        if size == self.size_bytes:
            for piece in self.read():
                if target.read(self.name, at, at + len(piece)) != piece:
                    break
                at += len(piece)
        if at < size or size != self.size_bytes:
            raise PreconditionError(
                f"{target.url}/{self.name} exists, and differs; remove it, or choose "
                "another target"
            )
        return True

    def write(self, target: Target) -> None:
        """Writes the file."""
        with target.create(self.name) as file:
            for piece in self.read():
                file.write(piece)


def find_item_files(source: Source) -> Iterator[TensorFile]:
    """Yields the items that are files; each is the only tensor of its file."""
    tree = source.tree
    for row in range(tree.tree_count, len(tree.leaves)):
        leaf = tree.leaves[row]
        item, kind = parse_item_key(leaf.key), KINDS.get(leaf.kind, UNKNOWN)
        if item.process is not None or kind not in _ITEMS:
            continue
        name = item.item
        file = name
        if kind == "json" or name == "config":
            # names of items have no underscores, but files of Hugging Face do
            file = f"{name.replace('-', '_')}.json"
        elif (name, kind) == ("chat-template", "text"):
            file = "chat_template.jinja"
        tensor = make_tensor(row, leaf, name=name, dtype="uint8")
        yield TensorFile(name=file, tensors=(tensor,))


def read_items(source: Source, meter: Meter) -> dict[str, ModelFile]:
    """Returns the items that are files, by the names of the items; reads nothing."""

    def make(file: TensorFile) -> ModelFile:
        def read() -> Iterator[bytes | memoryview]:
            for _, pieces in read_tensors(source, file.tensors, meter):
                yield from pieces

        return ModelFile(name=file.name, size_bytes=file.size_bytes, read=read)

    return {file.tensors[0].name: make(file) for file in find_item_files(source)}


def read_folder(folder: str | Path, place: str) -> list[ModelFile]:
    """Returns the files of a directory that a model has next to its weights.

    Args:
        folder: The directory.
        place: For messages.

    Raises:
        InvalidRequestError: The directory has no config.
        PreconditionError: It cannot be read.
    """
    found = Path(folder)
    with translate_os_errors(str(found)):
        if not (found / _CONFIG).is_file():
            raise InvalidRequestError(
                f"{place}: expected a directory with {_CONFIG}, got {str(found)!r}"
            )
        files = sorted(each for each in found.iterdir() if _is_model_file(each))
        return [_make_copy(file, file.stat().st_size) for file in files]


def _is_model_file(file: Path) -> bool:
    name = file.name
    is_ours = name.startswith(".") or name.endswith(".index.json")
    return name.endswith(_ENDS) and not is_ours and file.is_file()


def _make_copy(file: Path, size_bytes: int) -> ModelFile:
    def read() -> Iterator[bytes | memoryview]:
        with translate_os_errors(str(file)), file.open("rb") as opened:
            while piece := opened.read(COPY_BYTES):
                yield piece

    return ModelFile(name=file.name, size_bytes=size_bytes, read=read)
