"""Names the subject of a call: the run, step or upload of a resource name.

Example:
    >>> subject_of("namespaces/prod/runs/llama/checkpoints/500")
    {'run': 'prod/llama', 'step': '500'}
"""

from typing import Final

MAX_CHARACTERS: Final = 1000
"""Maximum length of a name: requests are measured before they are checked."""

_KEYS: Final = {
    "checkpoints": "step",
    "uploads": "upload",
    "tags": "tag",
    "holds": "hold",
}


def subject_of(name: str) -> dict[str, str]:
    """Returns the parts of a resource name for logs and spans; empty for other
    texts, and for names that are longer than any."""
    if len(name) > MAX_CHARACTERS:
        return {}
    match name.split("/"):
        case ["namespaces", namespace]:
            return {"namespace": namespace}
        case ["namespaces", namespace, "runs", run]:
            return {"run": f"{namespace}/{run}"}
        case ["namespaces", namespace, "runs", run, kind, one, *_] if kind in _KEYS:
            return {"run": f"{namespace}/{run}", _KEYS[kind]: one}
        case _:
            return {}
