"""The example packages as a stranger would use them: installed beside ours, chosen, proved, and serving."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.config_sources import load_config
from tokenspeed.engine.request import SamplingParams
from tokenspeed.llm import LLM
from tokenspeed.startup import examine

EXAMPLES = Path(__file__).parents[2] / "examples"
TOKENIZER = EXAMPLES.parent / "tokenspeed-models/src/tokenspeed_models/tiny"


def install(site: Path, name: str) -> None:
    """Put an example into a folder of installed packages, as its wheel would be."""
    package = name.replace("-", "_")
    metadata = site / f"{package}-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / package).symlink_to(EXAMPLES / name / "src" / package)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[tokenspeed]\n{name} = {package}.plugin\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path for installed examples."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    packages = ("tokenspeed_kernels_numpy", "tokenspeed_kernels_int8")
    for module in [name for name in sys.modules if name.startswith(packages)]:
        del sys.modules[module]


@pytest.mark.parametrize("name", ["tokenspeed-kernels-numpy", "tokenspeed-kernels-int8"])
def test_example_passes_its_own_tests(name: str, site: Path) -> None:
    install(site, name)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TOKENSPEED_")}
    environ |= {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    tests = EXAMPLES / name / "tests"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tests), str(tests)]
    done = subprocess.run(command, env=environ, cwd=site, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout


def test_the_numpy_norm_wins_in_auto_and_serves(site: Path) -> None:
    install(site, "tokenspeed-kernels-numpy")
    llm = LLM("tiny", num_kv_pages=64, max_model_len=256)
    chosen = {need.operator: spec.name for need, spec in llm.plan.choices.items()}
    assert chosen["norm.rms"] == "numpy.norm.rms"
    (result,) = llm.generate(["Once upon a time"], SamplingParams(max_tokens=8, temperature=0))
    assert len(result.outputs[0].token_ids) == 8
    bitwise = examine(load_config({"model": "tiny", "numerics": "rl-bitwise"}, environ={}))
    assert bitwise.selection
    assert "numpy.norm.rms" not in {spec.name for spec in bitwise.selection.choices.values()}


def bits(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Token ids and logprobs of every prompt, generated in one batch."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, logprobs=0)
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in llm.generate(prompts, params)]


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_a_quantised_checkpoint_starts_under_rl_bitwise(family: str, site: Path, make_checkpoint: Any) -> None:
    options = {"numerics": "rl-bitwise", "num_kv_pages": 64, "max_model_len": 256}
    install(site, "tokenspeed-kernels-int8")
    convert = importlib.import_module("tokenspeed_kernels_int8.convert").convert
    folder = site.parent / "int8"
    convert(make_checkpoint(family, tie_word_embeddings=False), folder)

    ours = ["tokenspeed-reference", "tokenspeed-kernels-aok", "tokenspeed-models"]
    without = load_config({"model": str(folder), "plugins": ours, **options}, environ={})
    refused = [problem for problem in examine(without).problems if problem.kind == "missing-kernel"]
    assert len(refused) == 1
    assert "weight_format=example_int8" in refused[0].summary
    assert any("aok.gemm.linear" in line and "does not declare weight_format" in line for line in refused[0].details)

    llm = LLM(str(folder), tokenizer=str(TOKENIZER), **options)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8], [7] * 20]
    together = bits(llm, prompts)
    assert together == [one for prompt in prompts for one in bits(llm, [prompt])]
    quantised = [need for need in llm.plan.choices if "weight_format" in dict(need.traits)]
    chosen = {need.operator: llm.plan.choices[need].name for need in quantised}
    assert chosen == {"gemm.linear": "int8.gemm.linear"}


def test_a_wrong_tensor_of_the_format_is_named(site: Path, make_checkpoint: Any) -> None:
    from safetensors.torch import load_file, save_file

    install(site, "tokenspeed-kernels-int8")
    folder = site.parent / "int8"
    convert = importlib.import_module("tokenspeed_kernels_int8.convert").convert
    convert(make_checkpoint("Llama", tie_word_embeddings=False), folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file({**tensors, name: tensors[name].float()}, folder / "model.safetensors")
    (problem,) = examine(load_config({"model": str(folder)}, environ={})).problems
    text = problem.render()
    assert "model.layers.0.mlp.up_proj.weight_scale" in text
    assert f"{name} is F32" in text
