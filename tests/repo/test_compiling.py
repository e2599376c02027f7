"""Every module compiles with every Python that the machine has."""

import ast
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = ("storesvc", "storesvc_client", "storesvc_proto")

COMPILE = """
import sys, warnings
warnings.simplefilter("error")
for path in sys.stdin.read().splitlines():
    with open(path, "rb") as module:
        compile(module.read(), path, "exec")
"""


def find_modules() -> list[Path]:
    """Returns the modules of the installed packages."""
    specs = [find_spec(name) for name in PACKAGES]
    roots = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    assert len(PACKAGES) == len(roots)
    return [path for root in roots for path in sorted(root.rglob("*.py"))]


def find_pythons() -> dict[str, str]:
    """Returns a program for each version from 3.11 on: those on the PATH, and those
    installed next to this one, where version managers keep them."""
    named = [shutil.which(f"python3.{minor}") for minor in range(11, 20)]
    installed = Path(sys.base_prefix).parent.glob("*/bin/python3")
    found = {}
    for program in [*filter(None, named), *map(str, installed), sys.executable]:
        asked = "import sys; print(*sys.version_info[:3], sep='.')"
        # the shim of a version manager may have no Python behind it
        ran = subprocess.run(
            [program, "-c", asked], check=False, capture_output=True, text=True
        )
        version = ran.stdout.strip()
        if version.startswith("3.") and int(version.split(".")[1]) >= 11:
            found[version] = program
    return found


@pytest.mark.slow
def test_every_module_compiles_with_every_python_that_is_installed() -> None:
    modules = "\n".join(map(str, find_modules()))

    for version, program in find_pythons().items():
        compiled = subprocess.run(
            [program, "-c", COMPILE],
            check=False,
            input=modules,
            capture_output=True,
            text=True,
        )
        assert compiled.returncode == 0, f"{version}: {compiled.stderr}"


def test_a_docstring_is_text_that_any_compiler_can_encode() -> None:
    """Python 3.13.0 rejects one with a lone surrogate, which an escape makes."""
    rejected = []
    for path in find_modules():
        source = path.read_text()
        if r"\ud" not in source.lower():
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node) or ""
                if docstring.encode(errors="ignore").decode() != docstring:
                    rejected.append(f"{path}: {getattr(node, 'name', 'module')}")

    assert [] == rejected
