"""Recipes: what a checkpoint of a model tells besides its leaves.

A model is rebuilt by the caller's code, never by the checkpoint. The recipe tells
whether that code is the same: the model's config and dtypes, its structure as data,
the type of each Variable, and the containers of the optimizer's state. It is JSON,
compressed by zlib, in ``LeafTable.structure``::

    {"format": "storesvc.recipe/1",
     "versions": {"flax": "0.12.8", "jax": "0.10.2", "optax": "0.2.8"},
     "model": "LlamaForCausalLM",     for people; nothing is looked up by it
     "config": {...} or null,         plain data (``structure.encode_data``)
     "arguments": {...},              likewise: dtype, param_dtype, precision
     "graphdef": {...},               the structure (``structure.encode_graphdef``)
     "variables": {"graphstate/fc1/kernel": "Param", ...},
     "opt_state": {"opt_state/0": "ScaleByAdamState", ...} or null}

Nothing in it is believed: it is compared as data. Only where a caller asks for a
module and gives no code is the structure decoded, by an exact allow-list.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from flax import nnx

from storesvc.format.keys import join_key
from storesvc_client._documents import pack_document, unpack_document
from storesvc_client.errors import StructureError
from storesvc_client.trees.config_differences import config_differences
from storesvc_client.trees.containers import containers
from storesvc_client.trees.graphs import (
    GraphState,
    Identity,
    fill_graph,
    graph_leaves,
    graph_paths,
)
from storesvc_client.trees.parts import setting_of
from storesvc_client.trees.structure import (
    decode_data,
    differences,
    encode_data,
    encode_graphdef,
)

__all__ = ["Recipe"]

FORMAT: Final = "storesvc.recipe/1"

_ARGUMENTS: Final = ("dtype", "param_dtype", "precision")
"""What EasyDeL's models are built with besides their config."""

_DTYPES: Final = ("dtype", "param_dtype")

