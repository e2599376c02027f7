"""Contexts: a store has a name; an option has precedence over the environment, and that
over the context."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import storesvc_client as store
from storesvc.format.names import InvalidNameError
from storesvc_client.cli.contexts import (
    Config,
    Context,
    check_name,
    format_config,
    parse_config,
)
from tests.support.command_line import invoke, succeed


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration file, which does not exist yet."""
    path = tmp_path / "config" / "storesvc.toml"
    monkeypatch.setenv("STORESVC_CONFIG", str(path))
    return path


def refusal(*arguments: str, **environment: str) -> str:
    result = invoke(*arguments, **environment)

    assert 1 == result.exit_code, result.output
    return result.stderr.removeprefix("storectl: ").rstrip()


@pytest.fixture
def roots(tmp_path: Path) -> dict[str, Path]:
    """Three stores, each with a run of its name."""
    roots = {name: tmp_path / name for name in ("prod", "lab", "other")}
    for name, root in roots.items():
        with store.connect(root.as_uri()) as client:
            client.run(f"runs/{name}").configure(labels={"a": "b"})
    return roots


def listed(*arguments: str, **environment: str) -> list[str]:
    found = json.loads(succeed("ls", "runs", "--json", *arguments, **environment))
    return [run["name"] for run in found]


def test_the_current_context_names_the_store_of_commands(
    file: Path, roots: dict[str, Path]
) -> None:
    assert "prod (current)" in succeed(
        "config", "set", "prod", "-s", str(roots["prod"])
    )
    succeed("config", "set", "lab", "--store", roots["lab"].as_uri())

    assert ["runs/prod"] == listed()
    assert ["runs/lab"] == listed("-c", "lab")
    succeed("config", "use", "lab")
    assert ["runs/lab"] == listed()


def test_an_option_precedes_the_environment_and_that_the_context(
    file: Path, roots: dict[str, Path]
) -> None:
    succeed("config", "set", "prod", "-s", str(roots["prod"]))
    lab, other = str(roots["lab"]), str(roots["other"])

    assert ["runs/lab"] == listed(STORECTL_STORE=lab)
    assert ["runs/other"] == listed("-s", other, STORECTL_STORE=lab)
    assert ["runs/prod"] == listed("--context", "prod", STORECTL_STORE=lab)
    result = invoke("ls", "-s", other, "-c", "prod")
    assert (2, True) == (result.exit_code, "--store and --context" in result.stderr)


