"""From a document to a GraphDef.

Without a template, everything comes from the document and from the table of names.
With one, the document is only compared with it: what is restored is the template's own
structure, so functions and meshes are the caller's, and nothing of the document's.
"""

from typing import Any, Final

from flax import nnx

from storesvc_client._pytree.leaves import list_problems
from storesvc_client._pytree.paths import mapping_leaves
from storesvc_client.errors import InvalidRequestError, MismatchError, StructureError
from storesvc_client.trees.structure.allowed_names import Allowed, Table
from storesvc_client.trees.structure.building import Builder
from storesvc_client.trees.structure.comparing import differences
from storesvc_client.trees.structure.encoding import FORMAT, encode_graphdef
from storesvc_client.trees.structure.hollow import filled, hollow
from storesvc_client.trees.structure.limits import JSON, check_json
from storesvc_client.trees.structure.plain import tag_of
from storesvc_client.trees.structure.refusals import refusal, shown
from storesvc_client.trees.structure.values import FAILURES

_PLACE: Final = "the structure"


def decode_graphdef(
    document: JSON, *, allow: Allowed = (), template: Any = None
) -> "nnx.GraphDef[Any]":
    """Returns the structure of a document, as this release of flax lists it.

    Args:
        document: What ``encode_graphdef`` returned.
        allow: Your classes and functions that it names; or a mapping, where the names
            have changed since.
        template: A module of the same structure, abstract or not, or its GraphDef.
            Its values are used, as those that a document cannot hold come from there.

    Raises:
        StructureError: The document is malformed, names what is not allowed, or only
            describes what a template must have.
        MismatchError: The template has another structure; says where.
        InvalidRequestError: ``allow`` or ``template`` holds something else.
    """
    check_json(document, _PLACE)
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
        raise refusal(_PLACE, "a module that flax can split", what) from e
    if held != builder.paths:
        raise refusal(
            _PLACE, f"{len(builder.paths)} leaves", f"{len(held)}, or others, of flax"
        )
    return graphdef


def root_of(document: JSON) -> JSON:
    """Returns the root of a document.

    Raises:
        StructureError: It is a document of something else.
    """
    if not isinstance(document, dict) or "root" not in document:
        raise refusal(_PLACE, "a document", shown(document))
    if document.get("format") != FORMAT:
        advice = "a newer release of this library may read it"
        raise refusal(_PLACE, FORMAT, shown(document.get("format")), advice)
    root = document["root"]
    if not isinstance(root, dict) or tag_of(root, ("node", "container")) is None:
        raise refusal(_PLACE, "a module or container at its root", shown(root))
    return root


def _paths(state: Any) -> list[tuple[Any, ...]]:
    """Where flax found leaves, in order; a root may be a leaf itself."""
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
            f"the template has another structure: {list_problems([*map(str, found)])}"
        )
    return nnx.split(filled(hollow(graphdef)[0]))[0]
