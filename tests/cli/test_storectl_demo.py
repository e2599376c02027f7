"""storectl demo: what it rejects before it trains; tests/deploy/ runs all of it."""

from click.testing import CliRunner

from storesvc_client.cli import main
from tests.support.command_line import refusal


def test_a_server_that_is_not_there_is_reported_before_anything_is_trained() -> None:
    sentence = refusal("127.0.0.1:1", "demo", "--store", "127.0.0.1:2")

    assert "127.0.0.1:2 cannot be reached" in sentence


def test_a_store_that_others_serve_is_not_kept_here() -> None:
    result = CliRunner().invoke(main, ["demo", "--store", "x:1", "--keep", "/nowhere"])

    assert 2 == result.exit_code
    assert "expected --keep or --store, not both" in result.stderr
