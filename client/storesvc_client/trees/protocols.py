"""Protocols of modules for a store: the state part of EasyDeL's ``BaseModuleProtocol``.

``easydel.infra.mixins.protocol.BaseModuleProtocol`` lists everything that an EasyDeL
model can do. The protocols here have only the methods that hold, move and name state,
with the same names and arguments, in small protocols that can be checked one by one. An
EasyDeL model satisfies them, and so does any ``nnx.Module`` with the methods; neither
package imports the other.

Excluded, because only a language model needs it: calls and losses (``compute_loss``,
``prepare_inputs_for_call``, ``get_static_arguments``), generation and its caches
(``generate``, ``can_generate``, ``init_cache``, ``init_ragged_pages``,
``create_cache_metadata``, ``create_paged_metadata``, ``prepare_inputs_for_generation``,
``update_inputs_for_generation``), PyTorch (``to_torch``, ``get_torch_loader``,
``transform_fn``, ``pure_transform_fn``), the hub (``push_to_hub``), ``quantize``, and
the configuration (``config``, ``config_class``, ``base_model_prefix``).

``isinstance`` checks names, not signatures. Up to Python 3.11 it also reads the
properties, so an ``isinstance`` check splits the module.

>>> isinstance(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), HasGraph)
False

The functions render a module as text, one line for each nested module, with the names
and arguments of EasyDeL's. They read shapes only, so they accept abstract modules. A
module that occurs twice, or inside itself, is rendered once and referenced at the other
positions.

>>> print(prettify_nnx(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)))
Sequential(
  (layers): List(
    (0): Linear(in_features=2, out_features=3, bias=True)
  )
)
"""

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from flax import nnx
from jax.sharding import Mesh

from storesvc_client._pytree.partition_rules import Rules
from storesvc_client.trees.nnx.graphs import GraphState, HasGraph

if TYPE_CHECKING:
    from storesvc_client.trees.easydel import EasyDeLState

__all__ = [
    "BaseModuleProtocol",
    "Casts",
    "HasGraph",
    "HasLora",
    "InitsLazily",
    "Pretrained",
    "Shards",
    "SplitsParams",
    "ToState",
    "get_module_repr",
    "prettify_nnx",
    "printify_nnx",
]


def get_module_repr(module: nnx.Module) -> str:
    """Returns a module's type and its main dimensions."""
    name = type(module).__name__
    held = vars(module)
    if isinstance(module, nnx.Dropout):
        return f"{name}(p={module.rate})"
    if held.keys() >= {"num_embeddings", "features"}:
        return f"Embedding({held['num_embeddings']}, {held['features']})"
    if held.keys() >= {"in_features", "out_features"}:
        bias = held.get("use_bias", held.get("bias") is not None)
        return (
            f"{name}(in_features={held['in_features']}, "
            f"out_features={held['out_features']}, bias={bias})"
        )
    for eps in ("eps", "epsilon"):
        if eps in held:
            scale = held.get("kernel", held.get("scale"))
            shape = tuple(scale.shape) if isinstance(scale, nnx.Variable) else ""
            return f"{name}({shape}, eps={held[eps]})"
    return name


def prettify_nnx(
    module: nnx.Module,
    indent: str = "",
    depth: int = 0,
    max_depth: int | None = None,
    module_param: Any = None,
) -> str:
    """Returns a module and its submodules as lines of text.

    Args:
        module: The module, which may be abstract.
        indent: Prefix of each line.
        depth: Nesting depth of the module.
        max_depth: Maximum nesting depth to render; None: all.
        module_param: Has no effect, as in EasyDeL.
    """
    del module_param
    lines = _lines(module, depth, max_depth, (), {})
    return "\n".join(indent + line for line in lines)


def printify_nnx(model: nnx.Module) -> str:
    """Returns the text of a model with EasyDeL's prefix."""
    return "EasyDeL-" + prettify_nnx(model)


def _lines(
    node: Any,
    depth: int,
    max_depth: int | None,
    path: tuple[str, ...],
    seen: dict[int, str],
) -> Iterator[str]:
    if isinstance(node, nnx.Module):
        title = get_module_repr(node)
    else:
        title = "ModuleDict" if isinstance(node, Mapping) else "ModuleList"
    if id(node) in seen:
        yield f"{title}, the one at {seen[id(node)]}"
        return
    seen[id(node)] = "/".join(path) or "the top"
    children = list(_children(node))
    if not children:
        yield title
    elif max_depth is not None and depth >= max_depth:
        yield f"{title}(...)"
    else:
        yield f"{title}("
        for key, child in children:
            first, *rest = _lines(child, depth + 1, max_depth, (*path, key), seen)
            yield f"  ({key}): {first}"
            yield from (f"  {line}" for line in rest)
        yield ")"


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """Yields the modules in a node, and containers with modules, by name."""
    if isinstance(node, (list, tuple)):
        items = list(enumerate(node))
    else:
        held = node if isinstance(node, Mapping) else vars(node)
        items = sorted(held.items(), key=lambda item: _order(item[0]))
    for key, value in items:
        plain = isinstance(value, (list, tuple, dict))
        if isinstance(value, nnx.Module) or (plain and any(_children(value))):
            yield str(key), value


