"""The reference of the client: every public name, grouped.

mkdocstrings replaces each ``::: name`` by the documentation of the name.
"""

from collections.abc import Mapping, Sequence
from typing import Final

CLIENT: Final[Mapping[str, Sequence[str]]] = {
    "Connecting": ("connect", "Client", "Run", "RunInfo", "ServerInfo", "Identity"),
    "Training loop": ("Loop", "Steps", "Minutes", "Raise", "Tolerate"),
    "Saving": (
        *("Save", "SaveOptions", "SaveReport", "Rehearsal", "Distributed"),
        *("PerProcess", "Replicated", "UploadInfo"),
    ),
    "Restoring": (
        *("OpenCheckpoint", "Items", "ItemInfo", "LeafInfo", "RestoreReport"),
        "ProcessReading",
    ),
    "Checkpoints, tags and holds": ("Checkpoint", "Tag", "Hold", "HoldInfo", "Event"),
    "Retention": (
        *("RetentionPolicy", "KeepLatest", "KeepEvery", "KeepNewerThan", "KeepBest"),
        *("KeepSteps", "KeepTagged", "KeepPinned", "parse_policy", "format_policy"),
        "RetentionDecision",
    ),
    "Inspection": (
        *("Verification", "Damage", "Diff", "LeafDifference", "ItemDifference"),
        *("Usage", "Collected", "Quota"),
    ),
    "Other projects and copies": (
        *("open_foreign", "ForeignRun", "ForeignCheckpoint", "ForeignInfo"),
        *("Transfer", "ExportReport"),
    ),
    "Monitoring": (
        *("Progress", "ProgressCallback", "progress_bar", "StepLogger", "Plot"),
    ),
    "Errors": (
        *("StoreError", "InvalidRequestError", "UnsupportedLeafError"),
        *("MismatchError", "StructureError", "NotFoundError", "AlreadyExistsError"),
        *("ConflictError", "PeerFailedError", "PreconditionError", "DataLossError"),
        *("LimitError", "UnauthenticatedError", "PermissionDeniedError"),
        *("UnavailableError", "TokenExpiredError"),
    ),
}
"""The names of ``storesvc_client.__all__`` below the titles of their sections."""

MODELS: Final[Mapping[str, Sequence[str]]] = {
    "storesvc_client.easydel": (
        *("save_state", "restore_state", "save_model", "restore_model"),
        "StoreCheckpoints",
    ),
    "storesvc_client.nnx": ("save", "restore_into"),
    "storesvc_client.keras": ("StoreCheckpoint", "restore_into"),
    "storesvc_client.orbax": (
        *("CheckpointManager", "Checkpointer", "StepPath", "ItemMissingError"),
        *("StepExistsError", "StepMissingError"),
    ),
    "storesvc_client.trees.easydel": ("EasyDeLState",),
    "storesvc_client.trees.linen": ("linen_to_nnx", "nnx_to_linen"),
}
"""The public names of each module for models."""


def client_page() -> str:
    """Returns the Markdown of the page of ``storesvc_client``."""
    parts = [
        "# Client",
        (
            "`import storesvc_client as store`. A `Client` opens a store, a `Run` "
            "saves and restores; everything else is a value that they take or return."
        ),
    ]
    for title, names in CLIENT.items():
        parts += [f"## {title}", *(f"::: storesvc_client.{name}" for name in names)]
    return "\n\n".join(parts)


def models_page() -> str:
    """Returns the Markdown of the page of the modules for models."""
    parts = ["# Models", "Each module is imported by itself, and needs its library."]
    for module, names in MODELS.items():
        parts += [f"## {module}", *(f"::: {module}.{name}" for name in names)]
    return "\n\n".join(parts)
