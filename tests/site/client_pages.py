"""The reference of the client: every public name, grouped.

mkdocstrings replaces each ``::: name`` by the documentation of the name.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

FOLDER: Final = "client"
INDEX: Final = f"{FOLDER}/index.md"

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


_ONE_BELOW: Final = "    options: { heading_level: 3 }"


def client_pages() -> dict[str, str]:
    """Returns the Markdown of each page, by its path in the site."""
    pages = {
        page_of(title): f"# {title}\n\n{_entries('storesvc_client', names)}"
        for title, names in CLIENT.items()
    }
    parts = ["# Models", "Each module is imported by itself, and needs its library."]
    for module, names in MODELS.items():
        parts.append(f"## {module}")
        parts += [f"::: {module}.{name}\n{_ONE_BELOW}" for name in names]
    return {INDEX: _index(), **pages, page_of("Models"): "\n\n".join(parts)}


def page_of(title: str) -> str:
    """Returns the path of the page of a section."""
    return f"{FOLDER}/{re.sub('[^a-z]+', '-', title.lower())}.md"


def _entries(module: str, names: Sequence[str]) -> str:
    return "\n\n".join(f"::: {module}.{name}" for name in names)


def _index() -> str:
    rows = [
        f"| [{title}]({page_of(title).removeprefix(f'{FOLDER}/')}) | {_links(names)} |"
        for title, names in CLIENT.items()
    ]
    modules = ", ".join(f"`{module}`" for module in MODELS)
    rows.append(f"| [Models](models.md) | {modules} |")
    return "\n".join(
        [
            "# Client",
            "",
            (
                "`import storesvc_client as store`. A `Client` opens a store, a `Run` "
                "saves and restores; everything else they take or return."
            ),
            "",
            "| page | names |",
            "|---|---|",
            *rows,
        ]
    )


def _links(names: Sequence[str]) -> str:
    return ", ".join(f"[`{name}`][storesvc_client.{name}]" for name in names)
