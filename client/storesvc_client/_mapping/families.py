"""Tables of model families: rules that come with storesvc.

A table makes the model of a checkpoint of EasyDeL, as ``save_state``, ``save_model``
and ``storesvc_client.nnx.save`` save it, from the files of transformers, or, if its
name ends with ``-maxtext``, that of a checkpoint of MaxText. It is a document in
``tables/``, named as the ``model_type`` of transformers, and has no size of a model.
MaxText has two kinds of Llama: a table for each has the number of its release.
The words behind its name change it:

========== ==================================================================
tied       The head is the embedding (``tie_word_embeddings``), and in no file.
scanned    The leaves of all layers are stacked along a new axis: the first one in
           EasyDeL, the second one in MaxText.
inverse    The way back. It leaves out what a training state has besides the model.
NAME=N     A size that a table of MaxText needs, by its name in the model's config.
========== ==================================================================

>>> load_table("qwen3-tied-scanned-inverse").name
'qwen3-tied-scanned-inverse'
"""

import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Final

from storesvc_client._mapping.inverses import invert_document
from storesvc_client._mapping.rules import VERSION, Rules, check_rules
from storesvc_client.errors import InvalidRequestError

_OTHERS: Final = [
    {"from": each, "drop": True, "optional": True}
    for each in ("step", "opt_state/{rest*}", "graphother/{rest*}", "nnx_aux/{rest*}")
]
"""Leaves of a training state that no file of a model has."""

_WORDS: Final = ("tied", "scanned", "inverse")
_MAXTEXT: Final = "maxtext"
_SIZES: Final = {
    "head_dim": 128,
    "num_attention_heads": 128,
    "first_k_dense_replace": 3,
}
"""Sizes that tables name, with examples."""

_NAMES: Final = "|".join(_SIZES)


def list_tables() -> list[str]:
    """Returns the names of the tables."""
    found = (files(__package__) / "tables").iterdir()
    return sorted(each.name.removesuffix(".toml") for each in found)


def load_table(name: str) -> Rules:
    """Returns a table.

    Raises:
        InvalidRequestError: There is none of this name, or it needs a size.
    """
    family, *words = name.split("-")
    table_name = f"{family}-{_MAXTEXT}" if _MAXTEXT in words else family
    file = files(__package__) / "tables" / f"{table_name}.toml"
    text = file.read_text("utf-8") if table_name in list_tables() else ""
    needed = {*re.findall(_NAMES, text)}
    sizes = dict(re.findall(rf"-({_NAMES})=([1-9][0-9]{{0,8}})(?=-|$)", name))
    known = {*_WORDS, _MAXTEXT, *map("=".join, sizes.items())}
    if not text or not {*words} <= known or not sizes.keys() <= needed:
        raise InvalidRequestError(
            f"mapping=: expected a file whose name ends in .toml or .json, or a table: "
            f"{', '.join(list_tables())}, with any of -{', -'.join(_WORDS)} behind it, "
            f"and sizes such as -head_dim=128 behind one of {_MAXTEXT}; got {name!r}"
        )
    if "inverse" in words:
        needed &= {"first_k_dense_replace"}  # which is in keys, not in operations only
    if absent := [each for each in _SIZES if each in needed - sizes.keys()]:
        examples = "".join(f"-{each}={_SIZES[each]}" for each in absent)
        raise InvalidRequestError(
            f"mapping=: expected {' and '.join(absent)} of the model's config behind a "
            f"table of {_MAXTEXT}, such as '{name}{examples}'; got {name!r}"
        )
    text = re.sub(f'"?({_NAMES})"?', lambda found: sizes.get(found[1], "-1"), text)
    table = tomllib.loads(text)
    rules: list[Mapping[str, Any]] = table["rules"]
    if "tied" in words:
        rules = [rule for rule in rules if rule.get("from") != "lm_head/weight"]
        rules += table.get("tied", [])
    if layers := table.get("scanned" if "scanned" in words else "apart"):
        rules = [_change_layers(rule, **layers) for rule in rules]
    if "inverse" in words:
        forward = check_rules({"version": VERSION, "rules": rules}, name=family)
        rules = [*invert_document(forward), *_OTHERS]
    return check_rules({"version": VERSION, "rules": rules}, name=name)


def _change_layers(
    rule: Mapping[str, Any], key: str, operations: list[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Returns a rule with other keys and more operations, if it makes layers."""
    to = [rule["to"]] if isinstance(rule.get("to"), str) else rule.get("to", [])
    if not any("{layer}" in each for each in to):
        return rule
    return {
        **rule,
        "to": [re.sub("layers[/_]{layer}", key, each) for each in to],
        "operations": [*rule.get("operations", []), *operations],
    }
