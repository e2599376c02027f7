"""Draws trees and rules, with what NumPy makes of the same arrays."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storesvc.format.dtypes import DTYPES
from storesvc.format.grids import Region, part, whole
from storesvc.format.trees import Leaf, Tree
from storesvc_client._mapping.expressions import Expression, Source
from storesvc_client._mapping.planning import MappedTree, plan_mapping
from storesvc_client._mapping.rules import ARITHMETIC, check_rules
from storesvc_client._values.places import Place, copy_elements
from storesvc_proto.v1 import tree_pb2 as pb

Array = NDArray[Any]
Arrays = Mapping[str, Array]


def describe_tree(arrays: Arrays) -> Tree:
    """Returns the tree of arrays, in chunks of about half of each dimension."""
    return Tree(
        tuple(
            Leaf(
                key=key,
                path_kinds="k" * len(key.split("/")),
                kind=pb.LEAF_KIND_ARRAY,
                dtype=array.dtype.name,
                shape=array.shape,
                chunk_shape=tuple(max(1, n // 2) for n in array.shape),
            )
            for key, array in sorted(arrays.items())
        )
    )


def plan(rules: Sequence[Mapping[str, Any]], arrays: Arrays, **more: Any) -> MappedTree:
    """Returns what rules make of arrays."""
    document = {"version": 1, "rules": [*rules], **more}
    return plan_mapping(
        check_rules(document, name="rules"), describe_tree(arrays), name="source"
    )


def build(
    expression: Expression, arrays: Sequence[Array], region: Region | None = None
) -> tuple[Array, int]:
    """Returns the elements of a region, and how many were requested."""
    wanted = whole(expression.shape) if region is None else region
    requests = [*expression.requests(wanted)] if math.prod(expression.shape) else []
    found = [
        part(arrays[source.row], whole(source.shape), needed)
        for source, needed in requests
    ]
    if not math.prod(expression.shape):
        return np.empty(expression.shape, expression.dtype), 0
    values = expression.build(wanted, iter(found))
    assert values.tobytes() == fill_places(expression, arrays, wanted).tobytes()
    return values, sum(each.size for each in found)


def fill_places(
    expression: Expression, arrays: Sequence[Array], region: Region
) -> Array:
    """Returns the elements of a region, each copied to its place once."""
    dtype = DTYPES[expression.dtype]
    shape = tuple(stop - start for start, stop in region)
    gap = 8 * dtype.itemsize
    outer = Place.of_array((math.prod(shape) + 16,), dtype.itemsize)
    whole_place = replace(Place.of_array(shape, dtype.itemsize), start=gap)
    memory = np.zeros(outer.shape, dtype)
    filled = np.zeros(outer.shape, np.int64)

    def view(array: Array, place: Place) -> Array:
        scale = array.itemsize, dtype.itemsize
        at, *strides = (n * scale[0] // scale[1] for n in (place.start, *place.strides))
        found: Array = np.ndarray(
            place.shape, array.dtype, array.view(np.uint8), at, strides
        )
        return found

    for one, inside, place in expression.destinations(region, whole_place):
        if isinstance(one, Source):
            elements = part(arrays[one.row], whole(one.shape), inside)
        else:
            needed = [
                part(arrays[source.row], whole(source.shape), each)
                for source, each in one.requests(inside)
            ]
            elements = one.build(inside, iter(needed))
        copy_elements(view(memory, place), elements)
        view(filled, place)[...] += 1
    assert (filled[8:-8] == 1).all()
    assert not filled[:8].any()
    assert not filled[-8:].any()
    return memory[8:-8].reshape(shape)


def build_all(mapped: MappedTree, arrays: Arrays) -> dict[str, Array]:
    """Returns all leaves of a target."""
    ordered = [arrays[key] for key in sorted(arrays)]
    return {each.leaf.key: build(each.expression, ordered)[0] for each in mapped.leaves}


def draw_region(random: Random, shape: Sequence[int]) -> Region:
    """Draws a part of an array that has elements."""
    starts = [random.randrange(n) for n in shape]
    return tuple(
        (start, random.randint(start + 1, n))
        for start, n in zip(starts, shape, strict=True)
    )


def draw_shape(random: Random, size: int) -> list[int]:
    """Draws a shape of a number of elements."""
    shape = list[int]()
    while size > 1:
        shape.append(random.choice([n for n in range(2, size + 1) if size % n == 0]))
        size //= shape[-1]
        shape += [1] * (random.random() < 0.2)
    random.shuffle(shape)
    return shape


def draw_change(random: Random, array: Array) -> tuple[dict[str, Any], Array] | None:
    """Draws an operation that changes an array by itself, and makes its result."""
    rank, size = array.ndim, array.size
    axis = random.randrange(rank) if rank else 0
    along = array.shape[axis] if rank else 0
    moves = ["transpose", "reshape", "axes", "slice", "pad", "repeat", "cast", "heads"]
    name = random.choice([*moves, *ARITHMETIC])
    if name in ARITHMETIC:
        root: dict[str, Any] = {"axis": axis - rank, "power": 0.5}
        number = along**0.5 if along else random.choice([0.5, -3, 1.1])
        made = getattr(np, name)(array, array.dtype.type(number))
        return {name: root if along else number}, made
    if name == "transpose":
        axes = random.sample(range(rank), rank)
        return {name: axes}, array.transpose(axes)
    if name == "reshape" and size:
        shape = draw_shape(random, size)
        return {name: shape}, array.reshape(shape)
    if name == "axes" and size and rank:
        end = random.randint(axis + 1, rank)
        sizes = draw_shape(random, math.prod(array.shape[axis:end])) or [1]
        shape = [*array.shape[:axis], *sizes, *array.shape[end:]]
        sizes[random.randrange(len(sizes))] = -1
        first = random.choice([axis, axis - rank])
        given = {"axis": first, "count": end - axis, "sizes": sizes}
        return {"reshape_axes": given}, array.reshape(shape)
    if name == "cast":
        return {name: "float64"}, array.astype(np.float64)
    if not along or size > 2_000:
        return None
    if name == "slice":
        start = random.randrange(along)
        stop = random.randint(start + 1, along)
        index = (*[slice(None)] * axis, slice(start, stop))
        return {name: {"axis": axis, "start": start, "stop": stop}}, array[index]
    if name == "pad":
        more = random.randint(0, 3)
        widths = [(0, more if n == axis else 0) for n in range(rank)]
        given = {"axis": axis - rank, "size": along + more, "value": 7}
        return {name: given}, np.pad(array, widths, constant_values=7)
    if name == "repeat":
        return {name: {"axis": axis, "times": 2}}, array.repeat(2, axis)
    if along % 2:
        return None
    heads = random.choice([n for n in range(1, along) if along % (2 * n) == 0])
    half = along // heads // 2
    source = random.choice(["halves", "interleaved"])
    pair = (2, half) if source == "halves" else (half, 2)
    divided = array.reshape(*array.shape[:axis], heads, *pair, *array.shape[axis + 1 :])
    moved = np.swapaxes(divided, axis + 1, axis + 2).reshape(array.shape)
    return {"permute_heads": {"axis": axis, "heads": heads, "from": source}}, moved


STARTS = (0, 0, 1, 8, 10**17)


def draw_range(random: Random, starts: Sequence[int], count: int) -> tuple[int, str]:
    """Draws a placeholder of so many integers, and the first of them."""
    start = random.choice(starts)
    ends = [f"[{start}:]", f"[{start}:{start + count}]"]
    ends += [""] * (not start) + [f"[:{count}]"] * (not start)
    return start, f"{{n:int{random.choice(ends)}}}"


class DrawnMapping:
    """Rules over arrays, and the arrays that they make."""

    def __init__(self, random: Random, starts: Sequence[int] = STARTS) -> None:
        self.starts = starts
        self.arrays: dict[str, Array] = {}
        self.rules: list[dict[str, Any]] = []
        self.wanted: dict[str, Array] = {}
        for number in range(random.randint(1, 3)):
            self._draw_family(random, f"f{number}")

    def _draw_family(self, random: Random, name: str) -> None:
        """Draws layers of several arrays each, and one rule for all."""
        layers, width = random.randint(1, 4), random.randint(1, 3)
        shape = [random.randint(1, 4) for _ in range(random.randint(1, 3))]
        parts = {key: draw_range(random, self.starts, layers) for key in "abc"[:width]}
        streams: dict[int, list[Array]] = {}
        for layer in range(layers):
            streams[layer] = []
            for key, (first, _) in parts.items():
                start = 1_000.0 * len(self.arrays)
                numbers: Array = start + np.arange(math.prod(shape), dtype=np.float32)
                streams[layer].append(numbers.astype(np.float32).reshape(shape))
                self.arrays[f"{name}/{first + layer}/{key}"] = streams[layer][-1]
        operations, names = list[dict[str, Any]](), ["n"]
        for _ in range(random.randint(0, 5)):
            found = self._draw_operation(random, streams, names)
            if found is not None:
                operation, streams = found
                operations.append(operation)
        arrays = len(next(iter(streams.values())))
        places = [draw_range(random, self.starts, len(streams)) for _ in range(arrays)]
        if not names:
            places = [(0, "0")] * arrays
        sources = [f"{name}/{place}/{key}" for key, (_, place) in parts.items()]
        targets = [f"new/{name}/{place}/{at}" for at, (_, place) in enumerate(places)]
        self.rules.append({"from": sources, "to": targets, "operations": operations})
        for layer, arrays_made in streams.items():
            for at, ((first, _), array) in enumerate(
                zip(places, arrays_made, strict=True)
            ):
                self.wanted[f"new/{name}/{first + layer}/{at}"] = array

    @staticmethod
    def _draw_operation(
        random: Random, streams: dict[int, list[Array]], names: list[str]
    ) -> tuple[dict[str, Any], dict[int, list[Array]]] | None:
        first = next(iter(streams.values()))
        shape, axis = first[0].shape, 0
        alike = {(each.shape, each.dtype) for each in first} == {
            (shape, first[0].dtype)
        }
        kind = random.choice(["change", "change", "change", "axis", "list"])
        if kind == "axis" and names and alike:
            axis = random.randint(0, len(shape))
            layers = [[*each] for each in zip(*streams.values(), strict=True)]
            names.clear()
            stacked = [np.stack(each, axis) for each in layers]
            return {"stack": {"axis": axis, "by": "n"}}, {0: stacked}
        if kind == "axis" and not names and shape and shape[0] and alike:
            names.append("n")
            return {"unstack": {"axis": 0, "by": "n"}}, {
                n: [each.take(n, 0) for each in first] for n in range(shape[0])
            }
        if kind == "list" and len(first) > 1 and shape and alike:
            if random.random() < 0.5:
                in_turn = {
                    n: [np.stack(each, 1).reshape(-1, *shape[1:])]
                    for n, each in streams.items()
                }
                return {"interleave": {"axis": 0}}, in_turn
            joined = {n: [np.concatenate(each, 0)] for n, each in streams.items()}
            return {"concatenate": {"axis": 0}}, joined
        if kind == "list" and len(first) == 1 and shape and shape[-1] > 1:
            parts = random.randint(2, 4)
            if shape[-1] % parts == 0 and random.random() < 0.5:
                return {"deinterleave": {"axis": -1, "parts": parts}}, {
                    n: [each[0][..., part::parts] for part in range(parts)]
                    for n, each in streams.items()
                }
            cut = random.randrange(1, shape[-1])
            given = {"axis": -1, "sizes": [cut, shape[-1] - cut]}
            return {"split": given}, {
                n: [*np.split(each[0], [cut], axis=-1)] for n, each in streams.items()
            }
        if kind == "change" and alike:
            state = random.getstate()
            changed: dict[int, list[Array]] = {}
            operation = None
            for layer, arrays in streams.items():
                changed[layer] = []
                for array in arrays:  # the same draw for each
                    random.setstate(state)
                    found = draw_change(random, array)
                    if found is None:
                        return None
                    operation = found[0]
                    changed[layer].append(found[1])
            return None if operation is None else (operation, changed)
        return None
