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
"""

import os
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from flax import nnx
from jax.sharding import Mesh

from storesvc_client._pytree.partition_rules import Rules
from storesvc_client.trees.nnx.graphs import GraphState
from storesvc_client.trees.nnx.model_parts import (
    HasGraph,
    mesh_of,
    partition_rules_of,
    split_module,
)
from storesvc_client.trees.nnx.module_repr import (
    get_module_repr,
    prettify_nnx,
    printify_nnx,
)

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
    "mesh_of",
    "partition_rules_of",
    "prettify_nnx",
    "printify_nnx",
    "split_module",
]


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
    HasGraph,
    SplitsParams,
    Shards,
    Casts,
    ToState,
    InitsLazily,
    Pretrained,
    Protocol,
):
    """A module with all of the protocols above, except for adapters."""
