"""EasyDeL's own states and helpers beside ours: run by ``make test-easydel``.

Importing easydel needs the preparations below, so every module of this package finds
it imported.
"""

import importlib
import importlib.util
import os
import sys
import warnings

# Its import would otherwise rewrite jax's flags, and look for other hosts.
os.environ["EASYDEL_AUTO"] = "0"
os.environ["ENABLE_DISTRIBUTED_INIT"] = "0"
# It keeps what jax compiled in the home of the user: from one run of the tests to the
# next, and from the process that saves to the one that restores.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# To compile a step takes much longer than to run it, and both sides run the same.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# easydel imports all its models at once, and these patch classes of transformers that
# exist only beside torch: gigabytes, for models that no test builds. Where the modules
# cannot be imported, easydel leaves the patches out.
if importlib.util.find_spec("torch") is None:
    for _name in ("dbrx", "glm4v_moe", "llama4", "phimoe", "qwen3_5_moe", "qwen3_next"):
        sys.modules[f"transformers.models.{_name}"] = None  # type: ignore[assignment]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # they are easydel's to mend
    importlib.import_module("easydel.modules")
