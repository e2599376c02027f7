"""Kinds of calls in an audit log: by their stage, and by how the caller was known.

Apart from the values that have them, because ``storectl`` offers them as choices, and
starts without the contract's code.
"""

from typing import Final, Literal, TypeAlias, get_args

AuditStage: TypeAlias = Literal["started", "reopened", "intent", "ended", "denied"]
"""Moments of a call, or of the log itself, that an audit log records."""

STAGES: Final[tuple[AuditStage, ...]] = get_args(AuditStage)

Authentication: TypeAlias = Literal["anonymous", "local", "certificate", "token"]
"""Ways in which a server has authenticated a caller."""

AUTHENTICATIONS: Final[tuple[Authentication, ...]] = get_args(Authentication)
