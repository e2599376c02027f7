"""Operations that compute: arithmetic, merged adapters, quantized weights as numbers.

All other expressions move elements. Each of these makes a region of its array of the
regions of others that it needs, and every element in one order of operations: it has
the same bits whatever region it is part of. So a restore returns the same values on any
devices. No way back returns every bit: the parts are not in the result.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np

from storesvc.format.dtypes import DTYPES, is_floating
from storesvc.format.grids import Region, part
from storesvc_client._mapping.expressions import (
    Array,
    Arrays,
    Expression,
    Requests,
    Shape,
    Source,
    Transpose,
    check_axis,
)

BLOCK_ELEMENTS: Final = 32 << 10
"""Elements of a product that are summed at a time: they fit a cache."""

ADAPTED: Final = ("float32", "bfloat16", "float16")
"""Dtypes of weights that adapters are merged into, and of adapters."""

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the 4 bits of an MXFP4 element; with the highest bit set they are
negative."""

MXFP4_BYTES: Final = 16
"""Bytes of a block of MXFP4, which has two elements in each byte."""


@dataclass(frozen=True)
class _Computed(Expression):
    """An array that is computed of others."""

    parts: tuple[Expression, ...]

    @abstractmethod
    def back(self, region: Region) -> Sequence[Region]:
        """Returns the region of each part that a region needs."""

    @abstractmethod
    def compute(self, region: Region, *parts: Array) -> Array:
        """Returns the elements of a region, from the parts."""

    @property
    def chunk_shape(self) -> Shape:
        return self.parts[0].chunk_shape

    def sources(self) -> Iterator[Source]:
        return chain.from_iterable(each.sources() for each in self.parts)

    def requests(self, region: Region) -> Requests:
        for each, needed in zip(self.parts, self.back(region), strict=True):
            yield from each.requests(needed)

    def build(self, region: Region, arrays: Arrays) -> Array:
        needed = zip(self.parts, self.back(region), strict=True)
        found = [each.build(inside, arrays) for each, inside in needed]
        with np.errstate(over="ignore", invalid="ignore"):  # infinite, as elsewhere
            return self.compute(region, *found).astype(DTYPES[self.dtype])


@dataclass(frozen=True)
class Arithmetic(_Computed):
    """Each element and one number, added, subtracted, multiplied or divided in float32,
    or in float64 if that is the dtype, and then rounded to the dtype."""

    operator: str
    number: float

    @classmethod
    def make(
        cls, operator: str, inner: Expression, operand: float | Mapping[str, Any]
    ) -> "Arithmetic":
        """Returns an array with an operation on each element.

        Args:
            operator: Name of the operation.
            inner: The array.
            operand: The number; or the axis whose size to a power it is, and a dtype
                that this is rounded to.
        """
        if not is_floating(inner.dtype):
            raise ValueError(
                f"{operator}: expected a floating-point dtype, got {inner}"
            )
        exact = np.promote_types(DTYPES[inner.dtype], np.float32)
        with np.errstate(all="ignore"):
            if isinstance(operand, Mapping):
                size = inner.shape[check_axis(operator, inner, operand["axis"])]
                power = np.float64(size) ** operand["power"]
                operand = power.astype(DTYPES[operand.get("dtype", "float64")])
            number = float(exact.type(operand))
        if not np.isfinite(number) or (
            not number and operator in ("multiply", "divide")
        ):
            raise ValueError(
                f"{operator}: expected a finite number, other than 0 to multiply or "
                f"divide {inner}, got {number}"
            )
        return cls(inner.dtype, inner.shape, (inner,), operator, number)

    def back(self, region: Region) -> Sequence[Region]:
        return (region,)

    def compute(self, region: Region, *parts: Array) -> Array:  # noqa: ARG002 - as in all
        exact = np.promote_types(DTYPES[self.dtype], np.float32)
        found = parts[0].astype(exact)
        getattr(np, self.operator)(found, exact.type(self.number), out=found)
        return found


@dataclass(frozen=True)
class LoraMerge(_Computed):
    """Weights with a LoRA adapter: ``base + (b @ a) * scale``, as PEFT merges it.

    The sum over the rank is in its order and in float32; each product is added with one
    rounding. That is what the matrix product of torch does on a CPU, up to a rank of
    192, with some 12 inputs and outputs or more: the result has the same bits there.
    Else the product differs in its last digits, as torch does between two machines. It
    is scaled in float32, gets the dtype of the adapter, and is added in float32.
    """

    scale: float

    @classmethod
    def make(
        cls,
        parts: Sequence[Expression],
        *,
        scale: float,
        fan_in_fan_out: bool = False,
    ) -> "LoraMerge":
        """Returns weights (out, in) with an adapter of a (rank, in) and b (out, rank);
        axes before these count several such arrays.

        Args:
            parts: The weights, a and b.
            scale: Number that the product is multiplied by.
            fan_in_fan_out: The weights are (in, out).
        """
        base, a, b = parts
        if {a.dtype, b.dtype, base.dtype} - {*ADAPTED} or a.dtype != b.dtype:
            raise ValueError(
                f"lora_merge: expected arrays of {', '.join(ADAPTED)}, and a and b of "
                f"one of them, got base {base}, a {a}, b {b}"
            )
        *lead, rows, columns = base.shape if len(base.shape) > 1 else (0, 0)
        inputs, outputs = (rows, columns) if fan_in_fan_out else (columns, rows)
        rank = a.shape[-2] if len(a.shape) > 1 else 0
        wanted = [*lead, rank, inputs], [*lead, outputs, rank]
        if not rank or wanted != ([*a.shape], [*b.shape]):
            axes = "(in, out)" if fan_in_fan_out else "(out, in)"
            raise ValueError(
                f"lora_merge: expected base {axes}, a (rank, in) and b (out, rank), "
                f"got base {base}, a {a}, b {b}; transpose before it turns all three, "
                "fan_in_fan_out = true is for a base (in, out)"
            )
        if fan_in_fan_out:
            order = [*range(len(lead)), len(lead) + 1, len(lead)]
            a, b = Transpose.make(b, order), Transpose.make(a, order)
        return cls(base.dtype, base.shape, (base, a, b), scale)

    def back(self, region: Region) -> Sequence[Region]:
        *lead, rows, columns = region
        rank = (0, self.parts[1].shape[-2])
        return region, (*lead, rank, columns), (*lead, rows, rank)

    def compute(self, region: Region, *parts: Array) -> Array:  # noqa: ARG002 - as in all
        base, a, b = parts
        change = _multiply(b, a) * np.float32(self.scale)
        rounded = change.astype(a.dtype).astype(np.float32)
        return base.astype(np.float32) + rounded


