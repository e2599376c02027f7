"""Checks the claims of the demo about its runs. Values in, values out.

Losses are compared by their bits where the arithmetic is the same, and with a tolerance
only where the shape of the mesh changes the order of sums. States are never compared
with a tolerance: a restored state must equal the saved one bit for bit, on any mesh.
The training process checks that itself, leaf by leaf, before it continues.
"""

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from storesvc_client.demo.job_log import Committed, Event, Restored, SaveBegun, Step

__all__ = [
    "HOW_JUDGED",
    "TOLERANCE",
    "Claim",
    "History",
    "claims_of",
    "relative_difference",
]

TOLERANCE: Final = 1e-5
"""Relative difference allowed between losses on meshes of different shapes.

Measured over 60 steps on four shapes: at most 6e-7, a few units in the last place of a
float32. Errors are larger: with dropout counts that restart, losses differ by 1e-4 to
8e-3; with an optimizer that restarts, by up to 3e-2.
"""

HOW_JUDGED: Final = (
    "losses must have the same bits where the arithmetic is the same: one mesh, one "
    "program; on a mesh of another shape sums over devices run in another order, and "
    f"losses must agree within {TOLERANCE:.0e}; a restored state must be bitwise the "
    "saved one on any mesh"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim, whether it holds, and the evidence."""

    text: str
    held: bool
    seen: str


class History:
    """The events of one training process, by kind."""

    def __init__(self, events: Iterable[Event], *, exit_code: int) -> None:
        listed = list(events)
        self.exit_code = exit_code
        self.losses = {e.step: e.loss for e in listed if isinstance(e, Step)}
        self.begun = [e.step for e in listed if isinstance(e, SaveBegun)]
        self.committed = [e.step for e in listed if isinstance(e, Committed)]
        self.restored = next((e for e in listed if isinstance(e, Restored)), None)

    @property
    def last(self) -> int:
        """The last completed step."""
        return max(self.losses)


def claims_of(
    reference: History, killed: History, moved: History, stayed: History
) -> list[Claim]:
    """Returns the claims about the four runs.

    Args:
        reference: Never interrupted.
        killed: On the same mesh, killed between two saves.
        moved: Resumed from there on a mesh of another shape.
        stayed: Resumed from there on the same mesh.
    """
    return [
        _learns(reference),
        _died_between_saves(killed),
        _same_bits("Before the kill, every loss is the reference's", reference, killed),
        _restored_last(killed, moved, stayed),
        _same_state(moved, stayed),
        _same_bits(
            "Resumed on the same mesh, every loss is the reference's", reference, stayed
        ),
        _same_but_for_rounding(reference, moved),
    ]


def _learns(reference: History) -> Claim:
    first, last = reference.losses[1], reference.losses[reference.last]
    return Claim(
        text="The model learns",
        held=last < 0.6 * first,
        seen=f"{first:.2f} nats a byte at step 1, {last:.2f} at step {reference.last}",
    )


def _died_between_saves(killed: History) -> Claim:
    begun, committed = killed.begun[-1:], killed.committed[-1:]
    return Claim(
        text="The job died of SIGKILL between two saves",
        held=killed.exit_code == -signal.SIGKILL
        and begun == committed
        and all(killed.last >= step + 2 for step in committed),
        seen=f"save begun at {begun}, acknowledged {committed}, "
        f"last step {killed.last}, exit code {killed.exit_code}",
    )


def _restored_last(killed: History, *resumed: History) -> Claim:
    restored = [r.restored.step for r in resumed if r.restored is not None]
    return Claim(
        text="Both resumed from the last checkpoint that was acknowledged",
        held=restored == killed.committed[-1:] * len(resumed),
        seen=f"acknowledged {killed.committed}, resumed from {restored}",
    )


def _same_state(*resumed: History) -> Claim:
    restored = [r.restored for r in resumed if r.restored is not None]
    digests = {r.digest for r in restored}
    leaf_count = restored[0].leaf_count if restored else 0
    meshes = " and ".join(r.mesh for r in restored)
    return Claim(
        text="The restored state is bitwise the saved one, on either mesh",
        held=len(restored) == len(resumed) and len(digests) == 1,
        seen=f"digest {' '.join(digests)} of {leaf_count} leaves on {meshes}",
    )


def _same_bits(text: str, reference: History, run: History) -> Claim:
    same = [run.losses[s].hex() == reference.losses[s].hex() for s in run.losses]
    return Claim(
        text=f"{text}, bit by bit",
        held=all(same) and bool(same),
        seen=f"{sum(same)} of {len(same)} losses, "
        f"steps {min(run.losses)} to {run.last}",
    )


def _same_but_for_rounding(reference: History, run: History) -> Claim:
    worst = max(relative_difference(reference, run, step) for step in run.losses)
    return Claim(
        text="Resumed on another mesh, every loss is the reference's but for rounding",
        held=worst <= TOLERANCE and run.last == reference.last,
        seen=f"largest relative difference {worst:.1e}, allowed {TOLERANCE:.0e}, "
        f"steps {min(run.losses)} to {run.last}",
    )


def relative_difference(reference: History, run: History, step: int) -> float:
    """Returns the difference of the losses of a step, relative to the reference."""
    return abs(run.losses[step] / reference.losses[step] - 1)
