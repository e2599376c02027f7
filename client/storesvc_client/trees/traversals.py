"""Functions on NNX state trees: naming, merging, recreating RNG values.

The functions have the names, arguments and documented errors of
``easydel.utils.traversals`` and give the same results, except where those lose data.
Three guarantees:

* **Inputs are never modified.** Every result consists of new containers and new
  Variables; arrays, which are immutable, are shared. Running a module built from a
  result never advances a count in the input.
* **Integer and string keys are different keys.** ``layers[0]`` and ``layers["0"]`` are
  two paths: NNX sorts them differently, and a layer list whose keys became strings
  would merge as 0, 1, 10, 11, 2, ...
* **Nothing is overwritten.** Two values with one path, or two leaves with one name, are
  rejected.

>>> graphdef = create_graphdef(nnx.Linear, in_features=2, out_features=3)
>>> state = init_graphstate(nnx.Linear, in_features=2, out_features=3)
>>> tree = {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}
>>> model = merge_by_path(graphdef, merge_state_and_tree(tree, state))
"""

from storesvc_client._pytree.paths import (
    GraphPath,
    deepcopy_model,
    flatten_dict,
    flatten_tree,
    int_key_to_string,
    is_flatten,
    named_tree_map,
    specs_to_name_sharding,
    string_key_to_int,
    tree_apply,
    tree_path_to_string,
    unflatten_dict,
)
from storesvc_client.trees.nnx.graphs import (
    GraphState,
    graph_leaves,
    graph_paths,
    merge_by_path,
    refine_graphs,
)
from storesvc_client.trees.nnx.lazy_init import (
    create_graphdef,
    init_graphstate,
    nnx_init,
)
from storesvc_client.trees.nnx.merging import merge_model_and_tree, merge_state_and_tree
from storesvc_client.trees.nnx.rng_values import (
    MetaValueRecreator,
    recreate_meta_values,
)
from storesvc_client.trees.nnx.state_diff import (
    StateValidationResult,
    differentiate_state,
    redefine_state,
    validate_state,
)

__all__ = [
    "GraphPath",
    "GraphState",
    "MetaValueRecreator",
    "StateValidationResult",
    "create_graphdef",
    "deepcopy_model",
    "differentiate_state",
    "diffrentiate_state",
    "flatten_dict",
    "flatten_tree",
    "graph_leaves",
    "graph_paths",
    "init_garphstate",
    "init_graphstate",
    "int_key_to_string",
    "is_flatten",
    "merge_by_path",
    "merge_model_and_tree",
    "merge_state_and_tree",
    "named_tree_map",
    "nnx_init",
    "recreate_meta_values",
    "redefine_state",
    "refine_graphs",
    "specs_to_name_sharding",
    "string_key_to_int",
    "tree_apply",
    "tree_path_to_string",
    "unflatten_dict",
    "validate_state",
]

diffrentiate_state = differentiate_state
init_garphstate = init_graphstate
