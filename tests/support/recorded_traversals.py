"""The answers of easydel 0.3.0 to the cases of ``tests.support.golden_traversals``."""

from typing import Any

__all__ = ["RECORDED"]

RECORDED: dict[str, Any] = {
    "specs_over_the_mesh_of_the_context": {
        "a": ("NamedSharding", {"x": 4, "y": 2}, "P('y',)")
    },
    "graphdef": [("GraphDef", 4), True, False],
    "copy_of_a_module": [
        (
            "module",
            "Small",
            (
                "State",
                {
                    "dropout": {
                        "rngs": {
                            "count": ("RngCount", ("uint32", (), 0), "default"),
                            "key": (
                                "RngKey",
                                ("key", "threefry2x32", [4146024105, 2718843009]),
                                "default",
                            ),
                        }
                    },
                    "linear": {
                        "bias": ("Param", ("float32", (2,), [0.0, 0.0])),
                        "kernel": (
                            "Param",
                            ("float32", (2, 2), [[0.0, 0.0], [0.0, 0.0]]),
                        ),
                    },
                },
            ),
        ),
        ("Param", ("float32", (2, 2), [[1.0, 1.0], [1.0, 1.0]])),
        False,
    ],
    "redefine_counts_and_keys": "raises TypeError",
    "recreate_raw_keys": [
        {
            ("k",): ("RngKey", ("uint32", (2,), [1832780943, 270669613]), "t"),
            ("l",): ("RngKey", ("uint32", (2,), [3187376881, 129218101]), "t"),
        },
        {
            ("k",): ("RngKey", ("uint32", (2,), [3625411723, 1954958720]), "t"),
            ("l",): ("RngKey", ("uint32", (2,), [1294055386, 3790878917]), "t"),
        },
    ],
    "recreate_with_the_default_seed": True,
    "recreate_with_seed_0": True,
    "recreate_counts_and_keys": {
        ("a", "count"): ("RngCount", ("uint32", (), 0), "t"),
        ("a", "key"): ("RngKey", ("uint32", (2,), [1832780943, 270669613]), "t"),
        ("b", "count"): ("RngCount", ("uint32", (), 1), "t"),
        ("b", "key"): ("RngKey", ("uint32", (2,), [3187376881, 129218101]), "t"),
    },
    "recreate_and_look_at_the_input": [
        True,
        [True, True],
        {
            ("dropout", "rngs", "count"): ("RngCount", ("uint32", (), 0), "default"),
            ("dropout", "rngs", "key"): (
                "RngKey",
                ("uint32", (2,), [1832780943, 270669613]),
                "default",
            ),
        },
    ],
    "recreator": [
        ("uint32", (), 0),
        ("uint32", (2,), [1832780943, 270669613]),
        ("uint32", (), 1),
        ("uint32", (2,), [3187376881, 129218101]),
    ],
    "recreator_with_the_default_seed": True,
    "refine_and_look_for_the_input": [True, True],
    "refine_the_parts_of_a_module": (
        "module",
        "Small",
        (
            "State",
            {
                "dropout": {
                    "rngs": {
                        "count": ("RngCount", ("uint32", (), 0), "default"),
                        "key": (
                            "RngKey",
                            ("key", "threefry2x32", [4146024105, 2718843009]),
                            "default",
                        ),
                    }
                },
                "linear": {
                    "bias": ("Param", ("float32", (2,), [0.0, 0.0])),
                    "kernel": ("Param", ("float32", (2, 2), [[1.0, 1.0], [1.0, 1.0]])),
                },
            },
        ),
    ),
    "merge_a_tree_with_a_leaf_too_few": (
        "State",
        {
            "dropout": {
                "rngs": {
                    "count": ("RngCount", ("uint32", (), 0), "default"),
                    "key": (
                        "RngKey",
                        ("uint32", (2,), [1832780943, 270669613]),
                        "default",
                    ),
                }
            },
            "linear": {
                "bias": ("Param", ("float32", (2,), [6.0, 6.0])),
                "kernel": ("Param", None),
            },
        },
    ),
    "merge_a_tree_of_another_shape": (
        "State",
        {
            "dropout": {
                "rngs": {
                    "count": ("RngCount", ("uint32", (), 0), "default"),
                    "key": (
                        "RngKey",
                        ("uint32", (2,), [1832780943, 270669613]),
                        "default",
                    ),
                }
            },
            "linear": {
                "bias": ("Param", ("float32", (2,), [6.0, 6.0])),
                "kernel": (
                    "Param",
                    ("float32", (7,), [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
                ),
            },
        },
    ),
    "merge_a_tree_beside_statistics": "raises ValueError",
    "merge_a_tree_with_digits_for_integers": [
        0.0,
        1.0,
        2.0,
        3.0,
        4.0,
        5.0,
        6.0,
        7.0,
        8.0,
        9.0,
        10.0,
        11.0,
    ],
    "merge_a_tree_and_look_at_the_state": [
        True,
        ("Param", ("float32", (2, 2), [[5.0, 5.0], [5.0, 5.0]])),
    ],
    "merge_a_model": [
        False,
        (
            "module",
            "Small",
            (
                "State",
                {
                    "dropout": {
                        "rngs": {
                            "count": ("RngCount", ("uint32", (), 0), "default"),
                            "key": (
                                "RngKey",
                                ("uint32", (2,), [1832780943, 270669613]),
                                "default",
                            ),
                        }
                    },
                    "linear": {
                        "bias": ("Param", ("float32", (2,), [6.0, 6.0])),
                        "kernel": (
                            "Param",
                            ("float32", (2, 2), [[5.0, 5.0], [5.0, 5.0]]),
                        ),
                    },
                },
            ),
        ),
    ],
    "merge_a_model_and_look_at_it": (
        "module",
        "Small",
        (
            "State",
            {
                "dropout": {
                    "rngs": {
                        "count": ("RngCount", ("uint32", (), 0), "default"),
                        "key": (
                            "RngKey",
                            ("uint32", (2,), [1832780943, 270669613]),
                            "default",
                        ),
                    }
                },
                "linear": {
                    "bias": ("Param", ("float32", (2,), [6.0, 6.0])),
                    "kernel": ("Param", ("float32", (2, 2), [[5.0, 5.0], [5.0, 5.0]])),
                },
            },
        ),
    ),
    "flax_merges_by_sorted_position": (
        "Param",
        ("float32", (2, 2), [[1.0, 1.0], [1.0, 1.0]]),
    ),
    "flax_permutes_layers_under_text": [
        0.0,
        1.0,
        10.0,
        11.0,
        2.0,
        3.0,
        4.0,
        5.0,
        6.0,
        7.0,
        8.0,
        9.0,
    ],
    "flax_shares_variables_with_the_state": ("RngCount", ("uint32", (), 1), "default"),
    "path_as_a_tuple": ("a", "3", "1", "x", "7"),
    "path_with_slashes": "a/3/1/x/7",
    "path_with_dots": "a.0",
    "path_that_is_empty": [(), ""],
    "path_of_a_foreign_key": "raw/('t', 1)",
    "path_with_the_separator_in_a_key": ["a/b", "a/b"],
    "path_of_a_state": [
        "dropout/rngs/count/value",
        "dropout/rngs/key/value",
        "linear/bias/value",
        "linear/kernel/value",
    ],
    "flatten_tree_to_tuples": {("a", "0"): 1, ("a", "1", "b"): 2, ("c", "0"): 3},
    "flatten_tree_to_text": {"a.0": 1, "a.1.b": 2, "c.0": 3},
    "flatten_tree_skips_none": {"b": 1},
    "flatten_tree_up_to_leaves": {"a": None, "b": [1]},
    "flatten_tree_with_two_leaves_of_one_name": {"a/b": 1},
    "flatten_tree_with_an_integer_beside_its_text": "raises ValueError",
    "flatten_tree_of_a_leaf": {"": 5},
    "map_to_names": {"a": ["a/0", "a/1"], "b": {"c": "b/c"}},
    "map_with_two_trees": {"a": [["a.0", 11], ["a.1", 22]]},
    "map_to_tuple_names": {"a": [("a", "0")]},
    "map_up_to_leaves": {"a": ("a", 2)},
    "apply": {"a": 2, "b": {"c": "2"}},
    "apply_to_subtrees": {"a": ["b", "c"]},
    "apply_with_a_key_too_few": "raises ValueError",
    "specs_over_a_mesh": {
        "a": ("NamedSharding", {"x": 4, "y": 2}, "P('x',)"),
        "b": None,
        "c": [
            ("NamedSharding", {"x": 4, "y": 2}, "P()"),
            ("NamedSharding", {"x": 4, "y": 2}, "P(('x', 'y'),)"),
        ],
    },
    "specs_without_a_mesh": "raises ValueError",
    "specs_of_an_unknown_axis": "raises ValueError",
    "is_flatten": [False, False, True, True, False, False],
    "is_flatten_of_a_list": "raises AttributeError",
    "flatten_dict": {("a", "b"): 1, ("d",): 2, (5, "x"): 3},
    "flatten_dict_with_empty_nodes": {
        ("a", "b"): 1,
        ("a", "c"): "a _EmptyNode",
        ("d",): "a _EmptyNode",
    },
    "flatten_dict_of_nothing": [{}, {}],
    "flatten_dict_to_text": {"a.b": 1, "5.x": 3},
    "flatten_dict_to_text_with_empty_nodes": {"a.b": 1},
    "flatten_dict_up_to_leaves": {("a", "b"): {"c": 1}},
    "flatten_dict_takes_lists_for_leaves": {("a",): [1, {"b": 2}]},
    "flatten_dict_of_a_list": "raises AssertionError",
    "flatten_dict_of_a_flat_one_to_text": "raises TypeError",
    "flatten_dict_of_a_state": {
        ("a", "b"): ("Param", ("float32", (1,), [1.0])),
        (0,): ("Param", ("float32", (1,), [1.0])),
    },
    "flatten_dict_of_a_state_to_text": {"a/b": ("Param", ("float32", (1,), [1.0]))},
    "flatten_dict_of_a_state_with_integers_to_text": "raises TypeError",
    "flatten_dict_of_a_state_with_fumap": {(): ("State", {"a": 1})},
    "unflatten_dict": {"a": {0: 1}, "b": 2},
    "unflatten_dict_of_text": {"a": {"0": 1}},
    "string_keys_to_integers": {"a": {0: 1, 7: 2, "x1": 3, "-1": 4}},
    "integer_keys_to_strings": {"a": {"0": 1}},
    "graphdef_of_two_seeds": True,
    "graphdef_without_rngs": ("GraphDef", 1),
    "graphdef_with_rngs_where_none_are_taken": "raises TypeError",
    "graphstate": (
        "State",
        {
            "dropout": {
                "rngs": {
                    "count": ("RngCount", ("abstract", "uint32", ()), "default"),
                    "key": ("RngKey", ("abstract", "key<fry>", ()), "default"),
                }
            },
            "linear": {
                "bias": ("Param", ("abstract", "float32", (2,))),
                "kernel": ("Param", ("abstract", "float32", (2, 2))),
            },
        },
    ),
    "graphstate_with_values": (
        "State",
        {
            "dropout": {
                "rngs": {
                    "count": ("RngCount", ("uint32", (), 0), "default"),
                    "key": (
                        "RngKey",
                        ("key", "threefry2x32", [1024511538, 2603795180]),
                        "default",
                    ),
                }
            },
            "linear": {
                "bias": ("Param", ("float32", (2,), [0.0, 0.0])),
                "kernel": ("Param", ("float32", (2, 2), [[1.0, 1.0], [1.0, 1.0]])),
            },
        },
    ),
    "init": (
        "module",
        "Small",
        (
            "State",
            {
                "dropout": {
                    "rngs": {
                        "count": ("RngCount", ("abstract", "uint32", ()), "default"),
                        "key": ("RngKey", ("abstract", "key<fry>", ()), "default"),
                    }
                },
                "linear": {
                    "bias": ("Param", ("abstract", "float32", (2,))),
                    "kernel": ("Param", ("abstract", "float32", (3, 2))),
                },
            },
        ),
    ),
    "copy_of_a_tree": {
        "a": [("float32", (2,), [1.0, 1.0]), ("float64", (1,), [0.0]), None, 3]
    },
    "validate_the_same": (True, [], {}),
    "validate_with_keys_missing": (
        False,
        [("dropout", "rngs", "count"), ("dropout", "rngs", "key")],
        {},
    ),
    "validate_with_more_keys": (True, [], {}),
    "validate_with_other_types": (False, [], {"a": "type float"}),
    "differentiate_with_keys_missing": "raises ValueError",
    "differentiate_without_validation": {
        ("dropout", "rngs", "count"): ("RngCount", ("uint32", (), 0), "default"),
        ("dropout", "rngs", "key"): (
            "RngKey",
            ("key", "threefry2x32", [4146024105, 2718843009]),
            "default",
        ),
    },
    "differentiate_the_same": {},
    "differentiate_what_is_no_variable": "raises TypeError",
    "redefine_an_empty_parameter": {("a",): ("Param", None)},
    "redefine_a_parameter": "raises ValueError",
    "redefine_statistics": "raises AttributeError",
    "redefine_nothing": {"x": 1},
    "recreate_a_state": {
        "dropout": {
            "rngs": {
                "count": ("RngCount", ("uint32", (), 0), "default"),
                "key": ("RngKey", ("uint32", (2,), [1832780943, 270669613]), "default"),
            }
        }
    },
    "recreate_a_flat_dict": {
        ("dropout", "rngs", "count"): ("RngCount", ("uint32", (), 0), "default"),
        ("dropout", "rngs", "key"): (
            "RngKey",
            ("uint32", (2,), [1832780943, 270669613]),
            "default",
        ),
    },
    "recreate_with_seed_7": {
        ("dropout", "rngs", "count"): ("RngCount", ("uint32", (), 0), "default"),
        ("dropout", "rngs", "key"): (
            "RngKey",
            ("uint32", (2,), [3625411723, 1954958720]),
            "default",
        ),
    },
    "recreate_statistics": "raises ValueError",
    "recreate_a_parameter": "raises ValueError",
    "recreate_an_array": "raises ValueError",
    "recreate_nothing": [{}, {}],
    "refine_two_dicts": ("State", {"a": {"x": 1, "y": 2}, "b": 3}),
    "refine_a_flat_dict_and_a_state": (
        "State",
        {
            "a": {
                "x": ("Param", ("float32", (1,), [1.0])),
                "y": ("Param", ("float32", (1,), [1.0])),
            }
        },
    ),
    "refine_two_leaves_at_one_path": ("State", {"a": {"x": 2}}),
    "refine_a_leaf_and_one_below_it": "raises TypeError",
    "refine_a_leaf_and_one_above_it": ("State", {"a": 1}),
    "refine_nothing": "raises TypeError",
    "refine_one_graph": [("State", {"a": 1}), ("State", {})],
    "refine_integers_beside_their_text": ("State", {"a": {0: 1, "0": 2}}),
    "refine_a_list": "raises AttributeError",
    "merge_a_tree": (
        "State",
        {
            "dropout": {
                "rngs": {
                    "count": ("RngCount", ("uint32", (), 0), "default"),
                    "key": (
                        "RngKey",
                        ("uint32", (2,), [1832780943, 270669613]),
                        "default",
                    ),
                }
            },
            "linear": {
                "bias": ("Param", ("float32", (2,), [6.0, 6.0])),
                "kernel": ("Param", ("float32", (2, 2), [[5.0, 5.0], [5.0, 5.0]])),
            },
        },
    ),
    "merge_a_flat_tree": (
        "State",
        {
            "dropout": {
                "rngs": {
                    "count": ("RngCount", ("uint32", (), 0), "default"),
                    "key": (
                        "RngKey",
                        ("uint32", (2,), [1832780943, 270669613]),
                        "default",
                    ),
                }
            },
            "linear": {
                "bias": ("Param", ("float32", (2,), [6.0, 6.0])),
                "kernel": ("Param", ("float32", (2, 2), [[5.0, 5.0], [5.0, 5.0]])),
            },
        },
    ),
    "merge_a_tree_into_no_rng": (
        "State",
        {
            "bias": ("Param", ("float32", (2,), [1.0, 1.0])),
            "kernel": ("Param", ("float32", (1, 2), [[1.0, 1.0]])),
        },
    ),
    "merge_a_tree_with_a_leaf_too_many": (
        "State",
        {
            "dropout": {
                "rngs": {
                    "count": ("RngCount", ("uint32", (), 0), "default"),
                    "key": (
                        "RngKey",
                        ("uint32", (2,), [1832780943, 270669613]),
                        "default",
                    ),
                }
            },
            "linear": {
                "bias": ("Param", ("float32", (2,), [6.0, 6.0])),
                "kernel": ("Param", ("float32", (2, 2), [[5.0, 5.0], [5.0, 5.0]])),
            },
        },
    ),
    "merge_a_tree_of_variables": "raises ValueError",
    "flax_has_one_class_of_variables": True,
}
