"""Partition rules: shard named leaves over a mesh.

A rule is a regular expression and a ``PartitionSpec``. The first rule whose expression
is found in a leaf's key applies, so the last rule is usually ``("", PartitionSpec())``.
A spec affects speed and memory, never values. An axis that does not divide a dimension,
or splits one that the leaf lacks, is an error, because a replicated leaf may not fit
into memory; with ``indivisible="replicate"`` it is dropped, as in EasyDeL. ``misfits``
collects these cases, and ``report`` logs them. Scalars are replicated.

>>> mesh = jax.make_mesh((1,), ("tp",))
>>> rules = [("kernel", PartitionSpec(None, "tp")), ("", PartitionSpec())]
>>> tuple(Partitioner(mesh, rules).sharding("layers/0/kernel", (4, 8)).spec)
(None, 'tp')
"""

import logging
import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, Final, TypeAlias

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from storesvc.format.keys import join_key
from storesvc.format.trees import SavedSharding
from storesvc_client._pytree.leaves import list_problems, tree_path_to_string
from storesvc_client._values.arguments import checked_choice
from storesvc_client._values.options import Indivisible
from storesvc_client.errors import InvalidRequestError, MismatchError

__all__ = [
    "RECORDED",
    "Partitioner",
    "Rules",
    "axis_names",
    "check_mesh",
    "shardings_by_rules",
]

Rules: TypeAlias = Sequence[tuple[str, PartitionSpec]]

RECORDED: Final = "recorded"
"""Stands for the sharding of each leaf that the checkpoint recorded."""

_log = logging.getLogger("storesvc_client")
_SHOWN = 5


class Partitioner:
    """Applies rules on a mesh, and collects the leaves that they do not fit."""

    def __init__(
        self, mesh: Mesh, rules: Rules, indivisible: Indivisible = "error"
    ) -> None:
        """Validates and compiles the rules.

        Raises:
            InvalidRequestError: The rules are not pairs, one has an invalid regular
                expression or spec or names an axis that the mesh lacks, or ``mesh`` is
                not a mesh, or ``indivisible`` not one of its values.
        """
        check_mesh(mesh)
        checked_choice("indivisible=", indivisible, Indivisible)
        self.mesh = mesh
        self.misfits: list[str] = []
        self._replicates = indivisible == "replicate"
        self._rules = [_compile_rule(mesh, *pair) for pair in _pairs(rules)]
        self._fits: dict[tuple[PartitionSpec, tuple[int, ...]], NamedSharding] = {}

    def sharding(self, key: str, shape: tuple[int, ...]) -> NamedSharding:
        """Returns the sharding of a leaf.

        Raises:
            ValueError: No rule matches, or it does not fit; the caller adds the key.
        """
        if not shape:  # a scalar cannot be split, whatever the rule
            return NamedSharding(self.mesh, PartitionSpec())
        for pattern, spec in self._rules:
            if pattern.search(key):
                return self._fit_sharding(key, shape, spec)
        raise ValueError("no rule matches; end the rules with ('', PartitionSpec())")

    @property
    def advice(self) -> str:
        """Names the option that would accept the misfits that were errors."""
        if self._replicates or not self.misfits:
            return ""
        return "; to leave such dimensions whole, pass indivisible='replicate'"

    def recorded(
        self, key: str, shape: tuple[int, ...], saved: SavedSharding | None
    ) -> NamedSharding:
        """Returns the saved sharding of a leaf on this mesh.

        A leaf without a recorded sharding is replicated.

        Raises:
            ValueError: It does not fit; the caller adds the key.
        """
        if saved is None:
            return NamedSharding(self.mesh, PartitionSpec())
        named = [axis for axes in saved.spec for axis in axes]
        absent = [axis for axis in named if axis not in self.mesh.shape]
        if absent:
            axes = _join_names(self.mesh.axis_names)
            self._note(
                key, f"it was split by axis {absent[0]!r}, and the mesh has only {axes}"
            )
        here = [tuple(a for a in axes if a not in absent) for axes in saved.spec]
        return self._fit_sharding(key, shape, _spec([axes or None for axes in here]))

    def report(self) -> None:
        """Logs the dropped axes, if any, as one warning."""
        if self.misfits:
            more = len(self.misfits) - _SHOWN
            _log.warning(
                "partition axes were dropped for %d leaves: %s%s",
                len(self.misfits),
                "; ".join(self.misfits[:_SHOWN]),
                f"; and {more} more" if more > 0 else "",
            )

    def _note(self, key: str, problem: str) -> None:
        """Notes why a leaf is not split as asked; raises it if that is an error."""
        self.misfits.append(f"leaf {key!r}: {problem}")
        if not self._replicates:
            raise ValueError(problem)

    def _fit_sharding(
        self, key: str, shape: tuple[int, ...], spec: PartitionSpec
    ) -> NamedSharding:
        found = self._fits.get((spec, shape))
        if found is not None:
            return found
        problems, fitted = [], list(spec)
        for at, axes in enumerate(spec):
            names = axis_names(axes)
            parts = prod(self.mesh.shape[axis] for axis in names)
            size = shape[at] if at < len(shape) else None
            if names and size is not None and size % parts == 0:
                continue
            fitted[at] = None
            if names and size is None:
                problems.append(f"{spec} splits dimension {at} of the shape {shape}")
            elif names:
                by = f"{'axis' if len(names) == 1 else 'axes'} {_join_names(names)}"
                problems.append(
                    f"dimension {at} of {size} is not divisible by {by} of {parts}"
                )
        # jax rejects a spec longer than the leaf's rank, even if the rest is None.
        found = NamedSharding(self.mesh, PartitionSpec(*fitted[: len(shape)]))
        if problems:
            self._note(key, ", ".join(problems))
        else:
            self._fits[spec, shape] = found
        return found


