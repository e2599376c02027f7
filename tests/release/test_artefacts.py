"""The artefacts of a release have what they claim, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.release import artefacts
from tests.release.audit import report

pytestmark = pytest.mark.skipif(
    not (artefacts.ROOT / ".git").exists(), reason="needs the history of the repository"
)

URL = "https://example.org/maintainers/storesvc"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("dist")
    return artefacts.build_twice(Path(os.path.relpath(folder)), URL)  # as make gives it


def test_two_builds_have_the_same_bytes_and_the_wheel_has_packages_only(
    built: list[Path],
) -> None:
    sdist, wheel = sorted(built, key=lambda path: path.suffix == ".whl")

    artefacts.check_wheel(wheel)
    tops = {name.partition("/")[0] for name in artefacts.sdist_names(sdist)}
    assert {"storesvc", "client", "proto", "tests", "LICENSE", "CHANGELOG.md"} <= tops
    assert not {"build", "deploy", "requirements", ".git", ".venv"} & tops


def test_the_wheel_has_the_addresses_of_its_repository(built: list[Path]) -> None:
    (wheel,) = (path for path in built if path.suffix == ".whl")
    with ZipFile(wheel) as packed:
        (name,) = (n for n in packed.namelist() if n.endswith(".dist-info/METADATA"))
        lines = packed.read(name).decode().splitlines()

    version = artefacts.release_version()
    assert {line for line in lines if line.startswith("Project-URL: ")} == {
        f"Project-URL: Homepage, {URL}",
        f"Project-URL: Documentation, {URL}/blob/v{version}/docs/index.md",
        f"Project-URL: Changelog, {URL}/blob/v{version}/CHANGELOG.md",
        f"Project-URL: Issues, {URL}/issues",
    }


@pytest.mark.parametrize("url", ["", "git@example.org:a/b", "https://x", URL + ' "'])
def test_a_release_without_an_address_is_rejected(tmp_path: Path, url: str) -> None:
    with pytest.raises(artefacts.ReleaseError, match="make release URL=https://"):
        artefacts.build_twice(tmp_path, url)


def test_a_large_wheel_is_no_release(
    built: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artefacts, "MAX_WHEEL_BYTES", 1000)
    (wheel,) = (path for path in built if path.suffix == ".whl")

    with pytest.raises(artefacts.ReleaseError, match="at most 2 MB"):
        artefacts.check_wheel(wheel)


def test_the_sums_and_the_provenance_name_the_artefacts(
    built: list[Path],
) -> None:
    folder = built[0].parent
    artefacts.write_provenance(folder / artefacts.PROVENANCE, built, URL)
    artefacts.write_sums(folder)

    statement = json.loads((folder / artefacts.PROVENANCE).read_text())
    digests = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    assert {path.name: artefacts.sha256(path) for path in built} == digests
    checked = subprocess.run(
        ["sha256sum", "--check", artefacts.SUMS],
        cwd=folder,
        capture_output=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_a_folder_with_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "old").touch()

    done = subprocess.run(
        [sys.executable, "-m", "tests.release.artefacts", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=artefacts.ROOT,
    )

    assert (2, f"{tmp_path}: expected an empty folder\n") == (
        done.returncode,
        done.stderr,
    )


def test_the_changelog_has_the_version() -> None:
    changelog = (artefacts.ROOT / "CHANGELOG.md").read_text()

    assert f"\n## [{artefacts.release_version()}]" in changelog


def test_an_audit_without_a_database_says_so() -> None:
    skipped = {"name": "a", "version": "1", "skip_reason": "not found"}
    flaw = {"id": "CVE-1", "fix_versions": ["2"]}
    found = {"name": "b", "version": "1", "vulns": [flaw]}

    assert "cannot be reached" in report([skipped])[0][0]
    assert report([skipped, found]) == (
        [
            "b 1: CVE-1, fixed in 2",
            "1 packages audited, 1 vulnerabilities, 1 not known there",
        ],
        1,
    )
