"""Differences between a wheel and the checkout are found."""

from tests.repo.wheel_files import differences

FILES = {"storesvc/__init__.py": b"a", "storesvc_client/py.typed": b""}


def test_equal_files_do_not_differ() -> None:
    assert not [*differences(FILES, dict(FILES))]


def test_missing_additional_and_changed_files_are_named() -> None:
    wheel = {"storesvc/__init__.py": b"b", "storesvc/extra.py": b""}

    assert [*differences(wheel, FILES)] == [
        "storesvc/__init__.py: the wheel has other bytes than the checkout",
        "storesvc/extra.py: expected in the checkout, found in the wheel only",
        "storesvc_client/py.typed: expected in the wheel, found in the checkout only",
    ]
