"""The files of other projects are those that their list names."""

from tests.console.vendored import LIST, STATIC, entries, sum_of

OURS = {"console.css", "console.js", "icon.svg", LIST.name}


def test_each_vendored_file_has_the_sum_of_the_list() -> None:
    for entry in entries():
        content = (STATIC / entry["path"]).read_bytes()

        assert entry["sha256"] == sum_of(content), entry["path"]


def test_every_file_is_ours_or_in_the_list() -> None:
    listed = {entry["path"] for entry in entries()}

    assert OURS | listed == {file.name for file in STATIC.iterdir()}


def test_no_file_names_a_source_map_or_another_site() -> None:
    for file in STATIC.glob("*.*s"):
        text = file.read_text()

        assert "sourceMappingURL" not in text
        assert "@import" not in text


def test_all_files_together_stay_small() -> None:
    assert sum(file.stat().st_size for file in STATIC.iterdir()) < 140_000
