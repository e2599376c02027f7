"""Parses pictures, and checks what holds of each of them."""

import re
from typing import Final
from xml.etree import ElementTree as ET

from storesvc_client._pictures.svg import text_width

SVG: Final = "{http://www.w3.org/2000/svg}"

HOSTILE: Final = "</svg><script>alert(1)</script>\"'&\x07\u202e\ud800"
"""A name with markup, a control character, an override and half of a pair."""


def parsed(svg: str) -> ET.Element:
    """Returns the root of a picture that is safe and whose parts are in its frame."""
    root = ET.fromstring(svg)
    assert f"{SVG}svg" == root.tag
    assert "img" == root.attrib["role"]
    assert root.attrib["aria-label"]
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {
        "svg",
        "title",
        "rect",
        "text",
        "line",
        "circle",
        "path",
        "polyline",
    }
    for element in root.iter():
        assert "style" not in element.attrib
        assert not any(name.startswith(("on", "{")) for name in element.attrib)
        for left, top, right, bottom in boxes(element):
            assert -0.01 <= left <= right <= width + 0.01, element.attrib
            assert -0.01 <= top <= bottom <= height + 0.01, element.attrib
    return root


def boxes(element: ET.Element) -> list[tuple[float, float, float, float]]:
    """Returns the places that an element takes: left, top, right, bottom."""
    at = element.attrib
    match element.tag.removeprefix(SVG):
        case "rect":
            x, y = float(at["x"]), float(at["y"])
            return [(x, y, x + float(at["width"]), y + float(at["height"]))]
        case "circle":
            x, y, r = (float(at[name]) for name in ("cx", "cy", "r"))
            return [(x - r, y - r, x + r, y + r)]
        case "line":
            xs, ys = (
                sorted((at["x1"], at["x2"]), key=float),
                sorted((at["y1"], at["y2"]), key=float),
            )
            return [(float(xs[0]), float(ys[0]), float(xs[1]), float(ys[1]))]
        case "polyline":
            places = [place.split(",") for place in at["points"].split()]
            return [(float(x), float(y), float(x), float(y)) for x, y in places]
        case "path":
            starts = re.findall(r"M(-?[0-9.]+) (-?[0-9.]+)", at["d"])
            return [(float(x), float(y), float(x), float(y)) for x, y in starts]
        case "text":
            return [_text_box(element)]
        case _:
            return []


def texts(root: ET.Element) -> list[str]:
    """Returns the texts that are drawn."""
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def titles(root: ET.Element) -> list[str]:
    """Returns the texts of the tooltips."""
    return [element.text or "" for element in root.iter(f"{SVG}title")]


def filled(root: ET.Element, tag: str, colour: str) -> list[ET.Element]:
    """Returns the elements of a colour."""
    return [one for one in root.iter(f"{SVG}{tag}") if colour == one.get("fill")]


def _text_box(element: ET.Element) -> tuple[float, float, float, float]:
    # estimates err on the long side, and titles at the top may be large
    length = text_width(element.text or "", float(element.get("font-size", 11))) * 0.8
    x, y = float(element.attrib["x"]), float(element.attrib["y"])
    share = {"middle": 0.5, "end": 1.0}.get(element.get("text-anchor", "start"), 0.0)
    return x - share * length, y - 8, x + (1 - share) * length, y
