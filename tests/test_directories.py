"""Directories: made durable once, and known for as long as there is room."""

import asyncio
from pathlib import Path

from storesvc import directories
from storesvc.directories import Directories


def test_what_is_known_of_directories_is_bounded(tmp_path: Path) -> None:
    async def main() -> None:
        kept = Directories(tmp_path)
        for first in range(0, directories.KEPT + 1000, 500):
            await kept.make(*(f"{n}/file" for n in range(first, first + 500)))

        assert directories.KEPT == len(kept._synced)
        assert (tmp_path / "0").is_dir()

    asyncio.run(main())


def test_a_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    async def main() -> None:
        kept = Directories(tmp_path)
        await kept.make("a/b/file")
        await kept.remove_empty("a/")
        assert not (tmp_path / "a").exists()

        await kept.make("a/b/file")

        assert (tmp_path / "a/b").is_dir()

    asyncio.run(main())
