"""Compares EasyDeL's states and helpers with this client's; ``make test-easydel``.

Importing easydel needs the preparations below, so this package imports it before any of
its modules does.
"""

import importlib
import importlib.util
import os
import sys
import warnings

# Its import would otherwise rewrite jax's flags, and look for other hosts.
os.environ["EASYDEL_AUTO"] = "0"
os.environ["ENABLE_DISTRIBUTED_INIT"] = "0"
# easydel would cache jax's compiled code in the home of the user, and share it between
# test runs, and between the process that saves and the one that restores.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# Compiling a step takes much longer than running it, and both sides run the same code.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# easydel imports all its models at once. These ones patch classes of transformers that
# need torch, gigabytes for models that no test builds. easydel omits the patches if the
# modules cannot be imported.
if importlib.util.find_spec("torch") is None:
    for _name in ("dbrx", "glm4v_moe", "llama4", "phimoe", "qwen3_5_moe", "qwen3_next"):
        sys.modules[f"transformers.models.{_name}"] = None  # type: ignore[assignment]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # only easydel can fix them
    importlib.import_module("easydel.modules")
