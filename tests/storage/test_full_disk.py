"""A full disk: the commands in the error message free space."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import storesvc_client as store
from storesvc_client.cli import main
from tests.support.server_process import ServerProcess
from tests.support.small_disk import small_disk

DISK_BYTES = 48 << 20
STATE_BYTES = 10 << 20

SLOW = pytest.mark.slow


def state(step: int) -> dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return {"x": np.random.default_rng(step).integers(1 << 62, size=STATE_BYTES // 8)}


def fill(run: store.Run) -> tuple[int, str]:
    """Returns the first step that does not fit, and the error."""
    step = 0
    while True:
        try:
            run.save(step, state(step)).result()
        except store.LimitError as e:
            assert "STORAGE_FULL" == e.reason
            return step, str(e)
        step += 1


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("served", marks=SLOW),
        pytest.param("direct", marks=SLOW),
        "embedded",
    ],
)
def test_the_commands_that_the_error_names_free_space(
    tmp_path: Path, start_server: Callable[..., ServerProcess], way: str
) -> None:
    with small_disk(tmp_path / "disk", size_bytes=DISK_BYTES) as disk:
        root = disk / "store"
        if way == "embedded":
            target, direct = root.as_uri(), None
        else:
            target = start_server(root=root).address
            direct = root.as_uri() if way == "direct" else None
        with store.connect(target, direct=direct) as client:
            run = client.run("prod/full")
            step, text = fill(run)
            # a save that was killed holds the rest of the space
            uploads = [each.id for each in run.uploads.list()]

            commands = re.findall(r"'storectl ([^']+)'", text)
            assert 3 == len(commands), text
            rm, abort, gc = (line.split() for line in commands)
            lines = [[word.replace("RUN@STEP", "prod/full@0") for word in rm]]
            for upload in uploads:
                given = {"RUN": "prod/full", "UPLOAD": upload}
                lines.append([given.get(word, word) for word in abort])
            for line in [*lines, gc]:
                result = CliRunner().invoke(main, ["-s", target, *line])
                assert 0 == result.exit_code, result.output

            run.save(step, state(step)).result()
            kept = run.restore(step)
        assert np.array_equal(state(step)["x"], kept["x"])
