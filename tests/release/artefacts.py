"""``python -m tests.release.artefacts FOLDER [URL]``: all of a release but the upload.

Builds the sdist and the wheel of the last commit twice, at its version without
".dev..." and with the address of its repository, which must give the same bytes, checks
them, and writes next to them what a user can check them with: ``SHA256SUMS``, an SBOM
of the locked server (CycloneDX 1.6, https://cyclonedx.org/docs/1.6/json/) and a
provenance statement (https://slsa.dev/spec/v1.0/provenance, in-toto Statement v1, not
signed). ``make release`` calls it with the tools of requirements/release.lock.
"""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Final
from zipfile import ZipFile

ROOT: Final = Path(__file__).parents[2]

MAX_WHEEL_BYTES: Final = 2_000_000

SBOM: Final = "storesvc.cdx.json"
SUMS: Final = "SHA256SUMS"
PROVENANCE: Final = "provenance.json"

_PACKAGES: Final = ("storesvc/", "storesvc_client/", "storesvc_proto/")


class ReleaseError(Exception):
    """A release that must not be uploaded."""


def main() -> int:
    """Makes the artefacts in a folder; returns the exit code."""
    folder, url = Path(sys.argv[1]), "".join(sys.argv[2:]) or origin()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        print(f"{folder}: expected an empty folder", file=sys.stderr)
        return 2
    try:
        built = build_twice(folder, url)
        check_wheel(next(path for path in built if path.suffix == ".whl"))
        _run("-m", "twine", "check", "--strict", *map(str, built))
        write_sbom(folder / SBOM)
        write_provenance(folder / PROVENANCE, built, url)
        write_sums(folder)
    except ReleaseError as e:
        print(f"no release: {e}", file=sys.stderr)
        return 1
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size:>9,}  {path.name}")
    print(f"\nTag v{release_version()}, then upload {', '.join(_names(built))}.")
    return 0


def release_version() -> str:
    """Returns the version that is released next: that of the tree, without ".dev...".

    A development version stays in the tree, because only such a version can be started
    with failpoints, which tests do.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"]).partition(".dev")[0]


def origin() -> str:
    """Returns the address of the remote repository "origin"; "" without one."""
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().removesuffix(".git")


def project_urls(url: str) -> str:
    """Returns the table ``[project.urls]`` of a repository on GitHub or GitLab.

    It is not in the tree, because a fork releases under an address of its own.

    Raises:
        ReleaseError: The address is not one that a browser opens.
    """
    if not re.fullmatch(r"https://[^\s\"\\/]+(/[^\s\"\\/]+)+", url):
        raise ReleaseError(
            f"expected the address of the repository, got {url!r}: make release "
            "URL=https://HOST/OWNER/NAME"
        )
    tagged = f"{url}/blob/v{release_version()}"
    pages = {
        "Homepage": url,
        "Documentation": f"{tagged}/docs/index.md",
        "Changelog": f"{tagged}/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }
    lines = "".join(f'{name} = "{page}"\n' for name, page in pages.items())
    return f"\n[project.urls]\n{lines}"


def build_twice(folder: Path, url: str) -> list[Path]:
    """Builds the sdist and the wheel; returns their paths.

    Raises:
        ReleaseError: The second build has other bytes than the first, or the address of
            the repository is not valid.
    """
    urls = project_urls(url)
    built = _build(folder, urls)
    with tempfile.TemporaryDirectory() as second:
        again = _build(Path(second), urls)
        for one, other in zip(built, again, strict=True):
            if one.name != other.name or one.read_bytes() != other.read_bytes():
                raise ReleaseError(f"{one.name}: two builds have different bytes")
    return built


def _build(folder: Path, urls: str) -> list[Path]:
    """Builds from the files of the last commit, in a folder of their own."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": _git("log", "-1", "--format=%ct")}
    with tempfile.TemporaryDirectory() as sources:
        packed = subprocess.run(
            ["git", "-C", str(ROOT), "archive", "HEAD"], capture_output=True, check=True
        )
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as files:
            files.extractall(sources, filter="data")
        settings = Path(sources, "pyproject.toml")
        text = settings.read_text()
        version = f'version = "{release_version()}"'
        text = re.sub(r'(?m)^version = ".*"$', version, text, count=1)
        settings.write_text(text + urls)
        done = subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-d", str(folder.resolve())],
            cwd=sources,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise ReleaseError(f"the build failed:\n{done.stderr}")
    return sorted(path for path in folder.iterdir() if path.suffix in (".whl", ".gz"))


def check_wheel(wheel: Path) -> None:
    """Checks the contents of a wheel.

    Raises:
        ReleaseError: It is too large, or has files of other folders.
    """
    size_bytes = wheel.stat().st_size
    if size_bytes > MAX_WHEEL_BYTES:
        raise ReleaseError(f"{wheel.name}: {size_bytes:,} bytes, at most 2 MB expected")
    with ZipFile(wheel) as packed:
        others = [
            name
            for name in packed.namelist()
            if not name.startswith(_PACKAGES) and ".dist-info/" not in name
        ]
    if others:
        raise ReleaseError(f"{wheel.name}: expected packages only, got {others}")


def write_sbom(path: Path) -> None:
    """Writes the bill of materials of the locked server."""
    lock = ROOT / "requirements" / "server.lock"
    _run(
        *("-m", "cyclonedx_py", "requirements", str(lock)),
        *("--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library"),
        *("--sv", "1.6", "--of", "JSON", "--output-reproducible", "-o", str(path)),
    )


def write_provenance(path: Path, built: list[Path], url: str) -> None:
    """Writes the statement from which sources the artefacts were built."""
    commit = _git("rev-parse", "HEAD")
    lock = ROOT / "requirements" / "wheel.lock"
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": one.name, "digest": {"sha256": sha256(one)}} for one in built
        ],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "https://peps.python.org/pep-0517/",
                "externalParameters": {
                    "backend": "hatchling",
                    "version": release_version(),
                    "url": url,
                },
                "resolvedDependencies": [
                    {"name": "sources", "digest": {"gitCommit": commit}},
                    {"name": lock.name, "digest": {"sha256": sha256(lock)}},
                ],
            },
            "runDetails": {"builder": {"id": "make release"}},
        },
    }
    path.write_text(json.dumps(statement, indent=2) + "\n")


def write_sums(folder: Path) -> None:
    """Writes the digests of all files of a folder, as ``sha256sum --check`` reads."""
    lines = [f"{sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(lines))


def sha256(path: Path) -> str:
    """Returns the digest of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sdist_names(sdist: Path) -> list[str]:
    """Returns the names of the files of an sdist, below its folder."""
    with tarfile.open(sdist) as packed:
        return [name.partition("/")[2] for name in packed.getnames()]


def _names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def _run(*arguments: str) -> None:
    """Runs a tool of the release.

    Raises:
        ReleaseError: It failed; the message has its output.
    """
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{arguments[1]} failed:\n{done.stdout}{done.stderr}")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
