"""A table that embedding and output head share is kept once when the kernels allow it, and gives the same results."""

from __future__ import annotations

import torch

from tokenspeed.kernels.reference.plugin import tokenspeed_kernels as reference_kernels
from tokenspeed.layers.context import LayerContext
from tokenspeed.layers.embedding import Embedding, TiedLMHead
from tokenspeed.testing.models import bind_kernels
from tokenspeed_kernels_aok.specs import SPECS


def _filled(kernels: object, table: torch.Tensor) -> tuple[Embedding, TiedLMHead]:
    ctx = LayerContext(table.dtype)
    embedding = Embedding(ctx, *table.shape)
    head = TiedLMHead(ctx, embedding)
    bind_kernels(ctx, kernels)  # type: ignore[arg-type]
    embedding.allocate(torch.device("cpu"))
    assert embedding.weight is not None
    embedding.weight.data.copy_(table)
    embedding.prepare_weights()
    return embedding, head


def test_one_table_serves_both() -> None:
    table = torch.randn(70, 34).to(torch.bfloat16)
    ids = torch.tensor([0, 69, 33])
    embedding, head = _filled(SPECS, table)
    assert embedding.packed is head.packed
    assert embedding.weight is None
    plain, plain_head = _filled(reference_kernels(), table)
    assert torch.equal(embedding(ids), plain(ids))
    torch.testing.assert_close(head(table[:3]), plain_head(table[:3]))


def test_kernels_of_other_packings_get_the_plain_table() -> None:
    table = torch.randn(70, 34).to(torch.bfloat16)
    specs = [spec for spec in SPECS if spec.operator != "embedding.lookup"]
    specs += [spec for spec in reference_kernels() if spec.operator == "embedding.lookup"]
    embedding, head = _filled(specs, table)
    assert embedding.packed is not head.packed
    assert torch.equal(embedding(torch.arange(70)), table)
