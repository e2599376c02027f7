"""Shells complete paths, tags, contexts and fields from a store."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import storesvc_client as store
from storesvc_client.cli.completion import (
    TIMEOUT,
    next_parts,
    parse_line,
    quote_value,
)
from tests.cli.zsh_line import zsh_line

COMMAND = f"{sys.executable} -m storesvc_client.cli"

HOSTILE = "it's $(touch pwned)"

SHELL = """\
storectl() {{ {command} "$@"; }}
eval "$(_STORECTL_COMPLETE=bash_source storectl)"
compopt() {{ echo "compopt $*"; }}
for COMP_LINE in "$@"; do
    COMP_POINT=${{#COMP_LINE}}
    echo "> $COMP_LINE"
    _storectl_completion storectl
    printf '%s\\n' "${{COMPREPLY[@]}}"
done
"""


@pytest.fixture(scope="module")
def address(server_address: str) -> str:
    """The address of a server with two runs."""
    with store.connect(server_address) as client:
        run = client.run("prod/llama-8b")
        tree = {
            "params": {"layer_10": np.ones(1), "layer_9": np.ones(1)},
            HOSTILE: np.ones(1),
            "a b": np.ones(1),
        }
        items = {"config": {"layers": 2}}
        run.save(100, tree, metrics={"loss": 2.5}, items=items).result()
        run.save(200, tree, labels={"stage": "final"}).result()
        run.save(300, tree).result()
        run.delete(300)
        run.tags.set("best", 100)
        client.run("test/other").save(1, tree).result()
    return server_address


@pytest.fixture(scope="module")
def metrics(address: str) -> str:
    """The same server, with a run whose metrics and labels need quotes."""
    with store.connect(address) as client:
        run = client.run("prod/quoted")
        metrics = {"loss": 1.0, "eval loss": 2.0, "a:b": 3.0}
        run.save(1, {"x": np.ones(1)}, metrics=metrics, labels={"it's": "x"}).result()
    return address


def completed(
    *lines: str, store_: str, config: Path | None = None
) -> dict[str, list[str]]:
    """Returns what bash gets for each command line, with the cursor at its end."""
    environment = {**os.environ, "STORECTL_STORE": store_}
    if config:
        environment["STORESVC_CONFIG"] = str(config)
    bash = shutil.which("bash")
    assert bash
    script = SHELL.format(command=COMMAND)
    for _ in range(3):
        began = time.monotonic()
        result = subprocess.run(
            [bash, "--norc", "-c", script, "bash", *lines],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        # a shell does not wait longer for a slow machine, and gets what was found
        if time.monotonic() - began < TIMEOUT * len(lines):
            break
    assert "" == result.stderr
    found: dict[str, list[str]] = {}
    for line in result.stdout.splitlines():
        if line.startswith("> "):
            found[line[2:]] = []
        elif line and not line.startswith("compopt"):
            found[[*found][-1]].append(line)
    return found


# --- bash -------------------------------------------------------------------------


@pytest.mark.slow
def test_bash_completes_a_tag_after_the_sign_where_readline_divides_words(
    address: str,
) -> None:
    line = "storectl ls prod/llama-8b@b"

    assert {line: ["best"]} == completed(line, store_=address)


@pytest.mark.slow
def test_bash_completes_a_path_part_by_part(address: str) -> None:
    assert {
        "storectl ls ": ["prod/", "test/"],
        "storectl ls pr": ["prod/"],
        "storectl tree prod/": ["prod/llama-8b@"],
        "storectl retain prod/": ["prod/llama-8b"],
        "storectl ls prod/llama-8b@": ["latest", "best", "200", "100"],
        "storectl ls 'prod/llama-8b@b": ["prod/llama-8b@best"],
        "storectl get prod/llama-8b@best:pa": ["params/"],
        "storectl get prod/llama-8b@best:params/": [
            "params/layer_9",
            "params/layer_10",
        ],
    } == completed(
        "storectl ls ",
        "storectl ls pr",
        "storectl tree prod/",
        "storectl retain prod/",
        "storectl ls prod/llama-8b@",
        "storectl ls 'prod/llama-8b@b",
        "storectl get prod/llama-8b@best:pa",
        "storectl get prod/llama-8b@best:params/",
        store_=address,
    )


@pytest.mark.slow
def test_bash_completes_what_a_command_accepts(address: str) -> None:
    found = completed(
        "storectl rm prod/llama-8b@",
        "storectl undelete prod/llama-8b@",
        "storectl cat prod/llama-8b@100:",
        "storectl tag prod/llama-8b ",
        "storectl quota ",
        "storectl ls prod/llama-8b --sort lo",
        "storectl ls prod/llama-8b --where=st",
        "storectl ls prod/llama-8b@100 --sort s",
        store_=address,
    )

    assert [
        ["200", "100"],
        ["300"],
        ["config"],
        ["best"],
        ["prod", "test"],
        ["loss"],
        ["step", "stored", "stage"],
        ["shape", "size"],
    ] == [*found.values()]


@pytest.mark.slow
def test_names_of_metrics_are_quoted_where_a_condition_needs_it(metrics: str) -> None:
    found = completed(
        "storectl ls prod/quoted --where ev",
        "storectl ls prod/quoted --where '\"ev",
        "storectl ls prod/quoted --where=ev",
        "storectl ls prod/quoted --sort ev",
        "storectl ls prod/quoted --where it",
        'storectl ls prod/quoted --where \\"it',
        store_=metrics,
    )

    assert [
        ['\\"eval\\ loss\\"'],
        ['"eval loss"'],
        ['\\"eval\\ loss\\"'],
        ["eval\\ loss"],
        ["items"],
        ['\\"it\\\'s\\"'],
    ] == [*found.values()]


# --- zsh --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_zsh_completes_lines(address: str, metrics: str, tmp_path: Path) -> None:
    assert address == metrics
    lines = {
        "storectl undel": "storectl undelete ",
        "storectl ls pro": "storectl ls prod/",
        "storectl ls prod/ll": "storectl ls prod/llama-8b",
        "storectl tag prod/llama-8b be": "storectl tag prod/llama-8b best ",
        "storectl get prod/llama-8b@100:it": (
            r"storectl get prod/llama-8b@100:it\'s\ \$\(touch\ pwned\) "
        ),
        "storectl get 'prod/llama-8b@100:a": "storectl get 'prod/llama-8b@100:a b' ",
        "storectl ls prod/quoted --where ev": (
            r"storectl ls prod/quoted --where \"eval\ loss\" "
        ),
        "storectl ls prod/quoted --where=ev": (
            r"storectl ls prod/quoted --where=\"eval\ loss\" "
        ),
        "storectl ls prod/quoted --where '\"ev": (
            "storectl ls prod/quoted --where '\"eval loss\"' "
        ),
        "storectl ls prod/quoted --sort=los": "storectl ls prod/quoted --sort=loss ",
        "storectl ls prod/quoted --where it": (
            "storectl ls prod/quoted --where items "
        ),
    }
    with zsh_line(tmp_path, address) as zsh:
        assert lines == {line: zsh.completed(line) for line in lines}


# --- quotes -----------------------------------------------------------------------


@pytest.mark.slow
def test_a_key_from_a_store_is_quoted_for_the_shell(address: str) -> None:
    bare, single, double = completed(
        "storectl get prod/llama-8b@100:",
        "storectl get 'prod/llama-8b@100:",
        'storectl get "prod/llama-8b@100:',
        store_=address,
    ).values()

    assert ["a\\ b", "it\\'s\\ \\$\\(touch\\ pwned\\)", "params/"] == bare
    assert ["prod/llama-8b@100:a b", "prod/llama-8b@100:params/"] == single
    assert "prod/llama-8b@100:it's \\$(touch pwned)" in double
    (line,) = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {bare[1]}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert HOSTILE == line


@pytest.mark.slow
def test_contexts_are_completed_and_used(address: str, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[contexts.lab]\nstore = "{address}"\n')
    config.chmod(0o600)

    found = completed(
        "storectl -c ",
        "storectl ls -c l",
        "storectl config use ",
        "storectl -c lab ls pr",
        "storectl ls -c lab pr",
        "storectl cp la",
        "storectl cp lab:pr",
        store_="127.0.0.1:1",
        config=config,
    )

    assert [
        *(["lab"], ["lab"], ["lab"], ["prod/"]),
        *(["prod/"], ["lab:"], ["prod/"]),
    ] == [*found.values()]


@pytest.mark.slow
def test_an_error_completes_nothing_and_prints_nothing(address: str) -> None:
    lines = (
        "storectl -s bad:// ls ",
        "storectl ls Not/A/Run@",
        "storectl ls prod/nothing@",
        "storectl ls prod/llama-8b@7:",
        "storectl ls orbax:/",
        "storectl -c nowhere ls ",
    )

    assert {line: [] for line in lines} == completed(*lines, store_=address)


@pytest.mark.slow
def test_a_server_that_never_answers_completes_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        assert {"storectl ls ": []} == completed("storectl ls ", store_=address)


def test_other_shells_get_descriptions(address: str) -> None:
    environment = {
        **os.environ,
        "STORECTL_STORE": address,
        "_STORECTL_COMPLETE": "zsh_complete",
        "COMP_WORDS": "storectl ls prod/llama-8b@",
        "COMP_CWORD": "2",
    }
    run = subprocess.run(
        COMMAND.split(), capture_output=True, text=True, check=True, env=environment
    )

    lines = run.stdout.splitlines()
    assert ["part", "prod/llama-8b@latest", "_"] == lines[:3]
    assert "prod/llama-8b@best" in lines


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_names_its_instruction(shell: str) -> None:
    environment = {**os.environ, "_STORECTL_COMPLETE": f"{shell}_source"}
    run = subprocess.run(
        COMMAND.split(), capture_output=True, text=True, check=True, env=environment
    )

    assert f"_STORECTL_COMPLETE={shell}_complete" in run.stdout


@pytest.mark.slow
def test_a_completion_of_a_server_imports_no_jax_and_no_server(address: str) -> None:
    program = (
        "import os, sys\n"
        "os.environ['_STORECTL_COMPLETE'] = 'fish_complete'\n"
        "os.environ['COMP_WORDS'] = 'storectl ls pr'\n"
        "os.environ['COMP_CWORD'] = 'pr'\n"
        "from storesvc_client.cli import main\n"
        "try:\n"
        "    main(['ls'], prog_name='storectl')\n"
        "finally:\n"
        "    print(*sys.modules)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "STORECTL_STORE": address},
    )

    candidates, modules = run.stdout.splitlines()
    assert "plain,prod/" == candidates
    assert set() == set(modules.split()) & {"jax", "numpy", "rich", "tensorstore"}


# --- words ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "text", "quote", "replaced"),
    [
        ("storectl ls ", "", "", ""),
        ("storectl ls prod/x@la", "prod/x@la", "", "la"),
        ("storectl ls prod/x@1:a/b", "prod/x@1:a/b", "", "a/b"),
        ("storectl ls 'prod/x@1:a", "prod/x@1:a", "'", "prod/x@1:a"),
        ('storectl ls "prod/x@1:a b', "prod/x@1:a b", '"', "prod/x@1:a b"),
        ("storectl ls prod/x@'la", "prod/x@la", "'", "la"),
        ("storectl ls 'prod/x'@la", "prod/x@la", "", "la"),
        ("storectl ls a\\ b\\:c", "a b:c", "", "a b:c"),
        ("storectl ls --sort=lo", "--sort=lo", "", "lo"),
        ("storectl ls x\\", "x", "", "x"),
    ],
)
def test_the_word_at_the_cursor_is_the_one_that_readline_replaces(
    line: str, text: str, quote: str, replaced: str
) -> None:
    typed = parse_line(line, " \t\n\"'@><=;|&(:")

    assert ("storectl", "ls") == typed.words
    assert (text, quote, replaced) == (
        *(typed.text, typed.quote),
        typed.text[typed.replaced_from :],
    )


@pytest.mark.parametrize(
    ("value", "quote", "expected"),
    [
        ("a-b_c.d/e@1:f", "", "a-b_c.d/e@1:f"),
        ("a b;c", "", "a\\ b\\;c"),
        ("ünï", "", "ünï"),
        ("a'b", "'", None),
        ("a b", "'", "a b"),
        ('a"$b`', '"', 'a\\"\\$b\\`'),
        ("a!", '"', None),
        ("a!", "", "a\\!"),
    ],
)
def test_a_value_is_typed_as_its_quotes_require(
    value: str, quote: str, expected: str | None
) -> None:
    assert expected == quote_value(value, quote)


def test_keys_are_completed_up_to_the_next_slash() -> None:
    keys = ["params/a/b", "params/a/c", "params/d", "step"]

    assert {"params/"} == next_parts(keys, "p")
    assert {"params/a/", "params/d"} == next_parts(keys, "params/")
    assert {"params/", "step"} == next_parts(keys, "")
    assert set() == next_parts(keys, "x")
