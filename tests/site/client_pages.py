"""The reference of the client: every public name, grouped.

mkdocstrings replaces each ``::: name`` by the documentation of the name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
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
        *("Usage", "Collected", "Quota", "Picture", "LeafStatistics"),
        *("AuditEntries", "AuditEntry", "doctor", "Diagnosis", "Finding"),
    ),
    "Other projects and copies": (
        *("open_foreign", "ForeignRun", "ForeignCheckpoint", "ForeignInfo"),
        *("Transfer", "ExportReport"),
    ),
    "Monitoring": (
        *("Progress", "ProgressCallback", "progress_bar", "StepLogger", "Plot"),
        *("SaveTrace", "WriterReport", "PhaseSpan"),
    ),
    "Errors": (
        *("StoreError", "InvalidRequestError", "UnsupportedLeafError"),
        *("MismatchError", "StructureError", "NotFoundError", "AlreadyExistsError"),
        *("ConflictError", "PeerFailedError", "PreconditionError", "DataLossError"),
        *("LimitError", "UnauthenticatedError", "PermissionDeniedError"),
        *("UnavailableError", "TokenExpiredError"),
    ),
}
"""The public names of ``storesvc_client`` below the titles of their sections."""

PARTS: Final[Mapping[str, Sequence[str]]] = {
    "Checkpoints, tags and holds": (
        *("storesvc_client._api.groups.Tags", "storesvc_client._api.groups.Holds"),
        "storesvc_client._api.groups.Uploads",
    ),
    "Retention": ("storesvc_client._api.groups.Retention",),
}
"""Classes of attributes of a ``Run``, such as ``run.tags``, by the sections of
``CLIENT`` that they belong to. They have no public name."""

TYPES: Final = (
    "storesvc.format.names.Which",
    "storesvc_client._values.arguments.DurationLike",
    "storesvc_client._values.key_patterns.Patterns",
    "storesvc_client._pytree.partition_rules.Rules",
    "storesvc_client._values.options.SnapshotMode",
    "storesvc_client._values.options.IfBusy",
    "storesvc_client._values.options.OnDamaged",
    "storesvc_client._values.options.OnMismatch",
    "storesvc_client._values.options.Rehearse",
    "storesvc_client._values.triggers.Trigger",
    "storesvc_client._values.triggers.OnFailure",
    "storesvc_client._values.call_kinds.AuditStage",
)
"""Types of arguments, without public names either."""

MODELS: Final[Mapping[str, Sequence[str]]] = {
    "storesvc_client.easydel": (
        *("save_state", "restore_state", "save_model", "restore_model"),
        "StoreCheckpoints",
    ),
    "storesvc_client.nnx": ("save", "restore_into"),
    "storesvc_client.keras": ("StoreCheckpoint", "restore_into"),
    "storesvc_client.orbax": (
        *("CheckpointManager", "Checkpointer", "StepPath", "ItemMissingError"),
        *("StepExistsError", "StepMissingError", "TreeMismatchError"),
    ),
    "storesvc_client.trees.easydel": ("EasyDeLState",),
    "storesvc_client.trees.linen": ("linen_to_nnx", "nnx_to_linen"),
}
"""The public names of each module for models."""


_ONE_BELOW: Final = "    options: { heading_level: 3 }"


def client_pages() -> dict[str, str]:
    """Returns the Markdown of each page, by its path in the site."""
    pages = {
        page_of(title): "\n\n".join([f"# {title}", *_entries(title, names)])
        for title, names in CLIENT.items()
    }
    parts = ["# Models", "Each module is imported by itself, and needs its library."]
    for module, names in MODELS.items():
        parts.append(f"## {module}")
        parts += [f"::: {module}.{name}\n{_ONE_BELOW}" for name in names]
    pages[page_of("Models")] = "\n\n".join(parts)
    types = [f"::: {path}" for path in TYPES]
    pages[page_of("Types of arguments")] = "\n\n".join(["# Types of arguments", *types])
    return {INDEX: _index(), **pages}


def page_of(title: str) -> str:
    """Returns the path of the page of a section."""
    return f"{FOLDER}/{re.sub('[^a-z]+', '-', title.lower())}.md"


def _entries(title: str, names: Sequence[str]) -> Iterator[str]:
    yield from (f"::: storesvc_client.{name}" for name in names)
    yield from (f"::: {path}" for path in PARTS.get(title, ()))


def _index() -> str:
    rows = [
        f"| [{title}]({page_of(title).removeprefix(f'{FOLDER}/')}) | {_links(names)} |"
        for title, names in CLIENT.items()
    ]
    modules = ", ".join(f"`{module}`" for module in MODELS)
    rows.append(f"| [Models](models.md) | {modules} |")
    types = ", ".join(f"[`{path.rpartition('.')[2]}`][{path}]" for path in TYPES)
    rows.append(f"| [Types of arguments](types-of-arguments.md) | {types} |")
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
