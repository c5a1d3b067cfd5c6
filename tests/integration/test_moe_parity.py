"""Mixtures of experts compute what `transformers`' own classes compute, choose the same experts, obey their switches.

fp32, reference kernels, on checkpoints that `transformers` wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from parity import expected_logits, ours, random_ids, relative_error, theirs
from small_configs import DEEPSEEK, LONGCAT, MAGNITUDES, MIXTRAL, QWEN3_MOE, yarn
from tokenspeed.kernels.spec import KernelSpec
from tokenspeed.layers.moe import Router
from tokenspeed.models.base import CausalLM
from tokenspeed.testing.models import PagedModel
from tokenspeed_kernels_aok.specs import SPECS as AOK

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5
SHARED = {**DEEPSEEK, "n_shared_experts": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-unnormalised": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": False}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "qwen3-moe-sliding": ("Qwen3Moe", {**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 9}),
    "mixtral": ("Mixtral", MIXTRAL),
    "deepseek-v3": ("DeepseekV3", {**SHARED, "rope_parameters": {**yarn(64), **MAGNITUDES}}),
    "deepseek-v3-plain": (
        "DeepseekV3",
        {
            **SHARED,
            "q_lora_rank": None,
            "rope_interleave": False,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
        },
    ),
    "longcat-flash": ("LongcatFlash", {**LONGCAT, "intermediate_size": 160, "routed_scaling_factor": 3.0}),
    "mixtral-sliding": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 11}),
}

MakeCheckpoint = Callable[..., Path]


def chosen_experts(model: torch.nn.Module, kind: str, run: Callable[[], object]) -> list[list[list[int]]]:
    """The experts of every token, sorted, router by router, while `run` computes."""
    found: list[list[list[int]]] = []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith(kind)]
    assert routers
    hooks = [
        router.register_forward_hook(lambda _m, _i, out: found.append(out[-1].sort(-1).values.tolist()))
        for router in routers
    ]
    run()
    for hook in hooks:
        hook.remove()
    return found


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint) -> tuple[CausalLM, Any]:
    """(our model, theirs) of one case."""
    family, config = CASES[request.param]
    folder = make_checkpoint(family, **config)
    return ours(folder), theirs(folder)


def test_logits_and_experts_agree(pair: tuple[CausalLM, Any]) -> None:
    ids = random_ids(80, seed=1)
    found: list[torch.Tensor] = []
    mine = chosen_experts(pair[0], "router", lambda: found.append(PagedModel(pair[0]).feed({0: ids})[0]))
    other = chosen_experts(pair[1], "topkrouter", lambda: found.append(expected_logits(pair[1], ids)))
    assert relative_error(*found) < TOLERANCE
    assert mine == other
    assert len({tuple(token) for layer in mine for token in layer}) > 3


def test_greedy_tokens_are_the_same(pair: tuple[CausalLM, Any]) -> None:
    seen: set[int] = set()
    for seed in range(5):
        prompt = random_ids(13 + seed, seed=seed)
        output = pair[1].generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None)
        expected = output[0, len(prompt) :].tolist()
        assert PagedModel(pair[0]).generate(0, prompt, 9) == expected
        seen.update(expected)
    assert len(seen) > 3, "the model repeats itself, which shows nothing"


def test_stacked_experts_are_single_experts(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A checkpoint with `gate_up_proj` [E,2F,H] and `down_proj` [E,H,F] is the one with a tensor for each expert."""
    folder = make_checkpoint(*CASES["qwen3-moe"][:1], **CASES["qwen3-moe"][1])
    single = load_file(folder / "model.safetensors")
    stacked = {name: tensor for name, tensor in single.items() if ".experts." not in name}
    assert len(stacked) < len(single)
    for layer in range(3):
        at = f"model.layers.{layer}.mlp.experts"
        parts = {p: [single[f"{at}.{e}.{p}_proj.weight"] for e in range(12)] for p in ("gate", "up", "down")}
        stacked[f"{at}.gate_up_proj"] = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], dim=1)
        stacked[f"{at}.down_proj"] = torch.stack(parts["down"])
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    save_file(stacked, tmp_path / "model.safetensors")
    ids = random_ids(30, seed=3)
    assert torch.equal(PagedModel(ours(tmp_path)).feed({0: ids})[0], PagedModel(ours(folder)).feed({0: ids})[0])


