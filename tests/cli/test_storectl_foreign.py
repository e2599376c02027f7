"""storectl reads checkpoints of other projects where they are."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

import storesvc_client as store
from tests.support.command_line import document, printed, refusal, storectl, table

NOWHERE = "127.0.0.1:1"
"""A store that is not there: no command here needs one."""

TREE: dict[str, Any] = {
    "params": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2)},
    "step": 7,
    "empty": None,
}
CONFIG = {"layers": [1, 2]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a run of Orbax with two steps."""
    path = tmp_path_factory.mktemp("orbax") / "run@home"
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(path, options=options) as manager:
        for step in (5, 100):
            tree = {**TREE, "step": step}
            manager.save(
                step,
                args=ocp.args.Composite(
                    default=ocp.args.PyTreeSave(tree),
                    model_config=ocp.args.JsonSave(CONFIG),
                ),
                metrics={"loss": 0.5},
            )
            manager.wait_until_finished()
    return f"orbax://{path}"


def test_ls_lists_checkpoints_newest_first(run: str) -> None:
    rows = table(printed(NOWHERE, "ls", run))
    assert ["STEP", "WRITTEN", "AGE", "SIZE", "LEAVES", "loss", "LABELS"] == rows[0]
    assert [["100", "3", "0.5"], ["5", "3", "0.5"]] == [
        [row[0], row[4], row[5]] for row in rows[1:]
    ]
    assert [100] == [each["step"] for each in document(NOWHERE, "ls", run, "--limit=1")]


def test_ls_and_tree_show_leaves_and_items(run: str) -> None:
    rows = table(printed(NOWHERE, "ls", f"{run}@5:params/**"))
    assert [["params/b", "float32", "[2]"], ["params/w", "float32", "[2,3]"]] == [
        row[:3] for row in rows[1:]
    ]
    text = printed(NOWHERE, "tree", f"{run}@latest")
    assert text.startswith(f"{run}@100")
    assert "model-config" in text


def test_stat_says_that_nothing_is_verified(run: str) -> None:
    text = printed(NOWHERE, "stat", f"{run}@5")
    assert "none: unverified" in text
    assert "model-config (json" in text
    found = document(NOWHERE, "stat", f"{run}@5")
    assert (5, False, 3) == (found["step"], found["is_verified"], found["leaf_count"])
    assert "int64" == document(NOWHERE, "stat", f"{run}@5:step")["dtype"]


def test_get_writes_leaves_and_cat_an_item(run: str, tmp_path: Path) -> None:
    file = tmp_path / "leaves.npz"
    printed(NOWHERE, "get", f"{run}@5:**", "-o", str(file))
    with np.load(file) as arrays:
        np.testing.assert_array_equal(TREE["params"]["w"], arrays["params/w"])
        assert 5 == arrays["step"]
    assert CONFIG == json.loads(printed(NOWHERE, "cat", f"{run}@5:model-config"))


def test_diff_compares_the_elements_of_checkpoints_of_any_project(
    run: str, tmp_path: Path
) -> None:
    root = f"{tmp_path / 'store'}"
    with store.connect(f"file://{root}") as client:
        state = store.open_foreign(run).restore(5)
        client.run("prod/import").save(5, state, items={"other": b"1"}).result()
    text = printed(root, "diff", f"{run}@5", f"{run}@100")
    assert "1 content; 2 leaves the same" in text
    assert ["step", "content", "int64[]", "same", "1 of 1"] == table(text)[1]
    text = printed(root, "diff", f"{run}@5", "prod/import@5")
    assert "no leaf differs; 3 leaves the same; items: 1 added, 1 removed" in text
    other = f"file://{root}//prod/import@5"
    assert text == printed(NOWHERE, "diff", f"{run}@5", other)
    result = storectl(NOWHERE, "diff", other, other[:-2])
    assert "expected a checkpoint" in result.stderr
    assert 2 == result.exit_code


def test_diff_compares_the_elements_of_checkpoints_of_two_stores(
    tmp_path: Path,
) -> None:
    for name, value in ("old", 1.0), ("new", 2.0):
        with store.connect(f"file://{tmp_path}/{name}") as client:
            tree = {"same": np.ones(2), "w": np.full(2, value)}
            client.run("a/b").save(1, tree).result()
    old, new = (f"file://{tmp_path}/{name}//a/b@1" for name in ("old", "new"))
    assert "1 content; 1 leaf the same" in printed(NOWHERE, "diff", old, new)
    assert "1 content; 1 leaf the same" in printed(
        f"{tmp_path}/old", "diff", "a/b@1", new
    )


def test_what_is_absent_is_an_error_of_one_line(run: str) -> None:
    assert "expected a finished step 7, got none" in refusal(
        NOWHERE, "stat", f"{run}@7"
    )
    assert "nearest: params/w" in refusal(NOWHERE, "get", f"{run}@5:params/v")
    assert "expected checkpoints of Orbax" in refusal(NOWHERE, "ls", "orbax:/nowhere")