def _order(key: Any) -> tuple[bool, int, str]:
    """Returns a sort key: numbers by value, as in a list of layers, then text."""
    text = str(key)
    return not text.isdecimal(), int(text) if text.isdecimal() else 0, text


@runtime_checkable
class SplitsParams(Protocol):
    """A module that exports and imports its parameters."""

    def split_params(self) -> GraphState:
        """Returns the parameters, as ``graphstate`` does."""

    def merge_params(self, tree: Any) -> Self:
        """Returns the module with the parameters of a tree like ``graphstate``."""

    def split_params_dict(self, params_dict: dict[Any, Any]) -> dict[Any, Any]:
        """Returns the entries of a dict of parameters, by the state that they belong
        to.

        This is what EasyDeL documents. Its models of 0.3.0 take ``extract_fn`` and
        ``remove_none`` instead, and return the module's own parameters as arrays.
        """

    def merge_params_dict(self, params_dict: dict[Any, Any]) -> Self:
        """Returns the module with the parameters of a nested or flat dict."""


@runtime_checkable
class Shards(Protocol):
    """A module whose parameters can be sharded over a mesh."""

    def shard_model(
        self, partition_rules: Rules | None = None, mesh: Mesh | None = None
    ) -> Self:
        """Returns the module on the mesh, sharded by the rules, or by its own if
        None."""

    def gather_model(
        self, partition_rules: Rules | None = None, mesh: Mesh | None = None
    ) -> Self:
        """Returns the module with each parameter replicated on every device."""

    @property
    def params_sharding(self) -> dict[Any, Any]:
        """Sharding of each parameter, in dicts nested like the parameters."""


@runtime_checkable
class Casts(Protocol):
    """A module whose parameters can be cast."""

    def to_dtype(self, dtype: Any) -> Self:
        """Returns the module with its floating-point parameters in the dtype."""

    def half(self, change_runtime_dtype: bool = True) -> Self:  # noqa: FBT001, FBT002 - EasyDeL's signature
        """Returns the module in float16; with ``change_runtime_dtype``, it computes in
        it."""

    def float(self, change_runtime_dtype: bool = True) -> Self:  # noqa: FBT001, FBT002 - EasyDeL's signature
        """Returns the module in float32; with ``change_runtime_dtype``, it computes in
        it."""


@runtime_checkable
class ToState(Protocol):
    """A module that can be converted to a state for training."""

    def to_state(self) -> "EasyDeLState":
        """Returns the state of the module at step 0, without an optimizer."""


@runtime_checkable
class InitsLazily(Protocol):
    """A module that can be created without values, as the target of a restore."""

    @classmethod
    def lazy_init(cls, *args: Any, **kwargs: Any) -> Self:
        """Returns the module with abstract Variables, by ``nnx.eval_shape``."""


@runtime_checkable
class Pretrained(Protocol):
    """A module that can be saved to a store and loaded from it by a name.

    With a ``client`` in the keyword arguments, the name is a checkpoint in its store,
    ``NAMESPACE/RUN@STEP`` or ``NAMESPACE/RUN@latest``. Without one, it is a directory,
    the root of an embedded store that holds only the module, as the run
    ``pretrained/model``.
    """

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        push_to_hub: bool = False,  # noqa: FBT001, FBT002 - EasyDeL's signature
        token: str | bool | None = None,  # noqa: FBT001 - EasyDeL's signature
        gather_fns: dict[Any, Any] | None = None,
        float_dtype: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Saves the parameters, and returns after the checkpoint is committed.

        Args:
            save_directory: The name, without a step if ``step`` is given.
            push_to_hub: False; there is no hub here.
            token: None; there is no hub here.
            gather_fns: None; shards are saved in place, never gathered.
            float_dtype: dtype for floating-point parameters; None: unchanged.
            step: The step of the checkpoint; 0 if neither this nor the name has one.
            **kwargs: ``client``, or arguments of the module itself.
        """

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, **kwargs: Any
    ) -> Self:
        """Returns the module of a checkpoint.

        Args:
            pretrained_model_name_or_path: The name; for a directory, its newest step.
            **kwargs: ``client``, or arguments of the module itself.
        """


@runtime_checkable
class HasLora(Protocol):
    """A module that supports low-rank adapters. Not part of ``BaseModuleProtocol``."""

    def apply_lora_to_layers(
        self,
        lora_rank: int,
        lora_pattern: str | None = None,
        verbose: bool = False,  # noqa: FBT001, FBT002 - EasyDeL's signature
        rngs: nnx.Rngs | None = None,
    ) -> Self:
        """Returns the module with adapters in the layers that match the pattern."""

    def split_lora_params(self) -> dict[Any, Any]:
        """Returns the parameters of the adapters alone."""

    def merge_lora_params(self, pytree: dict[Any, Any]) -> Self:
        """Returns the module with the adapters of a tree."""

    def unwrap_lora_to_layers(self, verbose: bool = False) -> Self:  # noqa: FBT001, FBT002 - EasyDeL's signature
        """Returns the module without adapters, merged into its parameters."""


@runtime_checkable
class BaseModuleProtocol(
    HasGraph, SplitsParams, Shards, Casts, ToState, InitsLazily, Pretrained, Protocol
):
    """A module with all of the protocols above, except for adapters."""
