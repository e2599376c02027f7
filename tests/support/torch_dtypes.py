"""Values of the shape of torch's dtypes, as inputs: torch is not installed here."""

from typing import Final

_NAMES: Final[dict[int, str]] = {}


class dtype:  # noqa: N801 - torch's own name
    """A value without attributes, that differs from others in its repr alone."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"torch.{_NAMES[id(self)]}"


dtype.__module__ = "torch"


def torch_dtype(name: str) -> dtype:
    """Returns a dtype of torch."""
    made = dtype()
    _NAMES[id(made)] = name
    _KEPT.append(made)  # its id stays its own
    return made


_KEPT: Final[list[dtype]] = []
FLOAT32: Final = torch_dtype("float32")
BFLOAT16: Final = torch_dtype("bfloat16")
