"""The structure of an NNX module as data: JSON documents instead of pickled GraphDefs.

Four things it keeps true:

* **A document is data.** No name in it is imported or walked: it is looked up in a
  table made of this library's own imports and of what the caller allows.
* **A document is portable.** It describes modules, not how a flax release lists them.
* **What cannot be written down is a hole**: a description, filled only by a template
  of the same structure.
* **A hostile document is refused**, with one class of error and within bounds.

>>> document = encode_graphdef(nnx.graphdef(model))
>>> nnx.merge(decode_graphdef(document, allow=[MyModel]), state)

It imports flax, and of the client `_pytree` and what lies below it. Begin with
`encoding.py` and `decoding.py`.
"""

from storesvc_client.errors import StructureError
from storesvc_client.trees.structure.comparing import (
    common_differences,
    differences,
    fingerprint,
    rows,
)
from storesvc_client.trees.structure.data import Opaque, decode_data, encode_data
from storesvc_client.trees.structure.decoding import decode_graphdef
from storesvc_client.trees.structure.difference_texts import (
    ABSENT,
    Difference,
    is_execution,
    merge_configs,
    merge_layers,
)
from storesvc_client.trees.structure.encoding import encode_graphdef
from storesvc_client.trees.structure.settings import (
    encode_settings,
    plain_settings,
)

__all__ = [
    "ABSENT",
    "Difference",
    "Opaque",
    "StructureError",
    "common_differences",
    "decode_data",
    "decode_graphdef",
    "differences",
    "encode_data",
    "encode_graphdef",
    "encode_settings",
    "fingerprint",
    "is_execution",
    "merge_configs",
    "merge_layers",
    "plain_settings",
    "rows",
]
