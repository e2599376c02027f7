"""Content of a store is data: it is never executed."""

import ast
import inspect
from importlib import import_module
from pkgutil import walk_packages

import storesvc
import storesvc_client

FORBIDDEN_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "import_module"}
# They import modules of their own by names in their source.
ALLOWED = {
    ("storesvc_client", "import_module"),
    ("storesvc_client._api.client", "import_module"),
    ("storesvc_client._foreign.mount", "import_module"),
    ("storesvc_client.cli.group", "import_module"),
    ("storesvc_client.orbax", "import_module"),
}

MODULES = [
    name
    for package in (storesvc, storesvc_client)
    for name in (
        package.__name__,
        *(m.name for m in walk_packages(package.__path__, f"{package.__name__}.")),
    )
    if not name.endswith("__main__")
]


def test_no_module_unpickles_evaluates_or_imports_by_name() -> None:
    found = set()
    for name in MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(import_module(name)))):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {a.name.partition(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Call):
                called = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if called in FORBIDDEN_CALLS and ast.unparse(node.func) != "re.compile":
                    found.add((name, called))
            found |= {(name, what) for what in names & FORBIDDEN_IMPORTS}

    assert ALLOWED == found
