"""``storectl import`` and ``storectl cp``."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import storesvc_client as store
from storesvc.format.names import InvalidNameError
from storesvc_client.cli.paths import (
    CheckpointPath,
    ContextName,
    NamespacePath,
    QualifiedPath,
    RunPath,
    StoreTarget,
    parse_qualified_path,
)
from tests.support.command_line import printed, storectl, succeed

ARRAYS: dict[str, NDArray[Any]] = {
    "model.embed": np.arange(60, dtype=np.float32).reshape(5, 12),
    "model.norm": np.ones(7, np.float16),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a safetensors file."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(ARRAYS, folder / "model.safetensors")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A store without runs."""
    uri = (tmp_path / "store").as_uri()
    store.connect(uri).close()
    return uri


@pytest.fixture
def prod(root: str) -> str:
    """The store with a run of two steps, the first of which is the best."""
    with store.connect(root) as client:
        run = client.run("prod/llama")
        for step in (1, 2):
            run.save(step, {"x": np.arange(9.0) * step}).result()
        run.tags.set("best", 1)
    return root


def test_an_import_stores_the_tree_of_the_rules(
    model: Path, root: str, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        'version = 1\n[[rules]]\nfrom = "model/{name}"\nto = "params/{name}"\n'
    )
    source = f"safetensors:{model}"

    printed(root, "import", source, "prod/m", "--map", str(rules))

    with store.connect(root) as client:
        leaves = client.run("prod/m").open(0).leaves
        assert ["params/embed", "params/norm"] == [*leaves]
    result = storectl(root, "import", source, "prod/m")
    assert "by other rules" in result.stderr


def test_an_import_prints_each_step_and_is_repeated_without_effect(
    model: Path, root: str
) -> None:
    source = f"safetensors:{model}"

    first = printed(root, "import", source, "prod/m", "--label", "team=a")
    second = printed(root, "import", source, "prod/m")

    assert first.startswith("prod/m@0: 254 B, ")
    assert "prod/m@0: was there already\n" == second
    with store.connect(root) as client:
        run = client.run("prod/m")
        assert "a" == run.checkpoint(0).labels["team"]
        found = {
            leaf.key: array for leaf, array in run.open(0).read(run.open(0).leaves)
        }
    for key, array in ARRAYS.items():
        assert array.tobytes() == found[key.replace(".", "/")].tobytes()


@pytest.mark.slow
def test_an_import_and_a_copy_name_the_run_that_they_create_or_add_to(
    model: Path, prod: str
) -> None:
    source = f"safetensors:{model}"

    created = storectl(prod, "import", source, "prod/tpyo")
    again = storectl(prod, "import", source, "prod/tpyo", "--json")
    added = storectl(prod, "import", source, "prod/llama", "--json")
    copied = storectl(prod, "cp", "prod/llama@1", "prod/other")
    copied_too = storectl(prod, "cp", "prod/llama", "prod/other")

    assert "storectl: created run prod/tpyo\n" == created.stderr
    assert "" == again.stderr
    assert (
        "storectl: added to run prod/llama, which had 2 checkpoints\n" == added.stderr
    )
    assert 0 == json.loads(added.stdout)[0]["checkpoint"]["step"]
    assert "storectl: created run prod/other\n" == copied.stderr
    assert (
        "storectl: added to run prod/other, which had 1 checkpoint\n"
        == copied_too.stderr
    )


def test_an_import_as_json_has_a_document_for_each_step(model: Path, root: str) -> None:
    text = printed(
        *(root, "import", f"safetensors:{model}", "prod/m", "--latest", "--json")
    )

    (document,) = json.loads(text)
    assert (True, 0) == (document["is_new"], document["checkpoint"]["step"])
    assert "safetensors" == document["checkpoint"]["labels"]["import.format"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nothing", "a/b"), 1, "expected FORMAT:LOCATION"),
        (("tar:/x", "a/b"), 1, "formats: "),
        (("safetensors://host/x", "a/b"), 1, "expected FORMAT:LOCATION"),
        (("safetensors:/x", "a"), 2, "expected a run"),
        (("safetensors:/x", "a/b", "--steps", "1,x"), 2, "expected steps"),
        (("safetensors:/x", "a/b", "--steps", "1", "--latest"), 2, "one of --steps"),
        (("safetensors:/no/such", "a/b"), 1, "/no/such"),
    ],
)
def test_a_wrong_import_is_an_error(
    arguments: tuple[str, ...], code: int, message: str, root: str
) -> None:
    result = storectl(root, "import", *arguments)

    assert code == result.exit_code, result.output
    assert message in result.stderr


