"""Decodes a document to a GraphDef.

Without a template, all values come from the document and the table of names. With a
template, the document is only compared with it, and the result is the template's own
structure: functions and meshes are the caller's.
"""

from typing import Any, Final

from flax import nnx

from storesvc_client._pytree.leaves import list_problems
from storesvc_client._pytree.paths import mapping_leaves
from storesvc_client.errors import InvalidRequestError, MismatchError, StructureError
from storesvc_client.trees.structure.allowed_names import Allowed, Table
from storesvc_client.trees.structure.builder import Builder
from storesvc_client.trees.structure.comparison import differences
from storesvc_client.trees.structure.encoder import FORMAT, encode_graphdef
from storesvc_client.trees.structure.limits import JSON, check_json
from storesvc_client.trees.structure.plain import tag_of
from storesvc_client.trees.structure.skeleton import skeleton_of, with_placeholders
from storesvc_client.trees.structure.structure_errors import shown, structure_error
from storesvc_client.trees.structure.values import FAILURES

_PLACE: Final = "the structure"


def decode_graphdef(
    document: JSON, *, allow: Allowed = (), template: Any = None
) -> "nnx.GraphDef[Any]":
    """Returns the structure of a document in the form of the installed flax release.

    Args:
        document: A document that ``encode_graphdef`` returned.
        allow: Your classes and functions that the document names; a mapping if their
            names changed since the save.
        template: A module of the same structure, abstract or not, or its GraphDef. Its
            values are used, including those that a document cannot hold.

    Raises:
        StructureError: The document is malformed, names something not allowed, or only
            describes a value, for which a template is needed.
        MismatchError: The template has another structure; the message lists where.
        InvalidRequestError: ``allow`` or ``template`` has an unsupported type.
    """
    check_json(document, _PLACE)  # first: what follows recurses without a limit
    root = root_of(document)
    if template is not None:
        return _of_template(document, template)
    builder = Builder(Table(allow))
    try:
        graphdef, state = nnx.split(builder.child(root))
        held = _paths(state)
    except StructureError:
        raise
    except FAILURES as e:
        what = f"{type(e).__name__}: {e}"
        raise structure_error(_PLACE, "a module that flax can split", what) from e
    # The document lists its leaves in flax's order. A document with another order, or
    # with leaves that flax does not see, was not written by the encoder.
    if held != builder.paths:
        raise structure_error(
            _PLACE,
            f"{len(builder.paths)} leaves",
            f"{len(held)} leaves, or different ones, from flax",
        )
    return graphdef


def root_of(document: JSON) -> JSON:
    """Returns the root of a document.

    Raises:
        StructureError: It is another kind of document.
    """
    if not isinstance(document, dict) or "root" not in document:
        raise structure_error(_PLACE, "a document", shown(document))
    if document.get("format") != FORMAT:
        advice = "a newer release of this library may read it"
        raise structure_error(_PLACE, FORMAT, shown(document.get("format")), advice)
    root = document["root"]
    if not isinstance(root, dict) or tag_of(root, ("node", "container")) is None:
        raise structure_error(_PLACE, "a module or container at its root", shown(root))
    return root


def _paths(state: Any) -> list[tuple[Any, ...]]:
    """Returns the paths at which flax found leaves, in order; a root may itself be a
    leaf."""
    return (
        list(mapping_leaves(state.raw_mapping))
        if isinstance(state, nnx.State)
        else [()]
    )


def _of_template(document: JSON, template: Any) -> "nnx.GraphDef[Any]":
    graphdef = template
    if not isinstance(template, nnx.GraphDef):
        if not isinstance(template, (nnx.Pytree, dict, list, tuple)):
            raise InvalidRequestError(
                f"template: expected a module or its GraphDef, got a "
                f"{type(template).__name__}"
            )
        graphdef = nnx.split(template)[0]
    if found := differences(document, encode_graphdef(graphdef)):
        raise MismatchError(
            f"template: expected the saved structure, got differences: "
            f"{list_problems([*map(str, found)])}; give a model like the saved one"
        )
    return nnx.split(with_placeholders(skeleton_of(graphdef)[0]))[0]
