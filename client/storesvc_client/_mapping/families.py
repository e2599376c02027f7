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
head_dim=N The size of a head, which the kernels of MaxText have as an axis.
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
_HEAD_DIM: Final = re.compile("head_dim=[1-9][0-9]{0,8}")


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
    is_maxtext = _MAXTEXT in words
    table_name = f"{family}-{_MAXTEXT}" if is_maxtext else family
    sizes = [word for word in words if is_maxtext and _HEAD_DIM.fullmatch(word)]
    known = {*_WORDS, _MAXTEXT, *sizes}
    if table_name not in list_tables() or not {*words} <= known or len(sizes) > 1:
        raise InvalidRequestError(
            f"mapping=: expected a file whose name ends in .toml or .json, or a table: "
            f"{', '.join(list_tables())}, with any of -{', -'.join(_WORDS)} behind it, "
            f"and -head_dim=N behind one of {_MAXTEXT}; got {name!r}"
        )
    if is_maxtext and not sizes and "inverse" not in words:
        raise InvalidRequestError(
            f"mapping=: expected -head_dim=N behind a table of {_MAXTEXT}, the size of "
            f"a head in the model's config, such as '{name}-head_dim=128'; got {name!r}"
        )
    text = (files(__package__) / "tables" / f"{table_name}.toml").read_text("utf-8")
    size = sizes[0].partition("=")[2] if sizes else "-1"  # which is not needed back
    table = tomllib.loads(text.replace('"head_dim"', size))
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