@pytest.mark.parametrize("kernels", [None, AOK], ids=["reference", "aok"])
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
def test_bf16_stays_near_fp32(
    family: str, kernels: tuple[KernelSpec, ...] | None, make_checkpoint: MakeCheckpoint
) -> None:
    """In bf16 we are as near to the fp32 logits of the same weights as transformers' own are.

    Every token gets every expert: where rounding changes the choice, the error is no longer one of rounding.
    """
    name, config = CASES[family]
    everybody = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 4}
    everybody.pop("num_experts" if name == "Mixtral" else "num_local_experts")
    folder = make_checkpoint(name, dtype=torch.bfloat16, **{**config, **everybody})
    ids = random_ids(60, seed=6)
    exact = expected_logits(theirs(folder), ids)
    their_error = (expected_logits(theirs(folder, torch.bfloat16), ids).float() - exact).square().mean().sqrt()
    logits = PagedModel(ours(folder, kernels=kernels)).feed({0: ids})[0]
    assert 0 < (logits.float() - exact).square().mean().sqrt() < 1.2 * their_error


class Switched:
    """Logits and choices of one checkpoint under one value of a switch."""

    def __init__(self, folder: Path, switches: dict[str, str], kernels: Any = None) -> None:
        model = ours(folder, switches=switches, kernels=kernels)
        self.routed: list[tuple[torch.Tensor, ...]] = []
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(lambda _m, _i, out: self.routed.append(out))
        self.logits = PagedModel(model).feed({0: random_ids(40, seed=7)})[0]


def test_combine_order_changes_values_and_not_the_first_choice(make_checkpoint: MakeCheckpoint) -> None:
    name, config = CASES["qwen3-moe"]
    folder = make_checkpoint(name, dtype=torch.bfloat16, **config)
    rank, slot = (Switched(folder, {"moe_combine_order": order}) for order in ("rank", "slot"))
    assert not torch.equal(rank.logits, slot.logits)
    assert torch.equal(rank.routed[0][1], slot.routed[0][1])
    assert torch.equal(rank.routed[0][0], slot.routed[0][0])
    # aok always folds in slot order, so for it the switch only decides which kernels are eligible.
    a, b = (Switched(folder, {"moe_combine_order": order}, AOK) for order in ("rank", "slot"))
    assert torch.equal(a.logits, b.logits)


@pytest.mark.parametrize("kernels", [None, AOK], ids=["reference", "aok"])
def test_router_form_changes_weights_and_not_experts(kernels: Any, make_checkpoint: MakeCheckpoint) -> None:
    name, config = CASES["qwen3-moe"]
    folder = make_checkpoint(name, **config)
    fused, torch_form = (Switched(folder, {"router_topk": form}, kernels) for form in ("fused", "torch"))
    assert torch.equal(fused.routed[0][1], torch_form.routed[0][1])
    assert not torch.equal(fused.routed[0][0], torch_form.routed[0][0])
    assert not torch.equal(fused.logits, torch_form.logits)
    assert relative_error(fused.logits, torch_form.logits) < TOLERANCE


def test_layer_boundary_changes_values(make_checkpoint: MakeCheckpoint) -> None:
    name, config = CASES["mixtral"]
    folder = make_checkpoint(name, dtype=torch.bfloat16, **config)
    fused, unfused = (Switched(folder, {"layer_boundary_norm": value}) for value in ("fused", "unfused"))
    assert not torch.equal(fused.logits, unfused.logits)


