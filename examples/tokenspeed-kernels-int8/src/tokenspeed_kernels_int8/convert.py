"""Write a checkpoint in the format: `python -m tokenspeed_kernels_int8.convert FROM TO`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from tokenspeed_kernels_int8.gemm import quantise
from tokenspeed_kernels_int8.plugin import FORMAT

PROJECTION = re.compile(r"\.(q|k|v|o|gate|up|down)_proj\.weight$")


def convert(source: Path, target: Path) -> None:
    """Quantise the projections of a one-file checkpoint; everything else is copied."""
    target.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if PROJECTION.search(name):
            parts, _ = quantise(tensor)
            tensors |= {f"{name.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors")
    for file in source.glob("*.json"):
        shutil.copy(file, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": FORMAT}}))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
