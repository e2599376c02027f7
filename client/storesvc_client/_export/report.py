"""The outcome of an export."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files that a format wrote."""

    files: tuple[str, ...]
    """Paths relative to the target."""
    size_bytes: int
    """Bytes of the elements, as exported."""
    renamed_count: int = 0
    """Number of leaves that a rule of ``rename=`` named."""
    linked_bytes: int = 0
    """Bytes of the data files that are hard links."""
    copied_bytes: int = 0
    """Bytes of the data files that the bucket copied itself."""


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
    renamed_count: int
    """Number of leaves that a rule of ``rename=`` named."""
    size_bytes: int
    """Bytes of their elements, as exported."""
    linked_bytes: int
    """Bytes of the data files that are hard links into the store; 0 if all bytes were
    copied."""
    copied_bytes: int
    """Bytes of the data files that the store's bucket copied itself, without a transfer
    to this process and back."""
    dropped_items: tuple[str, ...]
    """Items that the format cannot hold, and that ``drop_items=True`` left out."""
    seconds: float
    """Duration."""
