"""Values of the checkpoints that ``tests/easydel/eformer_writer.py`` writes with
eformer, and ``tests/golden/foreign/eformer`` holds."""

import json
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from storesvc_client._foreign.foreign_step import ForeignRoot
from tests.support.foreign_reading import as_bytes, read_items, read_tree

KERNEL = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
BIAS = np.zeros(3, np.float32)
MODEL = {"layers/0/kernel": KERNEL, "layers/1/bias": BIAS}
COUNT = np.array(3, np.int32)

STRUCTURED_STEP = 10
"""Step with the trees "model" and "tx", as EasyDeL saves them."""

UNPREFIXED_STEP = 20
"""Step of one tree without a prefix."""

SAFETENSORS_STEP = 30
"""Step of eformer's other writer."""


def expected_tree(step: int) -> dict[str, NDArray[Any]]:
    """Returns the leaves of a step by key."""
    if step != STRUCTURED_STEP:
        return MODEL
    model = {f"model/{key}": value for key, value in MODEL.items()}
    moments = {f"tx/0/mu/{key}": value for key, value in MODEL.items()}
    return model | moments | {"tx/0/count": COUNT}


def check_steps(root: ForeignRoot) -> None:
    """Compares all steps below a root with what was written."""
    steps = [STRUCTURED_STEP, UNPREFIXED_STEP, SAFETENSORS_STEP]
    assert steps == list(root.steps())
    for number in steps:
        step = root.open(number)
        assert as_bytes(expected_tree(number)) == as_bytes(read_tree(step))
        metadata = json.loads(read_items(step)["metadata"])
        assert (number, False) == (metadata["step"], metadata["is_temporary"])
    label = root.open(STRUCTURED_STEP).labels["eformer.not_read"]
    assert "1: tx.1.name" == label
