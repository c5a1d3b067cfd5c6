"""Models with sparse latent attention against transformers' classes, on random checkpoints that transformers saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parity import expected_logits, ours, random_ids, relative_error, theirs
from small_configs import DEEPSEEK, MAGNITUDES, yarn
from tokenspeed.kernels.spec import KernelSpec
from tokenspeed.layers import sparse
from tokenspeed.layers.sparse import Indexer
from tokenspeed.models.base import CausalLM
from tokenspeed.testing.models import PagedModel
from tokenspeed_kernels_aok.specs import SPECS as AOK

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5
TOP_K = 24
SPARSE = {
    **DEEPSEEK,
    "num_hidden_layers": 4,
    "n_shared_experts": 2,
    "index_n_heads": 18,
    "index_head_dim": 22,
    "index_topk": TOP_K,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3.2": ("DeepseekV32", {**SPARSE, "rope_parameters": {**yarn(64), **MAGNITUDES}}),
    "deepseek-v3.2-plain": (
        "DeepseekV32",
        {**SPARSE, "attention_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]},
    ),
    "glm-moe-dsa": ("GlmMoeDsa", {**SPARSE, "n_group": 1, "topk_group": 1}),
    "glm-moe-dsa-shared": (
        "GlmMoeDsa",
        {**SPARSE, "num_hidden_layers": 5, "indexer_types": ["full", "shared", "full", "shared", "shared"]},
    ),
}

MakeCheckpoint = Callable[..., Path]
Pair = tuple[CausalLM, Any]


def selected(model: torch.nn.Module, run: Callable[[], object]) -> list[list[set[int]]]:
    """The positions that each query selected, indexer by indexer, while `run` computes whole sequences.

    transformers fills up with positions that a query does not see, we do with -1.
    """
    found: list[list[set[int]]] = []

    def note(_module: object, _inputs: object, out: torch.Tensor) -> None:
        rows = out.reshape(-1, out.shape[-1]).tolist()
        found.append([{at for at in row if 0 <= at <= position} for position, row in enumerate(rows)])

    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    hooks = [indexer.register_forward_hook(note) for indexer in indexers]
    run()
    for hook in hooks:
        hook.remove()
    assert len(found) == len(indexers) > 0
    return found


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, make_checkpoint: MakeCheckpoint) -> Pair:
    """(our model, theirs) of one case."""
    family, config = CASES[request.param]
    folder = make_checkpoint(family, **config)
    return ours(folder), theirs(folder)


@pytest.mark.parametrize("length", [TOP_K - 4, 6 * TOP_K])
def test_logits_and_selections_agree(pair: Pair, length: int) -> None:
    """Below `index_topk`, where every position is selected, and well above it."""
    ids = random_ids(length, seed=1)
    found: list[torch.Tensor] = []
    mine = selected(pair[0], lambda: found.append(PagedModel(pair[0]).feed({0: ids})[0]))
    other = selected(pair[1], lambda: found.append(expected_logits(pair[1], ids)))
    assert relative_error(*found) < TOLERANCE
    assert mine == other
    sizes = {len(row) for layer in mine for row in layer}
    assert sizes == set(range(1, min(length, TOP_K) + 1))


def test_greedy_tokens_are_the_same(pair: Pair) -> None:
    seen: set[int] = set()
    for seed, length in enumerate((5, 17, TOP_K - 2, 60, 90)):
        prompt = random_ids(length, seed=seed)
        output = pair[1].generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None)
        expected = output[0, len(prompt) :].tolist()
        assert PagedModel(pair[0]).generate(0, prompt, 9) == expected
        seen.update(expected)
    assert len(seen) > 3, "the model repeats itself, which shows nothing"


KERNELS = pytest.mark.parametrize("kernels", [None, AOK], ids=["reference", "aok"])


class Switched:
    """Logits and choices of one checkpoint under one value of `dsa_slot_order`."""

    def __init__(self, folder: Path, order: str, kernels: tuple[KernelSpec, ...] | None, length: int) -> None:
        model = ours(folder, switches={"dsa_slot_order": order}, kernels=kernels)
        self.chosen: list[torch.Tensor] = []
        for module in model.modules():
            if isinstance(module, Indexer):
                module.register_forward_hook(lambda _m, _i, out: self.chosen.append(out))
        self.logits = PagedModel(model).feed({0: random_ids(length, seed=7)})[0]


@KERNELS
@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-moe-dsa-shared"])
@pytest.mark.parametrize("length", [TOP_K, 4 * TOP_K])
def test_slot_order_changes_last_bits_and_no_choice(
    name: str, length: int, kernels: tuple[KernelSpec, ...] | None, make_checkpoint: MakeCheckpoint
) -> None:
    """What the first layer chooses is the same to the bit, its order included; later layers see other last bits."""
    family, config = CASES[name]
    folder = make_checkpoint(family, **config)
    selection, in_order = (Switched(folder, order, kernels, length) for order in ("selection", "sorted"))
    assert not torch.equal(selection.logits, in_order.logits)
    assert relative_error(selection.logits, in_order.logits) < TOLERANCE
    assert torch.equal(selection.logits.argmax(-1), in_order.logits.argmax(-1))
    assert torch.equal(selection.chosen[0], in_order.chosen[0])
    for a, b in zip(selection.chosen, in_order.chosen, strict=True):
        assert torch.equal(a.sort(-1).values, b.sort(-1).values)


def test_everything_selected_in_order_has_the_bits_of_deepseek_v3(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The tight value, computed independently: the same weights in a model without an indexer, by another kernel."""
    family, config = CASES["deepseek-v3.2"]
    folder = make_checkpoint(family, dtype=torch.bfloat16, **config)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    dense = {**json.loads((folder / "config.json").read_text()), "architectures": ["DeepseekV3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    ids = random_ids(60, seed=7)
    expected = PagedModel(ours(tmp_path, kernels=AOK)).feed({0: ids})[0]
    found = Switched(folder, "sorted", AOK, 60).logits
    assert torch.equal(found[:TOP_K].view(torch.int16), expected[:TOP_K].view(torch.int16))
    assert not torch.equal(found[TOP_K:], expected[TOP_K:]), "nothing was left out above index_topk"


@KERNELS
def test_scores_are_computed_in_parts_where_there_are_many(
    kernels: tuple[KernelSpec, ...] | None, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence in its middle beside a whole one, cut where a part ends inside either: the same choices, last bits
    aside the same logits, and with kernels whose rows are their own the same bits."""
    family, config = CASES["glm-moe-dsa-shared"]
    model = ours(make_checkpoint(family, **config), kernels=kernels)
    indexers = [module for module in model.modules() if isinstance(module, Indexer)]

    def run() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        chosen: list[torch.Tensor] = []
        hooks = [module.register_forward_hook(lambda _m, _i, out: chosen.append(out)) for module in indexers]
        paged = PagedModel(model)
        ids = random_ids(150, seed=8)
        paged.feed({0: ids[:50]})
        logits = paged.feed({0: ids[50:90], 1: ids[90:]})
        for hook in hooks:
            hook.remove()
        return chosen, list(logits.values())

    whole_choices, whole = run()
    calls: list[int] = []
    for module in indexers:
        score = module.score.run
        module.score.run = lambda q, *rest, score=score: calls.append(len(q)) or score(q, *rest)
    monkeypatch.setattr(sparse, "MOST_SCORES", 17 * 96)
    choices, logits = run()
    assert calls.count(17) == 10, calls
    assert all(torch.equal(a, b) for a, b in zip(choices, whole_choices, strict=True))
    for a, b in zip(logits, whole, strict=True):
        assert torch.equal(a, b) if kernels else relative_error(a, b) < TOLERANCE


@KERNELS
def test_bf16_stays_near_fp32(kernels: tuple[KernelSpec, ...] | None, make_checkpoint: MakeCheckpoint) -> None:
    """As near to the fp32 logits of the same weights as transformers' own bf16, where every token gets every expert and
    every position: where rounding changes a choice, the error is no longer one of rounding."""
    family, config = CASES["glm-moe-dsa"]
    everybody = {"n_routed_experts": 4, "num_experts_per_tok": 4, "index_topk": 64}
    folder = make_checkpoint(family, dtype=torch.bfloat16, **{**config, **everybody})
    ids = random_ids(60, seed=6)
    exact = expected_logits(theirs(folder), ids)
    their_error = (expected_logits(theirs(folder, torch.bfloat16), ids).float() - exact).square().mean().sqrt()
    logits = PagedModel(ours(folder, kernels=kernels)).feed({0: ids})[0]
    assert 0 < (logits.float() - exact).square().mean().sqrt() < 1.2 * their_error