Json: TypeAlias = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a model was, as data."""

    versions: Mapping[str, str]
    model: str
    """The name of its class; informative."""
    config: Json
    """Encoded plain data; None of a model without a config."""
    arguments: Mapping[str, Json]
    """Encoded plain data."""
    graphdef: Json
    """See ``structure.encode_graphdef``."""
    variables: Mapping[str, str]
    """The name of the type of each Variable, by the key of where it stands."""
    opt_state: Mapping[str, str] | None
    """See ``containers``; None where there was no optimizer."""

    @classmethod
    def of(
        cls,
        graphdef: "nnx.GraphDef[Any]",
        graphstate: GraphState,
        graphother: GraphState,
        opt_state: Any = None,
    ) -> "Recipe":
        """Returns the recipe of a state, real or abstract."""
        facts = _facts(Identity(graphdef))
        return cls(
            versions={name: version(name) for name in ("flax", "jax", "optax")},
            model=facts.model,
            config=facts.config,
            arguments=facts.arguments,
            graphdef=facts.graphdef,
            variables={
                join_key((part, *map(str, path))): _type_name(leaf)
                for part, state in (
                    ("graphstate", graphstate),
                    ("graphother", graphother),
                )
                for path, leaf in graph_leaves(state).items()
            },
            opt_state=(
                None if opt_state is None else containers(opt_state, "opt_state")
            ),
        )

    def pack(self) -> bytes:
        """Returns the recipe as the document of a checkpoint."""
        fields = {"format": FORMAT, **{f: getattr(self, f) for f in self.__slots__}}
        return pack_document(fields)

    @classmethod
    def unpack(cls, document: bytes) -> "Recipe":
        """Returns the recipe that a document holds.

        Raises:
            StructureError: It is no recipe.
        """
        fields = unpack_document(document)
        if fields.pop("format", None) != FORMAT or set(fields) != set(cls.__slots__):
            raise StructureError(
                f"structure of the checkpoint: expected a {FORMAT}, got other fields; "
                "use a newer release, or restore with run.restore(like=)"
            )
        for name, optional in _TEXTS.items():
            if not _is_texts(fields[name]) and not (optional and fields[name] is None):
                raise StructureError(
                    f"structure of the checkpoint: expected texts in {name}, got others"
                )
        if not isinstance(fields["arguments"], dict):
            raise StructureError(
                "structure of the checkpoint: expected arguments by name, got others"
            )
        return cls(**{**fields, "model": str(fields["model"])})

    def decoded_config(self) -> Any:
        """Returns the config as plain data; None where there was none.

        Raises:
            StructureError: It is no plain data.
        """
        return None if self.config is None else decode_data(self.config)

    def decoded_arguments(self) -> dict[str, Any]:
        """Returns the dtypes and the precision that the model was built with.

        Raises:
            StructureError: They are no plain data.
        """
        found = {name: decode_data(self.arguments[name]) for name in self.arguments}
        if isinstance(name := found.get("precision"), str):
            found["precision"] = jax.lax.Precision.__members__.get(name)
        return {name: found[name] for name in _ARGUMENTS if name in found}

    def config_differences(self, target: "Recipe", *, casting: bool) -> list[str]:
        """Returns in what the target's config and dtypes are not this one's.

        Args:
            target: What a restore is about to build.
            casting: Whether dtypes may differ, as a cast was asked for.

        Raises:
            StructureError: The config is no plain data.
        """
        found = config_differences(self.decoded_config(), target.decoded_config())
        if casting:
            return found
        own, other = self.decoded_arguments(), target.decoded_arguments()
        return found + config_differences(own, other)

    def optimizer_differences(self, target: "Recipe") -> list[str]:
        """Returns in what the target's optimizer state is another one; nothing where
        either has none."""
        saved, other = self.opt_state, target.opt_state
        if saved is None or other is None:
            return []
        return [
            f"{key}: expected {saved.get(key, 'nothing')} as saved, "
            f"got {other.get(key, 'nothing')}"
            for key in {**saved, **other}
            if saved.get(key) != other.get(key)
        ]

    def model_differences(self, target: "Recipe", *, casting: bool) -> list[str]:
        """Returns in what the target is another module.

        Args:
            target: What a restore is about to build.
            casting: As of ``config_differences``.
        """
        found = [
            f"{key}: expected a {kind} as saved, got a {target.variables[key]}"
            for key, kind in self.variables.items()
            if target.variables.get(key, kind) != kind
        ]
        # Another release of flax may describe the same module differently.
        same_release = self.versions.get("flax") == target.versions.get("flax")
        if same_release and self.graphdef != target.graphdef:
            ignore = _DTYPES if casting else ()
            found += differences(self.graphdef, target.graphdef, ignore=ignore)
        return found


_TEXTS: Final = {"versions": False, "variables": False, "opt_state": True}
"""The fields that hold texts by name, and whether they may be absent."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a GraphDef alone tells."""

    graphdef: Json
    model: str
    config: Json
    arguments: dict[str, Json]


@lru_cache(maxsize=4)
def _facts(key: Identity) -> _Facts:
    """A training loop saves states of one GraphDef; it is described once."""
    graphdef = key.graphdef
    # to ask it for its settings, a module needs no values
    empty = np.zeros(())
    model = fill_graph(graphdef, dict.fromkeys(graph_paths(graphdef), empty))
    return _Facts(
        graphdef=encode_graphdef(graphdef),
        model=type(model).__qualname__,
        config=_config(setting_of(model, "config")),
        arguments={
            name: encode_data(_plain(getattr(model, name)))
            for name in _ARGUMENTS
            if setting_of(model, name) is not None
        },
    )


def _config(config: Any) -> Json:
    if config is None:
        return None
    if hasattr(config, "to_dict"):
        return encode_data(config.to_dict())
    if is_dataclass(config) and not isinstance(config, type):
        return encode_data(asdict(config))
    return encode_data(dict(config)) if isinstance(config, Mapping) else None


def _plain(argument: Any) -> Any:
    return argument.name if isinstance(argument, jax.lax.Precision) else argument


def _type_name(leaf: Any) -> str:
    return type(leaf).__name__ if isinstance(leaf, nnx.Variable) else "array"


def _is_texts(value: Json) -> bool:
    return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
