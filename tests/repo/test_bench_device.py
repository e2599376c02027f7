"""The benchmark of an accelerator runs whole on the CPU, and says what is not there."""

import sys

import pytest

from benchmarks import device


def test_it_measures_saves_and_restores_against_the_link(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["device", "--mb", "20", "--rounds", "1"])

    device.main()

    title, note, *lines = capsys.readouterr().out.splitlines()
    assert "0.02 GB, medians of 1" in title
    assert note == "no accelerator: the link is a copy in memory"
    names = {line[:34].strip() for line in lines}
    assert {f"save from device, {mode}" for mode in device.MODES} <= names
    assert {"link from device", "link to device", "restore to device"} <= names


def test_what_runs_beside_the_link_is_hidden() -> None:
    seconds = {
        "link from device": [1.0],
        "save from host": [3.0],
        "save from device, none": [3.5],
    }

    line = device.table(seconds, 6).splitlines()[-1]

    # of 1 s of the link, half a second is seen
    assert ["1.71", "0.29", "0.50"] == line.split()[-3:]