def _multiply(b: Array, a: Array) -> Array:
    """Returns b @ a. A BLAS would sum in an order that depends on the shapes."""
    found = np.zeros((*b.shape[:-1], a.shape[-1]), np.float32)
    count = max(1, BLOCK_ELEMENTS // a.shape[-1])
    # products are exact: of float32 in float64, of smaller dtypes in float32
    exact = np.float64 if a.dtype == np.float32 else np.float32
    for index in np.ndindex(b.shape[:-2]):
        left, right = b[index].astype(exact), a[index].astype(exact)
        for start in range(0, len(left), count):
            rows, total = (each[start : start + count] for each in (left, found[index]))
            added = np.empty(total.shape, exact)
            for k in range(len(right)):
                np.multiply(rows[:, k : k + 1], right[k : k + 1], out=added)
                added += total
                total[...] = added
    return found


@dataclass(frozen=True)
class Dequantize(_Computed):
    """Small numbers times the scale of their block, in float32."""

    block: Shape

    @classmethod
    def make(
        cls, parts: Sequence[Expression], *, block: Sequence[int], to: str
    ) -> "Dequantize":
        """Returns values times scales, of which each is for a block.

        Args:
            parts: The values and the scales.
            block: Shape of a block; the last ones may be smaller.
            to: Dtype of the result.
        """
        values, scales = parts
        small = (*(name for name in DTYPES if name.startswith("float8_")), "int8")
        is_scale = is_floating(scales.dtype) and scales.dtype != "float64"
        if values.dtype not in small or not is_scale or not is_floating(to):
            raise ValueError(
                "dequantize: expected values of float8 or int8, scales of float32 or "
                f"smaller and a floating-point dtype to, got values {values}, scales "
                f"{scales} to {to}"
            )
        if min([1, *block]) < 1 or len(block) != len(values.shape):
            raise ValueError(
                f"dequantize: expected a block of {len(values.shape)} sizes of at "
                f"least 1, got {list(block)}"
            )
        wanted = [-(-n // size) for n, size in zip(values.shape, block, strict=True)]
        if wanted != [*scales.shape]:
            raise ValueError(
                f"dequantize: expected scales {wanted} of values {values} in blocks "
                f"{list(block)}, got {scales}"
            )
        return cls(to, values.shape, (values, scales), tuple(block))

    def back(self, region: Region) -> Sequence[Region]:
        sizes = zip(region, self.block, strict=True)
        return region, tuple((a // n, -(-b // n)) for (a, b), n in sizes)

    def compute(self, region: Region, *parts: Array) -> Array:
        values, scales = (each.astype(np.float32) for each in parts)
        for axis, ((start, stop), size) in enumerate(
            zip(region, self.block, strict=True)
        ):
            places = np.arange(start, stop) // size - start // size
            scales = scales.take(places, axis)
        return values * scales


@dataclass(frozen=True)
class DequantizeMxfp4(_Computed):
    """Elements of 4 bits times the power of two of their block."""

    @classmethod
    def make(cls, parts: Sequence[Expression], *, to: str) -> "DequantizeMxfp4":
        """Returns the elements of blocks (..., count, 16), two in a byte with the first
        in its lower half, times two to the power of scales (..., count) - 127."""
        blocks, scales = parts
        *lead, count, size = blocks.shape if len(blocks.shape) > 1 else (0, 0)
        fits = size == MXFP4_BYTES and [*lead, count] == [*scales.shape]
        if not fits or {blocks.dtype, scales.dtype} != {"uint8"} or not is_floating(to):
            raise ValueError(
                "dequantize_mxfp4: expected blocks (..., count, 16) and scales (..., "
                f"count) of uint8 and a floating-point dtype, got blocks {blocks}, "
                f"scales {scales} to {to}"
            )
        return cls(to, (*lead, count * 2 * size), (blocks, scales))

    @property
    def chunk_shape(self) -> Shape:
        *lead, count, _ = self.parts[0].chunk_shape
        return (*lead, count * 2 * MXFP4_BYTES)

    def back(self, region: Region) -> Sequence[Region]:
        *lead, (start, stop) = region
        size = 2 * MXFP4_BYTES
        blocks = (*lead, (start // size, -(-stop // size)))
        return (*blocks, (0, MXFP4_BYTES)), blocks

    def compute(self, region: Region, *parts: Array) -> Array:
        blocks, scales = parts
        table = np.array([*E2M1, *(-value for value in E2M1)], np.float32)
        values = table[np.stack([blocks & 15, blocks >> 4], -1)]
        powers = scales.astype(np.int32)[..., None, None] - 127
        made = np.ldexp(values, powers).reshape(*scales.shape[:-1], -1)
        (first, last), size = self.back(region)[1][-1], 2 * MXFP4_BYTES
        return part(made, (*region[:-1], (first * size, last * size)), region)
