"""The models compute what `transformers`' own classes compute, on checkpoints that `transformers` wrote.

fp32, reference kernels. Logits agree to 1e-5 of the largest logit of their row; greedy tokens are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from parity import expected_logits, ours, random_ids, relative_error, theirs
from small_configs import MAGNITUDES, yarn
from tokenspeed.models.base import CausalLM
from tokenspeed.testing.models import PagedModel

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = yarn(64)
SLIDING = {"use_sliding_window": True, "sliding_window": 9}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-mha": ("Llama", {"num_key_value_heads": 6}),
    "llama-mqa-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-gqa-head-dim": ("Llama", {"head_dim": 32}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-eps-theta": (
        "Llama",
        {"rms_norm_eps": 1e-2, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    ),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    "qwen2-sliding": ("Qwen2", {**SLIDING, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-biases-tied": ("Qwen3", {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-sliding-types": (
        "Qwen3",
        {
            **SLIDING,
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-yarn-details": (
        "Qwen3",
        {
            "head_dim": 32,
            "rope_parameters": {
                **YARN,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "attention_factor": 1.3,
                "truncate": False,
            },
        },
    ),
    "qwen3-yarn-mscale": ("Qwen3", {"head_dim": 32, "rope_parameters": {**YARN, **MAGNITUDES}}),
}


MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint) -> tuple[CausalLM, Any]:
    """(our model, theirs) of one case."""
    family, config = CASES[request.param]
    folder = make_checkpoint(family, **config)
    return ours(folder), theirs(folder)


def test_logits_agree(pair: tuple[CausalLM, Any]) -> None:
    ids = random_ids(90, seed=1)
    assert relative_error(PagedModel(pair[0]).feed({0: ids})[0], expected_logits(pair[1], ids)) < TOLERANCE


def test_greedy_tokens_are_the_same(pair: tuple[CausalLM, Any]) -> None:
    prompt = random_ids(21, seed=2)
    output = pair[1].generate(torch.tensor([prompt]), max_new_tokens=24, min_new_tokens=24, do_sample=False)
    expected = output[0, len(prompt) :].tolist()
    # The end-of-sequence token is forbidden there until the last token, so forbid it here in the same way.
    assert greedy_without(PagedModel(pair[0]), prompt, 24, forbidden=2) == expected
    assert len(set(expected)) > 4, "the model repeats itself, which shows nothing"


def greedy_without(model: PagedModel, prompt: list[int], count: int, forbidden: int) -> list[int]:
    tokens: list[int] = []
    chunk = prompt
    for _ in range(count):
        logits = model.feed({0: chunk})[0][-1].clone()
        logits[forbidden] = -torch.inf
        tokens.append(int(logits.argmax()))
        chunk = tokens[-1:]
    return tokens


def test_chunks_and_company_change_nothing_that_matters(pair: tuple[CausalLM, Any]) -> None:
    """A prompt in uneven chunks beside two other sequences gives the logits of the whole prompt alone."""
    ids, other, third = random_ids(70, seed=3), random_ids(40, seed=4), random_ids(20, seed=5)
    model = pair[0]
    whole = PagedModel(model).feed({0: ids})[0]
    paged = PagedModel(model, seed=7)
    paged.feed({2: third})
    pieces = [
        paged.feed({1: other[:17], 0: ids[:1], 2: [9]})[0],
        paged.feed({2: [8], 0: ids[1:33]})[0],
        paged.feed({0: ids[33:34], 2: [7], 1: other[17:]})[0],
        paged.feed({0: ids[34:]})[0],
    ]
    assert relative_error(torch.cat(pieces), whole) < TOLERANCE


def test_a_changed_weight_is_noticed(make_checkpoint: MakeCheckpoint) -> None:
    """Negative control of the tolerance: scaling one of 96 norm weights by a thousandth shows."""
    folder = make_checkpoint("Qwen3", head_dim=32)
    other = theirs(folder)
    other.model.layers[1].input_layernorm.weight.data[5] *= 1.001
    ids = random_ids(90, seed=1)
    assert relative_error(PagedModel(ours(folder)).feed({0: ids})[0], expected_logits(other, ids)) > TOLERANCE


@pytest.mark.parametrize("boundary", ["fused", "unfused"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_bf16_stays_near_fp32(family: str, boundary: str, make_checkpoint: MakeCheckpoint) -> None:
    """In bf16 our logits are as near to the fp32 logits of the same weights as transformers' own are."""
    folder = make_checkpoint(family, dtype=torch.bfloat16)
    ids = random_ids(60, seed=6)
    exact = expected_logits(theirs(folder), ids)
    model = ours(folder, switches={"layer_boundary_norm": boundary})
    logits = PagedModel(model).feed({0: ids})[0]
    assert logits.dtype == torch.bfloat16
    their_error = (expected_logits(theirs(folder, torch.bfloat16), ids).float() - exact).square().mean().sqrt()
    our_error = (logits.float() - exact).square().mean().sqrt()
    assert 0 < our_error < 1.2 * their_error


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_in_another_dtype(dtype: torch.dtype, make_checkpoint: MakeCheckpoint) -> None:
    """A half-precision checkpoint run in fp32 is its widened weights."""
    folder = make_checkpoint("Llama", dtype=dtype)
    ids = random_ids(50, seed=8)
    logits = PagedModel(ours(folder, dtype=torch.float32)).feed({0: ids})[0]
    assert relative_error(logits, expected_logits(theirs(folder), ids)) < TOLERANCE


@pytest.mark.parametrize("case", ["llama-llama3", "llama-linear", "qwen3-yarn-details"])
def test_older_config_files(case: str, make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """`rope_scaling` + `rope_theta` + `torch_dtype` mean what `rope_parameters` + `dtype` mean."""
    family, config = CASES[case]
    folder = make_checkpoint(family, **config)
    old = json.loads((folder / "config.json").read_text())
    scaling = old.pop("rope_parameters")
    old["rope_theta"] = scaling.pop("rope_theta")
    old["rope_scaling"] = {"type": scaling.pop("rope_type"), **scaling}
    old["torch_dtype"] = old.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(old))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    ids = random_ids(90, seed=9)
    logits = PagedModel(ours(tmp_path)).feed({0: ids})[0]
    assert torch.equal(logits, PagedModel(ours(folder)).feed({0: ids})[0])


def test_shards_are_the_single_file(make_checkpoint: MakeCheckpoint) -> None:
    whole = make_checkpoint("Qwen3", head_dim=32)
    sharded = make_checkpoint("Qwen3", head_dim=32, max_shard_size="200KB")
    transformers.AutoModelForCausalLM.from_pretrained(whole).save_pretrained(sharded, max_shard_size="200KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    ids = random_ids(30, seed=10)
    assert torch.equal(PagedModel(ours(whole)).feed({0: ids})[0], PagedModel(ours(sharded)).feed({0: ids})[0])
