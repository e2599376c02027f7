"""storectl and damaged records: what is whole is still listed, chosen and named."""

from pathlib import Path

import pytest

import storesvc_client as store
from tests.support.command_line import storectl
from tests.support.saved_checkpoint import flip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store in which the records of a run and of two checkpoints are damaged."""
    place = tmp_path_factory.mktemp("damaged") / "store"
    with store.connect(place.as_uri()) as client:
        for step in range(6):
            metrics = {"loss": 3.0 - step}
            client.run("prod/llama").save(step, {"x": [1]}, metrics=metrics).result()
        client.run("prod/whole").save(0, {"x": [1]}).result()
        client.run("prod/other").save(0, {"x": [1]}).result()
        client.run("prod/other").configure(labels={"a": "b"})
    for step in (0, 4):
        (record,) = (place / "data/prod/llama/checkpoints").glob(f"*{step}.binpb")
        flip(record, -1)
    flip(place / "runs/prod/other.binpb", -1)
    return place.as_uri()


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (("--sort", "loss", "--limit", "1"), ["5"]),
        (("--sort", "-loss", "--limit", "2"), ["1", "2"]),
        (("--where", "loss<1", "--limit", "9"), ["5", "3"]),
    ],
)
def test_damaged_records_take_no_place_among_the_chosen(
    root: str, arguments: tuple[str, ...], steps: list[str]
) -> None:
    result = storectl(root, "ls", "prod/llama", *arguments)

    assert [line.split()[0] for line in result.stdout.splitlines()[1:]] == steps
    assert result.exit_code == 1
    assert result.stderr.count("is damaged") == 2


def test_a_suggestion_needs_no_whole_store(root: str) -> None:
    result = storectl(root, "ls", "pord")

    assert "did you mean prod?" in result.stderr


def test_a_namespace_is_shown_in_spite_of_a_damaged_run(root: str) -> None:
    result = storectl(root, "du", "prod")

    assert "prod/whole" in result.stdout
    assert "runs/prod/other.binpb" in result.stderr


def test_names_from_a_store_do_not_control_a_terminal(tmp_path: Path) -> None:
    root = (tmp_path / "store").as_uri()
    with store.connect(root) as client:
        labels = {"loss\x1b]0;owned\x07": "1"}
        client.run("p/r").save(0, {"x": [1]}, labels=labels).result()

    result = storectl(root, "ls", "p/r", "--where", "loss0owned=1")

    assert "did you mean loss" in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize("condition", ["step<", "step>=", "size>", "loss=", "step!="])
def test_a_number_of_any_length_is_compared_or_named(root: str, condition: str) -> None:
    where = condition + "9" * 400
    result = storectl(root, "ls", "prod/llama", "--where", where)

    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.stderr
