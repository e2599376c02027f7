"""Renders a module as text, one line for each nested module.

The functions have the names and arguments of ``easydel.infra.mixins.protocol``. They
read shapes only, so they accept abstract modules. A module that occurs twice, or inside
itself, is rendered once and referenced at the other positions.

>>> print(prettify_nnx(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)))
Sequential(
  (layers): List(
    (0): Linear(in_features=2, out_features=3, bias=True)
  )
)
"""

from collections.abc import Iterator, Mapping
from typing import Any

from flax import nnx

__all__ = ["get_module_repr", "prettify_nnx", "printify_nnx"]


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
    """Yields the modules directly in a node, and containers that hold modules, by
    name."""
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