def shardings_by_rules(
    tree: Any, mesh: Mesh, rules: Rules, indivisible: Indivisible = "error"
) -> Any:
    """Returns a tree of the same structure with the sharding of each leaf by the rules.

    Args:
        tree: A pytree of arrays or their abstract stand-ins. Leaves without a shape are
            treated as scalars.
        rules: The partition rules; see the module.
        indivisible: What to do with leaves that they do not fit.

    Raises:
        InvalidRequestError: The mesh or a rule is not usable.
        MismatchError: Leaves that no rule matches, or that it does not fit.
    """
    partitioner = Partitioner(mesh, rules, indivisible)
    problems: list[str] = []

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding | None:
        key = join_key(tree_path_to_string(path))
        try:
            return partitioner.sharding(key, tuple(getattr(leaf, "shape", ())))
        except ValueError as e:
            problems.append(f"leaf {key!r}: {e}")
            return None

    shardings = jax.tree_util.tree_map_with_path(sharding, tree)
    if problems:
        raise MismatchError(
            f"the rules do not fit: {list_problems(problems)}{partitioner.advice}"
        )
    partitioner.report()
    return shardings


def check_mesh(mesh: Any) -> None:
    """Rejects anything that is not a mesh of devices."""
    if not isinstance(mesh, Mesh) or mesh.empty:
        got = "an empty one" if isinstance(mesh, Mesh) else type(mesh).__name__
        raise InvalidRequestError(
            "mesh: expected a jax.sharding.Mesh, such as jax.make_mesh((2, 4), ('dp', "
            f"'fsdp')), got {'None' if mesh is None else got}"
        )


def _pairs(rules: Any) -> Iterator[tuple[str, PartitionSpec]]:
    if not isinstance(rules, Sequence) or isinstance(rules, (str, bytes)):
        plain = rules is None or isinstance(rules, (str, bytes))
        got = repr(rules) if plain else type(rules).__name__
        hint = "; 'recorded' is supported by restores only" if rules == RECORDED else ""
        raise InvalidRequestError(
            f"rules: expected a list of (regex, PartitionSpec) pairs, got {got}{hint}"
        )
    for index, rule in enumerate(rules):
        is_pair = isinstance(rule, tuple) and len(rule) == 2
        if not is_pair or not isinstance(rule[0], str):
            raise InvalidRequestError(
                f"rule {index}: expected (regex, PartitionSpec), got {rule!r}"
            )
        yield rule


def _compile_rule(
    mesh: Mesh, pattern: str, spec: PartitionSpec
) -> tuple[re.Pattern[str], PartitionSpec]:
    if not isinstance(spec, PartitionSpec):
        raise InvalidRequestError(
            f"rule {pattern!r}: expected a PartitionSpec, got {spec!r}"
        )
    named = [axis for axes in spec for axis in axis_names(axes)]
    unknown = [axis for axis in named if axis not in mesh.shape]
    if unknown:
        raise InvalidRequestError(
            f"rule {pattern!r}: expected axes of the mesh, {tuple(mesh.axis_names)}, "
            f"got {unknown[0]!r}"
        )
    if len(named) != len(set(named)):
        raise InvalidRequestError(
            f"rule {pattern!r}: expected each axis at most once, got {spec!r}"
        )
    try:
        return re.compile(pattern), spec
    except re.error as e:
        raise InvalidRequestError(
            f"rule {pattern!r} is not a regular expression: {e}"
        ) from e


def _spec(axes: list[Any]) -> PartitionSpec:
    """Returns a spec without trailing Nones, which jax treats as different."""
    while axes and axes[-1] is None:
        axes = axes[:-1]
    return PartitionSpec(*axes)


def _join_names(names: Sequence[Any]) -> str:
    return " and ".join(map(repr, names))


def axis_names(axes: Any) -> tuple[Any, ...]:
    """Returns the axes that split one dimension of a spec."""
    if axes is None or axes is PartitionSpec.UNCONSTRAINED:
        return ()
    return axes if isinstance(axes, tuple) else (axes,)
