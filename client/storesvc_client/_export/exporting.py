"""Exports a checkpoint: parses the target, and calls its format.

A target is the name of a format, a colon, and a URL or a local path:
``orbax:gs://bucket/ckpts``, ``safetensors:/models/llama``, ``npz:weights.npz``.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from storesvc.format.keys import parse_item_key
from storesvc_client._export.elements import (
    ExportCall,
    ExportRequest,
    OrbaxLayout,
    Source,
    Written,
)
from storesvc_client._telemetry.progress import Meter
from storesvc_client._values.arguments import (
    checked_cast,
    checked_choice,
    checked_flag,
    shown,
)
from storesvc_client.errors import InvalidRequestError, PreconditionError

FORMATS: Final = ("orbax", "safetensors", "npz")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """Returned by ``OpenCheckpoint.export`` and ``Run.export``."""

    name: str
    """Name of the checkpoint, ``namespace/run@step``."""
    target: str
    """The format and the URL or path, such as "safetensors:/models/llama"."""
    files: tuple[str, ...]
    """Files written, relative to the target."""
    leaf_count: int
    """Number of exported leaves."""
    size_bytes: int
    """Bytes of their elements, as exported."""
    linked_bytes: int
    """Bytes of the data files that are hard links into the store; 0 if all bytes were
    copied."""
    copied_bytes: int
    """Bytes of the data files that the store's bucket copied itself, without a transfer
    to this process and back."""
    dropped_items: tuple[str, ...]
    """Items that ``drop_items=True`` left out, or that ``config=`` replaced."""
    seconds: float
    """Duration."""


def export_checkpoint(
    source: Source, url: str | Path, request: ExportRequest, meter: Meter
) -> ExportReport:
    """Exports the selected leaves of a checkpoint.

    Raises:
        InvalidRequestError: An argument is of another type, or belongs to another
            format.
        PreconditionError: The format would lose a leaf or an item, or the target
            exists.
        StoreError: The checkpoint could not be read, or the target not be written.
    """
    kind, where = parse_target(url)
    _check_options(f"export of {source.name}", kind, request)
    call = ExportCall(
        source=source,
        where=where,
        cast=checked_cast(f"export of {source.name}: cast=", request.cast),
        request=request,
        meter=meter,
    )
    written = _write(call, kind)
    return ExportReport(
        name=source.name,
        target=f"{kind}:{where}",
        files=written.files,
        leaf_count=len(source.rows),
        size_bytes=written.size_bytes,
        linked_bytes=written.linked_bytes,
        copied_bytes=written.copied_bytes,
        dropped_items=written.dropped_items,
        seconds=meter.seconds,
    )


def parse_target(url: object) -> tuple[str, str]:
    """Returns the format of a target, and its URL or path."""
    if not isinstance(url, str | Path):
        raise InvalidRequestError(f"export: expected a target, got {shown(url)}")
    kind, colon, where = str(url).partition(":")
    if kind not in FORMATS or not colon or not where:
        raise InvalidRequestError(
            f"export to {str(url)!r}: expected orbax:URL, safetensors:URL or npz:FILE, "
            "such as safetensors:/models/llama"
        )
    if where.startswith("///"):  # orbax:///ckpts, as the URLs of imports
        where = where.removeprefix("//")
    return kind, where


def _check_options(place: str, kind: str, request: ExportRequest) -> None:
    """Rejects options that the format has no use for."""
    checked_flag(f"{place}: drop_items=", request.drop_items)
    if request.layout is not None:
        checked_choice(f"{place}: layout=", request.layout, OrbaxLayout)
    shard = request.max_shard_bytes
    if shard is not None and (type(shard) is not int or shard < 1):
        raise InvalidRequestError(
            f"{place}: max_shard_bytes=: expected a whole number of bytes, at least 1, "
            f"got {shown(shard)}"
        )
    for name, value, kinds in (
        ("layout", request.layout, ("orbax",)),
        ("item", request.item, ("orbax",)),
        ("max_shard_bytes", shard, ("safetensors",)),
        ("config", request.config, ("safetensors",)),
    ):
        if value is not None and kind not in kinds:
            raise InvalidRequestError(
                f"{place}: {name}=: expected only for {' and '.join(kinds)}, got a "
                f"target of {kind}; leave it out"
            )


def _write(call: ExportCall, kind: str) -> Written:
    """Calls the format."""
    if kind == "orbax":
        from storesvc_client._export.orbax import write_orbax

        return write_orbax(call)
    from storesvc_client._export.model_files import read_folder, read_items
    from storesvc_client._export.safetensors import (
        is_file_target,
        write_npz,
        write_safetensors,
    )

    source, config = call.source, call.request.config
    has_folder = kind != "npz" and not is_file_target(call.where)
    written = read_items(source, call.meter) if has_folder else {}
    files, replaced = [*written.values()], tuple[str, ...]()
    if config is not None:
        place = f"export of {source.name}: config="
        if not has_folder:
            raise InvalidRequestError(
                f"{place}: expected a folder as the target, got the file {call.where}"
            )
        files, replaced = read_folder(config, place), tuple(written)
    drop_items = call.request.drop_items
    dropped = _find_dropped(source, kind, written, drop_items=drop_items)
    found = write_npz(call) if kind == "npz" else write_safetensors(call, files)
    return replace(found, dropped_items=tuple(sorted((*dropped, *replaced))))


def _find_dropped(
    source: Source, kind: str, written: Collection[str], *, drop_items: bool
) -> tuple[str, ...]:
    """Returns the items that a flat format leaves out; rejects them if they are not to
    be dropped."""
    rows = source.tree.leaves[source.tree.tree_count :] if source.is_whole else ()
    items = tuple(sorted({parse_item_key(row.key).item for row in rows} - {*written}))
    if items and not drop_items:
        raise PreconditionError(
            f"export of {source.name}: expected other items, got "
            f"{', '.join(items)}, which {kind} cannot hold here; pass drop_items=True "
            "(--drop-items) to leave them out"
        )
    return items