@pytest.mark.parametrize("command", ["rm", "gc", "du", "verify"])
def test_commands_that_change_a_store_take_no_checkpoint_of_another_project(
    command: str, run: str
) -> None:
    result = storectl(NOWHERE, command, f"{run}@5")
    assert 2 == result.exit_code
    assert "which ls, tree, stat, get, cat and diff read" in result.stderr


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a file of safetensors whose tensors have dots in their names."""
    folder = tmp_path_factory.mktemp("safetensors")
    tensors = {"a.w": np.ones(2), "a": np.zeros(3)}
    save_file(tensors, folder / "model.safetensors")
    return f"safetensors:{folder}"


def test_keep_names_makes_each_name_of_a_tensor_one_key(
    named: str, tmp_path: Path
) -> None:
    step = f"{named}@0"
    assert "'a' is also a container" in refusal(NOWHERE, "ls", step)

    found = document(NOWHERE, "ls", f"{step}:**", "--keep-names")
    assert ["a", "a.w"] == [each["key"] for each in found]
    assert [0] == [
        each["step"] for each in document(NOWHERE, "ls", named, "--keep-names")
    ]
    assert "a.w" in printed(NOWHERE, "tree", step, "--keep-names")
    assert 2 == document(NOWHERE, "stat", step, "--keep-names")["leaf_count"]
    assert 1 == document(NOWHERE, "get", f"{step}:a.w", "--keep-names")[0]["mean"]
    same = document(NOWHERE, "diff", step, step, "--keep-names")
    assert [] == same["differences"]

    root = (tmp_path / "store").as_uri()
    store.connect(root).close()
    printed(root, "import", named, "a/b", "--keep-names")
    with store.connect(root) as client:
        assert ["a", "a.w"] == list(client.run("a/b").open(0).leaves)


def test_a_step_that_was_imported_with_other_keys_is_not_skipped(
    tmp_path: Path,
) -> None:
    save_file({"a.w": np.ones(2)}, tmp_path / "model.safetensors")
    root = (tmp_path / "store").as_uri()
    store.connect(root).close()
    printed(root, "import", f"safetensors:{tmp_path}", "a/b")

    assert "import into another run" in refusal(
        root, "import", f"safetensors:{tmp_path}", "a/b", "--keep-names"
    )


@pytest.mark.parametrize(
    "command",
    ["ls", "ls a/b", "tree a/b@1", "stat a/b@1", "get a/b@1:w", "diff a/b@1 a/b@2"],
)
def test_keep_names_goes_with_safetensors_only(command: str, run: str) -> None:
    for arguments in (command.split(), ["ls", run], ["import", run, "a/b"]):
        result = storectl(NOWHERE, *arguments, "--keep-names")
        assert 2 == result.exit_code
        assert "--keep-names goes with safetensors" in result.stderr


@pytest.mark.parametrize("scheme", ["eformer", "jax", "levanter", "orbax"])
@pytest.mark.parametrize("name", ["absent", "empty", "file", "other"])
def test_a_location_without_checkpoints_is_an_error_that_says_what_is_there(
    scheme: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    got = "nothing: there is no such folder"
    if name in ("file", "other"):
        got = {"file": "a file", "other": "notes.txt"}[name]

    for command, *to in ("ls",), ("import", "prod/x", "--create"):
        text = refusal(f"{tmp_path}/s", command, f"{scheme}:{tmp_path}/{name}", *to)
        assert f"file://{tmp_path}/{name}: expected " in text
        assert f"got {got}" in text
        assert name == "file" or text.endswith("check the location and the format")
    assert not (tmp_path / "s").exists()


def test_a_missing_file_of_safetensors_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("x")

    text = refusal(NOWHERE, "ls", f"safetensors:{tmp_path}/lora.safetensors")

    assert "expected a file lora.safetensors, got model.safetensors" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "orbx:/run"), "a format of another project: eformer:, jax:"),
        (("ls", "/ckpts/run"), "the store itself goes with --store"),
        (("tree", "orbax:/run@best"), "such as orbax:/run@latest; other projects have"),
        (("cp", "orbax:/run", "prod/x"), "storectl import reads it"),
        (("cp", "prod/x", "orbax:/run"), "storectl export writes it"),
        (("config", "set", "p", "--store", "orbax:/run"), "storectl ls orbax:/run"),
    ],
)
def test_a_wrong_path_is_an_error_that_names_the_right_one(
    arguments: tuple[str, ...], message: str
) -> None:
    result = storectl(NOWHERE, *arguments)

    assert (2, "") == (result.exit_code, result.stdout)
    assert message in result.stderr


def test_an_import_of_one_step_creates_a_store_and_ls_shows_no_labels_of_it(
    run: str, tmp_path: Path
) -> None:
    root = f"{tmp_path / 'store'}"
    line = (root, "import", f"{run}@5", "prod/import", "--label", "team=a")

    assert "holds no store" in refusal(*line)
    assert printed(*line, "--create").startswith("prod/import@5: ")
    assert [["5", "orbax.item.model-config=model_config team=a"]] == [
        [row[0], row[-1]] for row in table(printed(root, "ls", "prod/import"))[1:]
    ]
    assert "import.digest" in document(root, "ls", "prod/import")[0]["labels"]


def test_names_of_other_projects_are_escaped_and_lead_nowhere(tmp_path: Path) -> None:
    names = "..\\..\\evil", "\u202egnp.exe"
    save_file({name: np.ones(2) for name in names}, tmp_path / "model.safetensors")
    url = f"safetensors:{tmp_path}@0"
    text = printed(NOWHERE, "tree", url, "--keep-names", "--json")
    assert "\u202e" not in text
    assert r"\u202egnp.exe" in text
    assert json.dumps(json.loads(text), indent=2) == text.rstrip()
    out = str(tmp_path / "x.npz")
    refused = refusal(NOWHERE, "get", f"{url}:**", "-o", out, "--keep-names")
    assert "evil: expected a name for a member of a zip file" in refused
    out = str(tmp_path / "x.safetensors")
    printed(NOWHERE, "get", f"{url}:**", "-o", out, "--keep-names")
    assert set(names) == set(load_file(out))
