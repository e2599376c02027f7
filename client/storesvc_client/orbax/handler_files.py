"""Keeps the files that a checkpoint handler writes as one value, and brings them back.

A handler, such as Grain's, writes files into a directory. They become an archive of the
zip format, without compression and without times, so that equal files are equal bytes
and are stored once. An archive from a store is checked before anything is written: it
can neither leave the directory nor grow.
"""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from storesvc.format.keys import MAX_ENCODED_BYTES
from storesvc_client.errors import DataLossError, InvalidRequestError, MismatchError

MAX_FILES: Final = 10_000
"""Maximum files of one item; a checkpoint with more belongs into its tree."""

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""First time that a zip archive can have."""


def pack_files(place: str, folder: Path) -> bytes:
    """Returns the files below a folder as an archive.

    Args:
        place: Name of the item, for messages.
        folder: The folder.

    Raises:
        InvalidRequestError: There is something other than files, too many of them, or
            too many bytes.
    """
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    if len(paths) > MAX_FILES:
        raise InvalidRequestError(
            f"{place}: expected at most {MAX_FILES} files of its handler, got "
            f"{len(paths)}; save arrays with StandardSave"
        )
    size = 0
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for path in paths:
            name = path.relative_to(folder).as_posix()
            if path.is_symlink() or not path.is_file():
                raise InvalidRequestError(
                    f"{place}: expected files of its handler, got {name!r}, which is "
                    "something else"
                )
            size += path.stat().st_size
            if size > MAX_ENCODED_BYTES:
                raise InvalidRequestError(
                    f"{place}: expected at most {MAX_ENCODED_BYTES} bytes of its "
                    f"handler, got more at {name!r}; save arrays with StandardSave"
                )
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), path.read_bytes())
    return packed.getvalue()


def read_files(place: str, archives: Sequence[bytes]) -> dict[str, bytes]:
    """Returns the contents of the files in archives, by name.

    Args:
        place: Name of the item, for messages.
        archives: The archive of each process that saved one.

    Raises:
        DataLossError: One is no archive of ``pack_files``.
        MismatchError: Two processes saved different files of one name.
    """
    files: dict[str, bytes] = {}
    for data in archives:
        with _opened(place, data) as archive:
            for entry in _checked(place, archive):
                name, contents = entry.filename, _contents(place, archive, entry)
                if files.setdefault(name, contents) != contents:
                    raise MismatchError(
                        f"{place}: expected each process to save other files, or "
                        f"equal ones, got two at {name!r}; restore with as many "
                        "processes as saved it"
                    )
    return files


def _opened(place: str, data: bytes) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as e:
        raise _damage(place, str(e)) from e


def _checked(place: str, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Returns the entries of an archive that can be written as they are."""
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(entries) > MAX_FILES or len(set(names)) != len(names):
        raise _damage(place, "too many files, or two of one name")
    folders = {
        str(above) for name in names for above in PurePosixPath(name).parents[:-1]
    }
    for entry in entries:
        name = entry.filename
        if not _is_plain(name) or name in folders:
            raise _damage(place, f"a file {name!r}")
        is_stored = entry.compress_type == zipfile.ZIP_STORED
        if not is_stored or entry.file_size != entry.compress_size:
            raise _damage(place, f"a file {name!r} of another size")
    return entries


def _is_plain(name: str) -> bool:
    """Returns whether a name is a relative path that stays where it is written."""
    parts = name.split("/")
    return "\0" not in name and "\\" not in name and not {"", ".", ".."} & set(parts)


def _contents(place: str, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    try:
        return archive.read(entry)
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError) as e:
        raise _damage(place, str(e)) from e


def _damage(place: str, got: str) -> DataLossError:
    return DataLossError(
        f"{place}: expected the archive of a handler's files, got {got}; its writer "
        "did not follow the contract, use another checkpoint"
    )
