"""What a store holds on its disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def files(root: Path) -> dict[str, bytes]:
    """Returns every file below a root."""
    return {str(p): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@contextmanager
def unchanged(root: Path) -> Iterator[None]:
    """Holds that a block leaves every file as it was."""
    before = files(root)
    yield
    assert before == files(root)
