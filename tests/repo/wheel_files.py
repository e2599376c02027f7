"""``python -m tests.repo.wheel_files WHEEL``: compares a wheel with the checkout.

The tests of ``make test`` run against the checkout. They hold for what users install
because the wheel has each file of the packages, byte for byte, and no other.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final
from zipfile import ZipFile

PACKAGES: Final = (
    Path("storesvc"),
    Path("client/storesvc_client"),
    Path("proto/storesvc_proto"),
)


def main() -> int:
    """Prints the differences; returns the exit code."""
    (wheel,) = sys.argv[1:]
    found = list(differences(_packed(Path(wheel)), _of_checkout()))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


def differences(
    wheel: Mapping[str, bytes], checkout: Mapping[str, bytes]
) -> Iterator[str]:
    """Yields a line for each file that differs.

    Args:
        wheel: Content of the files of a wheel by name.
        checkout: Content of the files of the packages by their name in a wheel.
    """
    for name in sorted(wheel.keys() | checkout.keys()):
        if name not in wheel:
            yield f"{name}: expected in the wheel, found in the checkout only"
        elif name not in checkout:
            yield f"{name}: expected in the checkout, found in the wheel only"
        elif wheel[name] != checkout[name]:
            yield f"{name}: the wheel has other bytes than the checkout"


def _packed(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as packed:
        return {
            name: packed.read(name)
            for name in packed.namelist()
            if ".dist-info/" not in name
        }


def _of_checkout() -> dict[str, bytes]:
    return {
        path.relative_to(package.parent).as_posix(): path.read_bytes()
        for package in PACKAGES
        for path in package.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }


if __name__ == "__main__":
    sys.exit(main())
