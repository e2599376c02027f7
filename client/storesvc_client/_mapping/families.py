"""Tables of model families: rules that come with storesvc.

A table makes the model of a checkpoint of EasyDeL, as ``save_state``, ``save_model``
and ``storesvc_client.nnx.save`` save it, from the files of transformers. It is a
document in ``tables/``, named as the ``model_type`` of transformers, and has no size of
a model. The words behind its name change it:

======== ====================================================================
tied     The head is the embedding (``tie_word_embeddings``), and in no file.
scanned  The leaves of all layers are stacked along a new first axis.
inverse  The way back. It leaves out what a training state has besides the model.
======== ====================================================================

>>> load_table("qwen3-tied-scanned-inverse").name
'qwen3-tied-scanned-inverse'
"""

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

from storesvc_client._mapping.inverses import invert_document
from storesvc_client._mapping.rules import VERSION, Rules, check_rules
from storesvc_client.errors import InvalidRequestError

_HEAD: Final = "graphstate/lm_head/kernel/value"
_TIE: Final = {
    "tie": "graphstate/model/embed_tokens/embedding/value",
    "to": _HEAD,
    "operations": [{"transpose": [1, 0]}],
}
_OTHERS: Final = [
    {"from": each, "drop": True, "optional": True}
    for each in ("step", "graphother/{rest*}", "opt_state/{rest*}")
]
"""Leaves of a training state that no file of a model has."""

_WORDS: Final = ("tied", "scanned", "inverse")


def list_tables() -> list[str]:
    """Returns the names of the tables."""
    found = (files(__package__) / "tables").iterdir()
    return sorted(each.name.removesuffix(".toml") for each in found)


def load_table(name: str) -> Rules:
    """Returns a table.

    Raises:
        InvalidRequestError: There is none of this name.
    """
    family, *words = name.split("-")
    if family not in list_tables() or not {*words} <= {*_WORDS}:
        raise InvalidRequestError(
            f"mapping=: expected a file whose name ends in .toml or .json, or a table: "
            f"{', '.join(list_tables())}, with any of -{', -'.join(_WORDS)} behind it; "
            f"got {name!r}"
        )
    text = (files(__package__) / "tables" / f"{family}.toml").read_text("utf-8")
    rules: list[Mapping[str, Any]] = tomllib.loads(text)["rules"]
    if "tied" in words:
        rules = [*(rule for rule in rules if rule.get("to") != _HEAD), _TIE]
    if "scanned" in words:
        rules = [_stack_layers(rule) for rule in rules]
    if "inverse" in words:
        table = check_rules({"version": VERSION, "rules": rules}, name=family)
        rules = [*invert_document(table), *_OTHERS]
    return check_rules({"version": VERSION, "rules": rules}, name=name)


def _stack_layers(rule: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a rule that stacks what it makes of each layer."""
    to = [rule["to"]] if isinstance(rule.get("to"), str) else rule.get("to", [])
    if not any("/{layer}" in each for each in to):
        return rule
    operations = rule.get("operations", [])
    return {
        **rule,
        "to": [each.replace("/{layer}", "") for each in to],
        "operations": [*operations, {"stack": {"axis": 0, "by": "layer"}}],
    }
