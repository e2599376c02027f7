"""Decides which files of a folder are a checkpoint, and parses the index of shards."""

import re
from collections.abc import Sequence
from typing import Final

from storesvc_client._foreign.bounded_json import parse_object
from storesvc_client._foreign.step_folders import file_name, url_parts
from storesvc_client.errors import DataLossError, PreconditionError

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
_MAIN: Final = "model"
"""Name without suffix that is preferred where there are several files."""

_SHARD: Final = re.compile(r".*-[0-9]{5}-of-[0-9]{5}\.safetensors")
_CACHED: Final = "models--"


def find_file(names: Sequence[str], *, what: str) -> str | None:
    """Returns the index or the file that is the checkpoint of a folder; None if there
    is none, as in a folder whose index is not written yet.

    Args:
        names: Names in the folder.
        what: The folder, for messages.

    Raises:
        PreconditionError: Several files match.
    """
    for suffix in (INDEX_SUFFIX, SUFFIX):
        found = [
            name
            for name in names
            if name.endswith(suffix) and not _SHARD.fullmatch(name)
        ]
        if f"{_MAIN}{suffix}" in found:
            return f"{_MAIN}{suffix}"
        if len(found) > 1:
            raise PreconditionError(
                f"{what}: expected one file, or one of the name {_MAIN}{suffix}, "
                f"got {', '.join(found[:5])}; give the URL of one file"
            )
        if found:
            return found[0]
    return None


def parse_index(data: bytes, *, names: Sequence[str], what: str) -> dict[str, set[str]]:
    """Returns the names of the tensors in each file.

    Args:
        data: Contents of the index.
        names: Names in its folder.
        what: Name of the index for messages.

    Raises:
        DataLossError: It is damaged, names a file of another folder, or a file is
            missing.
    """
    weight_map = parse_object(data, what=what).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataLossError(f"{what}: expected the file of each tensor in weight_map")
    tensors: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        place = f"{what}, weight_map[{tensor[:200]!r}]"
        tensors.setdefault(file_name(file, what=place), set()).add(tensor)
    for file in tensors:
        if file not in names:
            raise DataLossError(
                f"{what}: expected the file {file!r} in the same folder, got none; "
                "copy it there, or use another checkpoint"
            )
    return tensors


def cached_revision(url: str) -> tuple[str, str] | None:
    """Returns repository and revision of a folder in a cache of Hugging Face; None if
    it is none."""
    parts = url_parts(url)[-3:]
    if len(parts) < 3 or parts[1] != "snapshots" or not parts[0].startswith(_CACHED):
        return None
    return parts[0].removeprefix(_CACHED).replace("--", "/"), parts[2]
