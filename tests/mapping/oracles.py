"""Writes ``oracles.npz``: what PEFT and transformers make of random arrays.

It is run by hand, in an environment that has them and torch (the values are of PEFT
0.21.2, transformers 5.24.0 and torch 2.13.0 on a CPU)::

    python tests/mapping/oracles.py

Arrays of bfloat16 and float8 are kept as the bits of their elements.
"""

from pathlib import Path
from typing import Any

import numpy as np

PLACE = Path(__file__).with_name("oracles.npz")

LORA = {
    # dtypes of the base and of the adapter
    "float32": ("float32", "float32"),
    "mixed": ("bfloat16", "float32"),
    "bfloat16": ("bfloat16", "bfloat16"),
}
OUT, IN, RANK, ALPHA = 32, 24, 8, 24


def take_bits(tensor: Any) -> Any:
    """Returns the elements of a tensor; bits of a dtype that NumPy lacks."""
    import torch

    views = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}
    view = views.get(tensor.dtype)
    return (tensor if view is None else tensor.view(view)).detach().numpy().copy()


def merge_adapters() -> dict[str, Any]:
    """Returns base, adapter and merged weights of PEFT, by the name of a case."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    found = dict[str, Any]()
    modules: dict[str, Any] = {
        "linear": lambda: torch.nn.Linear(IN, OUT, bias=False),
        "conv1d": lambda: Conv1D(OUT, IN),
        "embedding": lambda: torch.nn.Embedding(IN, OUT),
    }
    for kind, make in modules.items():
        for name, (base, adapter) in LORA.items():
            torch.manual_seed(len(found))
            model = torch.nn.ModuleDict({"m": make()}).to(getattr(torch, base))
            config = LoraConfig(
                r=RANK,
                lora_alpha=ALPHA,
                target_modules=["m"],
                use_rslora=name == "mixed",
                fan_in_fan_out=kind == "conv1d",
            )
            layer = get_peft_model(model, config).base_model.model["m"]
            if kind == "embedding":
                a, b = layer.lora_embedding_A, layer.lora_embedding_B
            else:
                a, b = layer.lora_A["default"], layer.lora_B["default"]
                a, b = {"default": a.weight}, {"default": b.weight}
            for each in a["default"], b["default"]:
                each.data = torch.randn(each.shape).to(getattr(torch, adapter)) / 8
            case = f"lora/{kind}/{name}"
            weight = layer.base_layer.weight
            found[f"{case}/base"] = take_bits(weight)
            found[f"{case}/a"] = take_bits(a["default"])
            found[f"{case}/b"] = take_bits(b["default"])
            found[f"{case}/scale"] = np.float64(layer.scaling["default"])
            layer.merge()
            found[f"{case}/merged"] = take_bits(weight)
    return found


def dequantize() -> dict[str, Any]:
    """Returns quantized and dequantized weights of transformers."""
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    values = torch.randn(24, 40).mul(100).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 5) / 100
    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    exponents = torch.randint(110, 135, (2, 6, 3), dtype=torch.uint8)
    unpacked = convert_moe_packed_tensors(blocks, exponents)
    return {
        "fp8/values": take_bits(values),
        "fp8/scales": take_bits(scales),
        "fp8/made": take_bits(
            Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16)
        ),
        "mxfp4/blocks": take_bits(blocks),
        "mxfp4/scales": take_bits(exponents),
        "mxfp4/made": take_bits(unpacked.transpose(1, 2).contiguous()),
    }


if __name__ == "__main__":
    np.savez_compressed(PLACE, **merge_adapters(), **dequantize())