def test_the_list_marks_the_current_context(file: Path, tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()
    succeed("config", "set", "prod", "-s", "gs://bucket/prod")
    succeed("config", "set", "lab", "-s", "lab.example", "--ca", str(ca))

    lines = succeed("config", "list").splitlines()
    assert ["lab", "lab.example:7070", "--ca", str(ca)] == lines[1].split()
    assert ["*", "prod", "gs://bucket/prod", "-"] == lines[2].split()
    document = json.loads(succeed("config", "list", "--json"))
    assert (str(file), "prod") == (document["file"], document["current"])
    assert str(ca) == document["contexts"][0]["ca"]


def test_a_context_is_removed_unless_others_would_lose_it(
    file: Path, roots: dict[str, Path]
) -> None:
    succeed("config", "set", "prod", "-s", str(roots["prod"]))
    succeed("config", "set", "lab", "-s", str(roots["lab"]))

    assert "is the current one" in refusal("config", "remove", "prod")
    succeed("config", "remove", "lab")
    succeed("config", "remove", "prod")
    assert "no contexts" in invoke("config", "list").stderr
    assert "no context 'prod'; there are: none" in refusal("ls", "-c", "prod")


def test_only_its_owner_reads_the_file_that_is_written(
    file: Path, tmp_path: Path
) -> None:
    target = tmp_path / "dotfiles.toml"
    target.touch()
    file.parent.mkdir()
    file.symlink_to(target)

    succeed("config", "set", "prod", "-s", "/ckpts")

    assert file.is_symlink()
    assert 0o600 == target.stat().st_mode & 0o777
    assert [target.name] == [p.name for p in tmp_path.glob("*dotfiles*")]


def test_a_file_that_others_may_write_is_rejected(file: Path) -> None:
    succeed("config", "set", "prod", "-s", "/ckpts")
    file.chmod(0o620)

    assert "only its owner may write, got the mode 620" in refusal("ls")


def test_a_file_that_cannot_be_read_is_an_error_only_where_it_is_needed(
    file: Path, roots: dict[str, Path]
) -> None:
    file.mkdir(parents=True)

    assert "Is a directory" in refusal("ls")
    assert ["runs/lab"] == listed("-s", str(roots["lab"]))
    assert "Usage" in succeed("ls", "--help")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("current = \n", "at line 1"),
        ('current = "x"\n', "line 1: current: expected one of: none, got 'x'"),
        ("\nfoo = 1\n", "line 2: expected one of the keys contexts, current"),
        ("[contexts.a]\nca = '/x'\n", "line 1: expected a key store"),
        ("[contexts.a]\nstore = 7\n", "line 2: store: expected a text, got 7"),
        ("[contexts.a]\nstore='b:1'\nport=1\n", "line 3: expected one of the keys"),
        ("[contexts.a]\nstore='b:1'\nca='x'\n", "line 3: ca: expected an absolute"),
        ("[contexts.a]\nstore='b:1'\ninsecure='no'\n", "line 3: insecure: expected"),
        ("[contexts.A_b_]\nstore='b:1'\n", "line 1: context 'A_b_'"),
        ("[contexts.a]\nstore='memory://'\n", "line 2: store 'memory://'"),
        ("contexts = 1\n", "line 1: contexts: expected tables"),
        ("[contexts]\na = 1\n", "line 2: a: expected a table"),
        ("[contexts.a.b]\nstore='b:1'\n", "line 1: expected one of the keys"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_line(
    text: str, message: str, file: Path
) -> None:
    file.parent.mkdir()
    file.write_text(text)

    assert message in refusal("ls")
    assert str(file) in refusal("ls")


def test_a_file_that_is_no_utf8_is_an_error_that_names_the_line(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"# x\n# \xff\n")

    assert "line 2: expected UTF-8, got byte 0xff" in refusal("ls")


def test_certificates_go_with_servers(file: Path, tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    ca.touch()

    result = invoke("config", "set", "prod", "-s", "/ckpts", "--ca", str(ca))

    assert (2, True) == (result.exit_code, "go with a server" in result.stderr)


def test_the_file_is_below_the_configuration_home(
    tmp_path: Path, roots: dict[str, Path]
) -> None:
    environment = {"STORESVC_CONFIG": "", "XDG_CONFIG_HOME": str(tmp_path / "home")}

    succeed("config", "set", "prod", "-s", str(roots["prod"]), **environment)

    assert (tmp_path / "home" / "storesvc" / "config.toml").exists()
    assert ["runs/prod"] == listed(**environment)


def _is_name(text: str) -> bool:
    try:
        check_name(text)
    except InvalidNameError:
        return False
    return True


names = st.text("abcz09-", min_size=1, max_size=8).filter(_is_name)
files = st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1).map(
    lambda text: Path("/") / text.replace("\0", "")
)


@given(
    st.dictionaries(names, st.tuples(files, files, files, st.booleans()), max_size=3)
)
def test_a_configuration_is_read_as_it_was_written(
    found: dict[str, tuple[Path | None, Path | None, Path | None, bool]],
) -> None:
    contexts = {
        name: Context(
            name=name, store="a.example:7", ca=ca, cert=cert, key=key, insecure=insecure
        )
        for name, (ca, cert, key, insecure) in found.items()
    }
    config = Config(current=next(iter(contexts), None), contexts=contexts)

    assert config == parse_config(format_config(config), "config.toml")
