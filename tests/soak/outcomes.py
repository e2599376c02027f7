"""What came of one kind of harm."""

from dataclasses import dataclass, field


class CannotRunError(Exception):
    """This machine lacks what it takes; says what."""


@dataclass(kw_only=True)
class Outcome:
    """Points tried, and losses found."""

    points: int = 0
    losses: list[str] = field(default_factory=list)
    """A sentence for each promise that was broken."""
    note: str = ""
    """What else is worth a line."""

    def add(self, point: str, losses: list[str]) -> None:
        """Adds what was found at a point."""
        self.points += 1
        self.losses += [f"{point}: {loss}" for loss in losses]
