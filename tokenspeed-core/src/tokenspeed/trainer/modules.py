"""What replaces the forward of each kind of module: the engine's operators, in the engine's order.

A replaced module keeps its parameters, hooks and children. What its new forward needs beside them is a small frozen
`*Plan` in the attribute `tokenspeed_plan`, so that a deep copy of an adopted model is an adopted model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tokenspeed.trainer import operators
from tokenspeed.trainer.angles import Angles
from tokenspeed.trainer.layout import Layout, make_layout

PLAN = "tokenspeed_plan"
"""Attribute of an adopted module: its plan, or None where its own forward is right, since nobody calls it."""

_TRANSPARENT = ("torch.distributed.", "torch._dynamo.")
"""Modules of these packages run what is inside them and compute nothing."""

_NAMES_SHOWN = 20

LAYOUT = "tokenspeed_layout"
"""Keyword under which the decoder hands the batch's layout to its attention layers."""


@dataclass(frozen=True)
class KernelPlan:
    """For a module that calls one operator: the name of its kernel."""

    kernel: str


@dataclass(frozen=True)
class DecoderPlan:
    """For the decoder: the longest sequence that the engine's model reads, in tokens, and the engine's dtype.

    `model` is the whole model, and `forwards` the classes of its modules with what replaced their forward, if anything.
    """

    max_positions: int
    dtype: torch.dtype
    model: nn.Module = field(repr=False)
    forwards: Mapping[type, Callable[..., Any] | None] = field(repr=False)

    def check_model(self) -> None:
        """Raise ValueError when modules were wrapped, replaced or added since the model was adopted."""
        if not all(map(self._is_adopted, self.model.modules())):
            found = [(path, module) for path, module in self.model.named_modules() if not self._is_adopted(module)]
            summary = "modules of this model are not those that were adopted:"
            remedy = "-> merge adapters into the model (merge_and_unload), then restore it and adopt it again"
            raise ValueError("\n    ".join((summary, *named(found), remedy)))

    def _is_adopted(self, module: nn.Module) -> bool:
        kind = type(module)
        if kind.__module__.startswith(_TRANSPARENT):
            # A wrapper, or a class that `fully_shard` made of the module's own.
            kind = next((base for base in kind.__mro__ if base in self.forwards), kind)
            if kind not in self.forwards:
                return True
        if kind not in self.forwards:
            return False
        expected, own = self.forwards[kind], vars(module)
        if expected is None:
            # Accelerate wraps the whole model's forward, to convert what comes out.
            return module is self.model or "forward" not in own
        return getattr(own.get("forward"), "func", None) is expected or own.get(PLAN, self) is None


@dataclass(frozen=True)
class AttentionPlan:
    """For an attention layer. `window` as in `attention.paged`."""

    rope: str
    write: str
    attend: str
    scale: float
    window: int
    angles: Angles
    interleaved: bool


def named(found: Iterable[tuple[str, nn.Module]]) -> Iterator[str]:
    """Where these modules are and what they are, without what is inside them."""
    outer = ""
    shown = 0
    for path, module in found:
        if outer and path.startswith(f"{outer}."):
            continue
        outer, shown = path, shown + 1
        if shown > _NAMES_SHOWN:
            yield "and more"
            return
        replaced = " (its forward was replaced)" if "forward" in vars(module) else ""
        yield f"{path or 'the model'}: {type(module).__module__}.{type(module).__qualname__}{replaced}"


uncompiled = functools.partial(
    torch.compiler.disable,
    reason="a compiler fuses the additions of an adopted model and leaves out their roundings, which changes its bits",
)
"""For forwards that `torch.compile` has to leave alone."""


def linear_forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """`nn.Linear`: [...,K] -> [...,N]."""
    plan: KernelPlan = self.tokenspeed_plan  # type: ignore[assignment]
    out: torch.Tensor = operators.linear(input.reshape(-1, input.shape[-1]), self.weight, self.bias, plan.kernel)
    return out.view(*input.shape[:-1], out.shape[-1])


def norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """An RMSNorm over the last axis."""
    shape = hidden_states.shape
    rows = hidden_states.reshape(-1, shape[-1])
    out: torch.Tensor = operators.rms_norm(rows, self.weight, self.variance_epsilon, self.tokenspeed_plan.kernel)
    return out.view(shape)


def mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)), the product in fp32 with one rounding."""
    gate_up = torch.cat((self.gate_proj(x), self.up_proj(x)), dim=-1)
    out: torch.Tensor = operators.silu_and_mul(gate_up.flatten(0, -2), self.tokenspeed_plan.kernel)
    down: torch.Tensor = self.down_proj(out.view(*x.shape[:-1], -1))
    return down


def attention_forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Grouped-query attention: hidden states [B,S,H] -> [B,S,H]; attention weights are never materialised."""
    plan: AttentionPlan = self.tokenspeed_plan
    layout = layout_of(kwargs)
    batch, columns, _ = hidden_states.shape
    q, k, v = (
        proj(hidden_states).view(batch * columns, -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj)
    )
    if hasattr(self, "q_norm"):
        q, k = self.q_norm(q), self.k_norm(k)
    table = plan.angles.table(layout.longest, q.device)
    q, k = operators.rope(q, k, layout.position_ids.flatten(), table, plan.interleaved, plan.rope)
    if (cache := cache_of(kwargs)) is not None:
        k, v = through_cache(cache, k, v, batch, self.layer_idx, layout)
    out = _attend(plan, layout, q, k, v)
    return self.o_proj(out.view(batch, columns, -1)), None


def _attend(plan: AttentionPlan, layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [B*S,Hq,D], k and v [B*L,Hkv,D] -> [B*S,Hq,D], zero where there is padding."""
    out: torch.Tensor = operators.attention(
        layout.of_queries(q),
        layout.of_keys(k),
        layout.of_keys(v),
        *layout.paging,
        plan.scale,
        plan.window,
        plan.write,
        plan.attend,
    )
    return layout.padded(out, len(q))


def layout_of(kwargs: dict[str, Any]) -> Layout:
    """The layout that the decoder hands to its attention layers."""
    layout: Layout | None = kwargs.get(LAYOUT)
    if layout is None:
        raise ValueError("an attention layer of an adopted model was called by itself; call the model")
    return layout


def cache_of(kwargs: dict[str, Any]) -> Any:
    """The KV cache of this call, by its name in newer and older releases of transformers."""
    cache = kwargs.get("cache")
    return kwargs.get("past_key_values") if cache is None else cache


def through_cache(
    cache: Any, k: torch.Tensor, v: torch.Tensor, batch: int, layer: int, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Append keys and values [B*S,Hkv,D] (D may differ) to a transformers cache; all of the layer's, [B*L,Hkv,D]."""
    k, v = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (k, v))
    k, v = cache.update(k, v, layer)
    if k.shape[2] != layout.key_columns:
        raise ValueError(
            f"the cache of layer {layer} returned {k.shape[2]} columns of the {layout.key_columns} so far; an adopted "
            "model works with a DynamicCache that keeps everything"
        )
    return k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)


@uncompiled
def layer_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A decoder layer: its own forward, which adds the residual in the model's dtype, as the engine does."""
    return type(self).forward(self, *args, **kwargs)


@uncompiled
def decoder_forward(
    self: Any,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """The decoder (embedding to final norm): its own forward, with positions counted from each sequence's first token.

    Takes `attention_mask` [B,L] or none, `position_ids` where sequences are packed, or `cu_seq_lens_q`.
    """
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions: an adopted model never has attention weights")
    inputs: Any = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
    if inputs is None:
        raise ValueError("give input_ids or inputs_embeds")
    if input_ids is not None and input_ids.ndim != 2:
        raise ValueError(f"input_ids is {list(input_ids.shape)}, expected [batch, columns]")
    if isinstance(attention_mask, dict):
        raise ValueError(
            "attention_mask is a mapping of prepared masks, as a static cache needs them; give [batch, columns] or "
            "none, and use a DynamicCache"
        )
    plan: DecoderPlan = self.tokenspeed_plan
    plan.check_model()
    cache = cache_of(kwargs)
    layout = make_layout(
        tuple(inputs.shape[:2]),
        inputs.device,
        past=0 if cache is None else int(cache.get_seq_length()),
        attention_mask=attention_mask,
        position_ids=position_ids,
        cu_seq_lens=kwargs.get("cu_seq_lens_q"),
        max_positions=plan.max_positions,
    )
    # The class's own forward would derive a mask from the positions of packed sequences; nobody would read it.
    kwargs |= {LAYOUT: layout, "input_ids": input_ids, "attention_mask": None}
    out = type(self).forward(self, position_ids=layout.position_ids, **kwargs)
    if out[0].dtype != plan.dtype:
        # An engine of the other dtype may have other kernels.
        raise ValueError(
            f"this model was adopted in {plan.dtype} and computes in {out[0].dtype}: `restore` it and adopt it again, "
            "with `dtype` where its parameters are converted for every forward pass"
        )
    return out


def no_attention(*_args: Any, **_kwargs: Any) -> tuple[torch.Tensor, None]:
    """Registered as the attention of adopted models, whose layers never ask for it."""
    raise RuntimeError("this attention layer is not adopted; call tokenspeed.trainer.adopt on the whole model")


def no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Registered as the mask of adopted models: there is none to make, the layout says it all."""
