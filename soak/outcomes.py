"""Outcome of one kind of fault."""

from dataclasses import dataclass, field


class CannotRunError(Exception):
    """This machine lacks a requirement, which the message names."""


@dataclass(kw_only=True)
class Outcome:
    """Number of points tried, and losses found."""

    points: int = 0
    losses: list[str] = field(default_factory=list)
    """One sentence for each broken guarantee."""
    note: str = ""
    """Note for the table."""

    def add(self, point: str, losses: list[str]) -> None:
        """Adds a point, and its losses."""
        self.points += 1
        self.losses += [f"{point}: {loss}" for loss in losses]
