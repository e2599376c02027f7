"""Stores the structure of an NNX module as JSON instead of as a pickled GraphDef.

Four guarantees:

* **A document is data.** No name in it is imported or resolved by attribute access;
  names are looked up in a table of this library's own imports and of what the caller
  allows.
* **A document is portable.** It describes modules, not one flax release's node lists.
* **A value that cannot be written is a hole**: a description, which only a template of
  the same structure can fill.
* **A hostile document is rejected** with ``StructureError``, within bounded memory.

>>> document = encode_graphdef(nnx.graphdef(model))
>>> nnx.merge(decode_graphdef(document, allow=[MyModel]), state)

Imports flax, and from the client `_pytree` and the layers below it. Start with
`encoder.py` and `decoder.py`.
"""

from storesvc_client.errors import StructureError
from storesvc_client.trees.structure.comparison import (
    ABSENT,
    Difference,
    common_differences,
    differences,
    fingerprint,
    is_execution,
    merge_configs,
    merge_layers,
    rows,
)
from storesvc_client.trees.structure.decoder import decode_graphdef
from storesvc_client.trees.structure.encoder import encode_graphdef
from storesvc_client.trees.structure.settings import (
    Opaque,
    decode_data,
    encode_data,
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
