"""Values of imports and copies: what was transferred, and the labels that say so."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from storesvc_client._values.arguments import MAX_TEXT_BYTES
from storesvc_client._values.texts import size_text, unicode_text
from storesvc_client._values.values import Checkpoint
from storesvc_client.errors import InvalidRequestError

IMPORTED: Final = "import.format"
"""Label of an imported checkpoint: its format, in which a key that is a number is a
text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One checkpoint of an import or a copy; from ``Run.import_from`` and
    ``Run.copy_to``."""

    source: str
    """Location of the checkpoint that was read."""
    checkpoint: Checkpoint
    """The checkpoint of the run."""
    is_new: bool
    """True if this call stored it; False if an earlier one had."""
    sent_bytes: int
    """Bytes of the chunks that were stored."""
    reused_bytes: int
    """Bytes of the chunks that the store had already."""
    seconds: float
    """Seconds that it took."""
    is_verified: bool
    """True if its bytes were compared with checksums of the source; False if the source
    has none for all of them, or if the checkpoint was there already."""
    verified_count: int
    """Number of leaves and items whose bytes were compared with such checksums."""

    def __repr__(self) -> str:
        name = f"{self.checkpoint.run}@{self.checkpoint.step}"
        if not self.is_new:
            return f"<Transfer {name}, was there already>"
        sent, reused = size_text(self.sent_bytes), size_text(self.reused_bytes)
        return f"<Transfer {name}, {sent} sent, {reused} reused, {self.seconds:.3g} s>"

    @classmethod
    def skipped(cls, source: str, checkpoint: Checkpoint) -> "Transfer":
        """Returns the transfer of a checkpoint that was there already."""
        return cls(
            source=source,
            checkpoint=checkpoint,
            is_new=False,
            sent_bytes=0,
            reused_bytes=0,
            seconds=0.0,
            is_verified=False,
            verified_count=0,
        )


def with_provenance(
    what: str,
    prefix: str,
    labels: Mapping[str, str],
    provenance: Mapping[str, str],
) -> dict[str, str]:
    """Returns labels together with the provenance of a checkpoint.

    Args:
        what: The transfer, for the message.
        prefix: Prefix of the keys of the provenance, such as "import.".
        labels: Labels of the user and of the source.
        provenance: Texts by key, without the prefix; empty ones are left out.

    Raises:
        InvalidRequestError: A label has a key of the provenance.
    """
    added = {
        f"{prefix}{key}": label_text(text) for key, text in provenance.items() if text
    }
    taken = sorted(added.keys() & labels.keys())
    if taken:
        raise InvalidRequestError(
            f"{what}: expected no label {taken[0]!r}, which records where the "
            f"checkpoint comes from, got {labels[taken[0]]!r}; use another key"
        )
    return {**labels, **added}


def label_text(text: str) -> str:
    """Returns a text as a label holds it: of one that is too long, such as the URL of a
    deep folder, "..." and its end.

    >>> label_text("file:///ckpts"), len(label_text("file:///" + "deep/" * 100))
    ('file:///ckpts', 256)
    """
    data = unicode_text(text).encode()
    if len(data) <= MAX_TEXT_BYTES:
        return data.decode()
    return "..." + data[3 - MAX_TEXT_BYTES :].decode(errors="ignore")