def test_slot_order_is_a_left_fold_in_fp32(make_checkpoint: MakeCheckpoint) -> None:
    """The tight value, computed independently by NumPy from what every chosen expert gives when it is alone."""
    name, config = CASES["qwen3-moe"]
    folder = make_checkpoint(name, **config)
    model = ours(folder, switches={"moe_combine_order": "slot", "router_topk": "torch"}, kernels=AOK)
    block = model.get_submodule("model.layers.1.mlp")
    x = torch.randn(21, 96, generator=torch.Generator().manual_seed(8))
    weights, ids = block.gate(x)
    total = np.zeros((21, 96), dtype=np.float32)
    for slot in range(3):
        # Weight 1 gives the expert's output itself: a product with one and a sum with zero round nothing.
        alone = block.experts(x, torch.ones(len(x), 1), ids[:, slot : slot + 1].contiguous())
        total = total + weights[:, slot : slot + 1].numpy() * alone.numpy()
    assert torch.equal(block.experts(x, weights, ids), torch.from_numpy(total))
    backwards = block.experts(x, weights.flip(1).contiguous(), ids.flip(1).contiguous())
    assert not torch.equal(backwards, torch.from_numpy(total))


def test_the_torch_router_is_softmax_and_topk(make_checkpoint: MakeCheckpoint) -> None:
    """The tight value, computed independently by torch: the same experts, weights in the same order of operations."""
    name, config = CASES["qwen3-moe"]
    folder = make_checkpoint(name, **config)
    routed = Switched(folder, {"router_topk": "torch"}).routed
    model = theirs(folder)
    logits: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            module.register_forward_hook(lambda _m, _i, out: logits.append(out[0]))
    expected_logits(model, random_ids(40, seed=7))
    for (weights, ids), own in zip(routed, logits, strict=True):
        probabilities, best = torch.topk(torch.softmax(own.float(), -1), 3, sorted=True)
        assert torch.equal(ids.long(), best)
        torch.testing.assert_close(weights, probabilities / probabilities.sum(-1, keepdim=True), rtol=1e-5, atol=0)


def test_where_the_yarn_table_is_computed_changes_nothing_on_a_cpu(make_checkpoint: MakeCheckpoint) -> None:
    name, config = CASES["deepseek-v3"]
    folder = make_checkpoint(name, dtype=torch.bfloat16, **config)
    host, device = (Switched(folder, {"yarn_ramp_mask_device": value}, AOK) for value in ("cpu", "model"))
    assert torch.equal(host.logits, device.logits)


def test_lora_scales_folded_or_at_run_time(make_checkpoint: MakeCheckpoint) -> None:
    """Folded, they are rounded into the norms' weights; at run time they are operations of their own."""
    folder = make_checkpoint("LongcatFlash", dtype=torch.bfloat16, **LONGCAT)
    folded, runtime = (Switched(folder, {"mla_lora_scale": value}) for value in ("folded", "runtime"))
    assert not torch.equal(folded.logits, runtime.logits)
    wide = make_checkpoint("LongcatFlash", **LONGCAT)
    folded, runtime = (Switched(wide, {"mla_lora_scale": value}) for value in ("folded", "runtime"))
    assert relative_error(folded.logits, runtime.logits) < TOLERANCE
    assert not torch.equal(folded.logits, runtime.logits)


def test_zero_experts_are_chosen_and_are_the_identity(make_checkpoint: MakeCheckpoint) -> None:
    folder = make_checkpoint("LongcatFlash", **LONGCAT)
    routed = Switched(folder, {}).routed
    ids = torch.cat([ids for _, ids in routed])
    assert (ids >= 7).any()
    assert (ids < 7).any()


def test_runtime_scales_are_separate_operations(make_checkpoint: MakeCheckpoint) -> None:
    """The tight value, computed independently: bf16 projections by the kernel, the products by plain torch."""
    folder = make_checkpoint("LongcatFlash", dtype=torch.bfloat16, **LONGCAT)
    model = ours(folder, switches={"mla_lora_scale": "runtime"}, kernels=AOK)
    attention = model.get_submodule("model.layers.0.self_attn.1")
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(5)).bfloat16()
    q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))
    scaled = (q.float() * torch.tensor((96 / 40) ** 0.5, dtype=torch.float32)).bfloat16()
    assert torch.equal(attention.expand_queries(attention.compress_queries(x)).flatten(1), scaled)
