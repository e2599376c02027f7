"""Draws the phases of a save of one process, as bars over seconds."""

from typing import Final

from storesvc_client import PhaseSpan
from storesvc_client._pictures.svg import BLUE, document, element, line, words

_WIDTH: Final = 1180.0
_LEFT: Final = 150.0
_RIGHT: Final = 150.0
_ROW: Final = 22.0
_THINNEST: Final = 2.0


def save_chart(spans: tuple[PhaseSpan, ...], *, seconds: float, label: str) -> str:
    """Returns a bar for each phase, from its first start to its last end, as SVG.

    Args:
        spans: Phases of the process.
        seconds: Length of the axis, which the processes of a save share.
        label: Text for people who do not see it.
    """
    room = _WIDTH - _LEFT - _RIGHT
    scale = room / max(seconds, 1e-9)
    body = [line(_LEFT, 0, _LEFT, _ROW * len(spans), opacity=0.3)]
    for at, span in enumerate(spans):
        top = at * _ROW
        start = _LEFT + min(span.start_seconds * scale, room)
        length = min((span.end_seconds - span.start_seconds) * scale, room)
        times = f"{span.start_seconds:.3f} s to {span.end_seconds:.3f} s"
        body += [
            words(span.name, _LEFT - 10, top + 15, text_anchor="end"),
            element(
                "rect",
                title=f"{span.name}: {times}, busy for {span.busy_seconds:.3f} s",
                x=start,
                y=top + 4,
                width=max(length, _THINNEST),
                height=_ROW - 8,
                rx=2,
                fill=BLUE,
            ),
            words(
                f"{span.end_seconds - span.start_seconds:.3f} s",
                _WIDTH - _RIGHT + 70,
                top + 15,
                text_anchor="end",
            ),
            words(
                f"{span.busy_seconds:.3f} s",
                _WIDTH - 6,
                top + 15,
                text_anchor="end",
                opacity=0.7,
            ),
        ]
    height = _ROW * max(len(spans), 1)
    return document(body, label=label, width=_WIDTH, height=height)
