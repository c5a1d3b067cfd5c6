"""Dumps of a transformers model: teacher-forced log-probabilities in one layout of the batch, and activations if asked.

The model may be adopted or not; what is recorded is what it computes. `tokenspeed numerics align` compares an engine
with the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch

from tokenspeed.trainer.logprobs import logprobs, order_of
from tokenspeed.verify.dump import LOGITS_ROWS, Dump, DumpedSequence

BatchLayout = Literal["alone", "padded-left", "padded-right", "packed"]
LAYOUTS: tuple[str, ...] = get_args(BatchLayout)

OUTPUTS = re.compile(
    r"model\.(embed_tokens|norm|layers\.\d+\.("
    r"(input|post_attention)_layernorm(\.\d)?|"
    r"self_attn(\.\d)?\.([qkvo]_proj|[qk]_norm|(q|kv)_a_layernorm|q_[ab]_proj|kv_a_proj_with_mqa)|"
    r"self_attn\.indexer\.(wq_b|wk|weights_proj)|"
    r"mlps?(\.\d|\.shared_experts)?\.(gate|up|down)_proj|"
    r"mlp\.experts))"
)
"""Modules whose outputs are recorded."""

INPUTS = re.compile(
    r"model\.(norm|layers\.\d+\.("
    r"(input|post_attention)_layernorm(\.\d)?|self_attn(\.\d)?\.o_proj|mlps?(\.\d|\.shared_experts)?\.down_proj))"
)
"""Modules whose inputs are recorded too, as NAME.input: sums of residuals, and what attention and activation wrote."""

ROUTERS = re.compile(r"model\.layers\.\d+\.mlp\.(gate|router)")
"""Modules whose choice is recorded, as NAME.ids (int32) and NAME.weights (float32)."""


@torch.no_grad()
def record(
    model: Any,
    sequences: Sequence[Sequence[int]],
    *,
    layout: BatchLayout = "padded-right",
    trainer: str = "transformers",
    temperature: float = 1.0,
    activations: bool = False,
    batch_size: int = 8,
    commit: str,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Dump:
    """Teacher-force `sequences` (token ids, at least two each), `batch_size` of them in a forward pass.

    `trainer` names the order of additions (`transformers`, `megatron`, `megatron,vocab-shards=N`). `progress` is called
    with (sequences done, in all). Raises ValueError for arguments that mean nothing.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; the least is 1")
    if short := [number for number, sequence in enumerate(sequences) if len(sequence) < 2]:
        raise ValueError(f"sequence {short[0]} has {len(sequences[short[0]])} tokens; one alone has no log-probability")
    order_of(trainer)
    size = 1 if layout == "alone" else batch_size
    found: list[DumpedSequence] = []
    for first in range(0, len(sequences), size):
        part = [list(sequence) for sequence in sequences[first : first + size]]
        batch, rows = _batch(part, layout)
        with _recording(model, batch["input_ids"].numel(), wanted=activations) as seen:
            logits = model(**batch, use_cache=False).logits.flatten(0, 1)
        found += [
            _sequence(ids, logits[own], {name: tensor[own] for name, tensor in seen.items()}, trainer, temperature)
            for ids, own in zip(part, rows, strict=True)
        ]
        progress(len(found), len(sequences))
    return Dump(trainer, f"{layout}, {size} sequences in a forward pass", commit, found, temperature)


def _sequence(
    ids: list[int], logits: torch.Tensor, activations: dict[str, torch.Tensor], trainer: str, temperature: float
) -> DumpedSequence:
    order, shards = order_of(trainer)
    targets = torch.tensor(ids[1:], device=logits.device)
    values = logprobs(logits[:-1], targets, order=order, temperature=temperature, vocab_shards=shards)
    return DumpedSequence(torch.tensor(ids), values, logits[:LOGITS_ROWS], activations=activations)


def _batch(sequences: list[list[int]], layout: BatchLayout) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The model's arguments, and the flat rows of each sequence's tokens."""
    lengths = [len(sequence) for sequence in sequences]
    if layout in ("alone", "packed"):
        positions = torch.cat([torch.arange(length) for length in lengths])
        ids = torch.tensor([token for sequence in sequences for token in sequence])
        rows = list(torch.split(torch.arange(len(ids)), lengths))
        return {"input_ids": ids.unsqueeze(0), "position_ids": positions.unsqueeze(0)}, rows
    width = max(lengths)
    batch = torch.zeros(len(sequences), width, dtype=torch.int64)
    mask = torch.zeros_like(batch)
    rows = []
    for row, sequence in enumerate(sequences):
        start = width - len(sequence) if layout == "padded-left" else 0
        batch[row, start : start + len(sequence)] = torch.tensor(sequence)
        mask[row, start : start + len(sequence)] = 1
        rows.append(torch.arange(len(sequence)) + row * width + start)
    return {"input_ids": batch, "attention_mask": mask}, rows


@contextmanager
def _recording(model: Any, tokens: int, *, wanted: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Activations [tokens,F] by name, once the model has run inside the block; empty unless wanted."""
    seen: dict[str, torch.Tensor] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_module: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            if ROUTERS.fullmatch(name):
                _, weights, ids = output
                seen[f"{name}.weights"], seen[f"{name}.ids"] = weights.float(), ids.int()
                return
            if INPUTS.fullmatch(name):
                seen[f"{name}.input"] = inputs[0].reshape(tokens, -1)
            seen[name] = output.reshape(tokens, -1)

        return hook

    handles = [
        module.register_forward_hook(hook_of(name))
        for name, module in model.named_modules()
        if wanted and (OUTPUTS.fullmatch(name) or ROUTERS.fullmatch(name))
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