def test_a_run_is_copied_to_another_store(prod: str, tmp_path: Path) -> None:
    lab = (tmp_path / "lab").as_uri()

    assert "holds no store" in storectl(prod, "cp", "prod/llama", f"{lab}//a/b").stderr
    first = printed(prod, "cp", "prod/llama", f"{lab}//a/b", "--create")
    second = printed(prod, "cp", "prod/llama", f"{lab}//a/b")

    assert ["a/b@1", "a/b@2"] == [line.partition(":")[0] for line in first.splitlines()]
    assert "a/b@1: was there already\na/b@2: was there already\n" == second
    with store.connect(lab) as client:
        assert 1 == client.run("a/b").checkpoint("best").step


def test_a_checkpoint_is_copied_between_contexts(
    prod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORESVC_CONFIG", str(tmp_path / "config.toml"))
    store.connect((tmp_path / "lab").as_uri()).close()
    succeed("config", "set", "prod", "-s", prod)
    succeed("config", "set", "lab", "-s", str(tmp_path / "lab"))

    text = succeed("cp", "prod:prod/llama@best", "lab:a/b", "--json")

    (document,) = json.loads(text)
    assert (1, True) == (document["checkpoint"]["step"], document["is_verified"])
    assert "a/b" in succeed("-c", "lab", "ls", "a")


def test_a_copy_within_a_store_keeps_the_bytes_of_its_tags(prod: str) -> None:
    printed(prod, "cp", "prod/llama", "prod/tuned", "--steps", "2", "--no-tags")

    with store.connect(prod) as client:
        assert [2] == client.run("prod/tuned").steps()
        assert [] == list(client.run("prod/tuned").tags.list())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prod/llama", "prod/x@3"), "expected a run as DST"),
        (("prod/llama@1", "prod/x", "--steps", "1"), "a run as SRC only"),
        (("prod/llama", "prod/x", "--no-tags", "--move-tags"), "one of --no-tags"),
        (("gs://bucket", "prod/x"), "expected a run after the store"),
        (("a/b@1:params/**", "prod/x"), "expected a run or a checkpoint"),
    ],
)
def test_a_wrong_copy_is_a_usage_error(
    arguments: tuple[str, ...], message: str, prod: str
) -> None:
    result = storectl(prod, "cp", *arguments)

    assert 2 == result.exit_code, result.output
    assert message in result.stderr


def test_a_copy_of_a_run_without_checkpoints_says_so(prod: str) -> None:
    with store.connect(prod) as client:
        client.run("prod/llama").tags.delete("best")
        for step in client.run("prod/llama").steps():
            client.run("prod/llama").delete(step)
    line = (prod, "cp", "prod/llama", "prod/other")

    assert "storectl: no checkpoints\n" == storectl(*line).stderr
    assert [] == json.loads(printed(*line, "--json"))


@pytest.mark.parametrize("command", ["ls", "gc"])
def test_a_root_that_the_system_rejects_is_an_error(
    command: str, tmp_path: Path
) -> None:
    result = storectl(f"{tmp_path}/{'x' * 300}", command)

    assert (1, "") == (result.exit_code, result.stdout)
    assert "an error of the system: File name too long; check" in result.stderr


def test_a_copy_to_the_same_run_is_rejected(prod: str) -> None:
    for target in "prod/llama", f"{prod.removeprefix('file://')}/.//prod/llama":
        result = storectl(prod, "cp", "prod/llama", target)

        assert (1, True) == (result.exit_code, "the same one" in result.stderr)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", QualifiedPath(None, NamespacePath("a"))),
        ("lab:a", QualifiedPath(ContextName("lab"), NamespacePath("a"))),
        ("a/b", QualifiedPath(None, RunPath("a/b"))),
        ("a/b@best", QualifiedPath(None, CheckpointPath("a/b", "best"))),
        ("lab:a/b@7", QualifiedPath(ContextName("lab"), CheckpointPath("a/b", 7))),
        ("/ckpts//a/b", QualifiedPath(StoreTarget("file:///ckpts"), RunPath("a/b"))),
        (
            "file:///ckpts//a/b",
            QualifiedPath(StoreTarget("file:///ckpts"), RunPath("a/b")),
        ),
        (
            "gs://b/p//a/b@1",
            QualifiedPath(StoreTarget("gs://b/p"), CheckpointPath("a/b", 1)),
        ),
        (
            "h.example//a/b",
            QualifiedPath(StoreTarget("h.example:7070"), RunPath("a/b")),
        ),
        (
            "h:7171,i:7171//a/b",
            QualifiedPath(StoreTarget("h:7171,i:7171"), RunPath("a/b")),
        ),
    ],
)
def test_a_place_has_a_store_and_a_path(text: str, expected: QualifiedPath) -> None:
    assert expected == parse_qualified_path(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "//a/b",
        "gs://b",
        "gs://b/p",
        "a/b@1:x",
        "lab:",
        "a.:a/b",
        "x//",
    ],
)
def test_a_text_that_is_no_place_is_rejected(text: str) -> None:
    with pytest.raises(InvalidNameError):
        parse_qualified_path(text)
