"""Inputs for an operator, made from its description: model-shaped, odd and adversarial, always the same for one recipe.

An argument whose first axis is T or R has one row for each *unit* of work; everything else is shared by the batch. A
recipe says the sizes of the axes, the dtypes and the character of the values, and is all that a file needs to make the
same inputs again. Sequences with a KV cache are made in `paged.py`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tokenspeed.kernels.operators import OPERATORS, Argument, Operator
from tokenspeed.kernels.spec import KernelSpec

SUBJECTS = 6
"""Units of a case whose results are compared; the others are their neighbours."""

NEIGHBOURS = 6
"""Loud, special and ordinary rows that only keep them company."""

MANY_SUBJECTS = 2048
"""For norms in half precision: the sums have no cancellation, and a last bit of fp32 seldom shows in so few bits."""

CANCEL = "cancel"
"""Values that nearly cancel in pairs: a sum is small beside its terms, so that another order of additions shows even
after rounding to half precision. Made for comparing bits; no two orders agree well enough for comparing values."""

CHARACTERS = ("plain", "large", "tiny", "zeros", "equal", "spikes")

LOUD = 3e3

Value = torch.Tensor | int | float | bool | str | None


class NoInputs(LookupError):
    """The kit cannot make inputs for an operator that it does not know how to fill."""


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the inputs of a case; `sizes` by axis, `scalars` by role, dtype names by role."""

    operator: str
    sizes: Mapping[str, int]
    dtypes: Mapping[str, str]
    character: str = "plain"
    scalars: Mapping[str, Any] = field(default_factory=dict)
    optional: bool = True

    def describe(self) -> str:
        """`K=77 N=33, x bfloat16, weight bfloat16, large`."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        dtypes = ", ".join(f"{role} {dtype}" for role, dtype in sorted(self.dtypes.items()))
        scalars = "".join(f", {role}={value}" for role, value in self.scalars.items())
        return f"{sizes}, {dtypes}, {self.character}{scalars}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data; `Recipe(**data)` is the recipe again."""
        return asdict(self)


SHAPES: Mapping[str, Sequence[Mapping[str, int]]] = {
    "embedding.lookup": ({"V": 5, "H": 3}, {"V": 131, "H": 96}),
    "gemm.linear": ({"K": 5, "N": 3}, {"K": 77, "N": 33}, {"K": 640, "N": 72}),
    "gemm.batched": ({"G": 2, "K": 5, "N": 3}, {"G": 3, "K": 129, "N": 40}),
    "norm.rms": ({"H": 7}, {"H": 384}, {"heads": 3, "D": 34}),
    "norm.add_rms": ({"H": 7}, {"H": 384}),
    "norm.layer": ({"H": 7}, {"H": 384}),
    "rope.apply": (
        {"Hq": 2, "Hkv": 1, "D": 8, "R": 8, "positions": 40},
        {"Hq": 3, "Hkv": 2, "D": 64, "R": 48, "positions": 600},
    ),
    "activation.silu_and_mul": ({"F": 3}, {"F": 197}),
    "attention.index_topk": ({"L": 16, "k": 3}, {"L": 320, "k": 40}),
    "moe.route": ({"E": 4, "k": 2}, {"E": 32, "k": 5}),
    "moe.experts": ({"E": 3, "F": 4, "H": 6, "k": 2}, {"E": 5, "F": 33, "H": 72, "k": 3}),
    "sampling.block_sumexp": ({"V": 7, "block": 4}, {"V": 331, "block": 128}),
    "sampling.logprobs": ({"V": 7, "M": 2, "block": 4}, {"V": 331, "M": 3, "block": 128}),
    "sampling.sample": ({"V": 7}, {"V": 331}),
}
"""Sizes for each operator, small to large: the first that fails is the smallest that is known to fail."""

SCALARS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "norm.rms": ({"eps": 1e-6},),
    "norm.add_rms": ({"eps": 1e-6},),
    "norm.layer": ({"eps": 1e-6},),
    "rope.apply": ({"interleaved": False}, {"interleaved": True}),
    "moe.route": tuple(
        {"scoring": scoring, "form": form, "normalise": normalise, "scale": scale, "groups": groups, "top_groups": kept}
        for scoring, form, normalise, scale, groups, kept in (
            ("softmax", "torch", True, 1.0, 1, 1),
            ("softmax", "fused", False, 1.0, 1, 1),
            ("sigmoid", "torch", True, 2.5, 2, 1),
        )
    ),
    "moe.experts": ({"order": "slot"}, {"order": "rank"}),
    "sampling.logprobs": ({"order": "torch"}, {"order": "megatron"}),
}

SCALAR_TRAITS = {
    "attention.sparse_paged": ("order", "slot_order"),
    "moe.route": ("form", "form"),
    "moe.experts": ("order", "combine_order"),
}
"""A scalar that a kernel may restrict by a trait: (role, trait). A kernel is only called with what it declares."""

DEFAULT_SIZES = {"K": 77, "N": 33, "H": 96, "F": 65, "D": 32, "V": 131, "G": 3, "Hq": 4, "Hkv": 2, "heads": 3, "M": 2}
"""Sizes of the axes of an operator that is not in the table above."""

_SCALE = {"large": 32.0, "tiny": 2.0**-30}
_ROUTER_SCALE = {"large": 4.0, "tiny": 2.0**-6}  # scores that vanish are equal in one library and not in another

ATTENTION_SCALE = {"large": 2.0, "tiny": 2.0**-10}
"""Scores grow with the square, and an error of a score is an error of a weight."""


def recipes(
    operator: str, dtypes: Mapping[str, str], *, characters: Sequence[str] = CHARACTERS, few: bool = False
) -> Iterator[Recipe]:
    """The recipes of an operator for one dtype signature, small to large. `few` gives one size and one character."""
    shapes = SHAPES.get(operator) or (_default_sizes(OPERATORS[operator]),)
    scalars = SCALARS.get(operator, ({},))
    for index, sizes in enumerate(shapes[-1:] if few else shapes):
        for given in scalars:
            for character in characters[:1] if few else characters:
                yield Recipe(operator, sizes, dtypes, character, given, optional=few or index != 1)


def _default_sizes(operator: Operator) -> dict[str, int]:
    axes = {axis for a in operator.arguments for axis in _axes(a.shape, {}) if axis not in ("T", "R")}
    if unknown := sorted(axis for axis in axes if re.sub(r"^\d+", "", axis) not in DEFAULT_SIZES):
        raise NoInputs(f"the kit has no inputs for {operator.name}: it does not know the axes {', '.join(unknown)}")
    return {re.sub(r"^\d+", "", axis): DEFAULT_SIZES[re.sub(r"^\d+", "", axis)] for axis in sorted(axes)}


def _axes(shape: str, sizes: Mapping[str, int]) -> list[str]:
    """`T,2F` -> ["T", "2F"]; of alternatives (`T,H or T,heads,D`) the first whose axes all have a size."""
    forms = [[axis for axis in form.split(",") if axis] for form in shape.split(" or ")]
    known = {"T", *sizes, *(("R",) if "R" not in sizes else ())}
    return next((form for form in forms if {re.sub(r"^\d+", "", axis) for axis in form} <= known), forms[0])


def is_by_row(argument: Argument, sizes: Mapping[str, int]) -> bool:
    """Whether an argument has one row for each unit."""
    axes = _axes(argument.shape, sizes)
    return bool(axes) and (axes[0] == "T" or (axes[0] == "R" and "R" not in sizes))


def extent(argument: Argument, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an argument without its unit axis."""
    axes = _axes(argument.shape, sizes)
    found = []
    for axis in axes[1:] if is_by_row(argument, sizes) else axes:
        factor, name = re.fullmatch(r"(\d*)(\w+)", axis).groups()  # type: ignore[union-attr]
        found.append(int(factor or 1) * sizes[name])
    return tuple(found)


@dataclass(frozen=True)
class Maker:
    """What a value generator may look at."""

    recipe: Recipe
    argument: Argument
    shape: tuple[int, ...]
    generator: torch.Generator
    made: Mapping[str, torch.Tensor]

    def normal(self) -> torch.Tensor:
        """Standard normal fp32."""
        return torch.randn(self.shape, generator=self.generator)

    def integers(self, low: int, high: int) -> torch.Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, self.shape, generator=self.generator)

    def pick(self, *values: float) -> torch.Tensor:
        """Any of `values`, each at least once where there is room."""
        count = max(1, torch.Size(self.shape).numel())
        cycled = torch.tensor(values)[torch.arange(count) % len(values)]
        return cycled[torch.randperm(count, generator=self.generator)].reshape(self.shape)


def _row_max(maker: Maker) -> torch.Tensor:
    temperature = maker.made["temperature"]
    divisor = torch.where(temperature == 0, torch.ones_like(temperature), temperature)
    return (maker.made["logits"].to(torch.float32) / divisor.unsqueeze(-1)).amax(-1)


def _some_negative(maker: Maker) -> torch.Tensor:
    ids = maker.integers(0, maker.recipe.sizes["V"])
    ids[-1, -1] = -1
    return ids


def _scores_with_ties(maker: Maker) -> torch.Tensor:
    """Multiples of a half, so that many are equal; in some rows numbers that are no numbers."""
    scores = (characterise(maker.normal(), maker.recipe.character, _SCALE) * 2).round() / 2
    scores[::4] = maker.normal()[::4]
    for row, value in ((1, -0.0), (2, torch.nan), (3, -torch.inf)):
        scores[row::4, ::3] = value
    return scores


def _angles(maker: Maker) -> torch.Tensor:
    rows, rotary = maker.shape
    half = rotary // 2
    steps = torch.arange(rows, dtype=torch.float64).unsqueeze(-1) * 10000 ** -(torch.arange(half).double() / half)
    return torch.cat((steps.cos(), steps.sin()), dim=-1).to(torch.float32)


VALUES: Mapping[tuple[str, str], Callable[[Maker], torch.Tensor]] = {
    ("embedding.lookup", "ids"): lambda maker: maker.integers(0, maker.recipe.sizes["V"]),
    ("rope.apply", "positions"): lambda maker: maker.integers(0, maker.recipe.sizes["positions"]),
    ("rope.apply", "cos_sin"): _angles,
    ("sampling.block_sumexp", "row_max"): _row_max,
    ("sampling.logprobs", "ids"): _some_negative,
    ("attention.index_topk", "scores"): _scores_with_ties,
    ("attention.index_topk", "positions"): lambda maker: maker.integers(0, maker.recipe.sizes["L"]),
    ("moe.route", "bias"): lambda maker: maker.normal() * 0.1,
    ("moe.experts", "ids"): lambda maker: maker.integers(0, maker.recipe.sizes["E"] + 1).to(torch.int32),
    ("moe.experts", "weights"): lambda maker: torch.rand(maker.shape, generator=maker.generator),
    ("", "temperature"): lambda maker: maker.pick(1.0, 0.0, 0.7, 1.3),
    ("", "top_k"): lambda maker: maker.pick(0, 5, 1, 1 << 20, 3).to(torch.int32),
    ("", "top_p"): lambda maker: maker.pick(1.0, 0.9, 0.5, 1.0),
    ("", "min_p"): lambda maker: maker.pick(0.0, 0.0, 0.05),
    ("", "seeds"): lambda maker: maker.integers(-(1 << 62), 1 << 62),
    ("sampling.sample", "positions"): lambda maker: maker.integers(0, 1 << 34),
}
"""How arguments of a fixed dtype are filled, by operator and role; the empty operator is any."""

_AROUND_ONE = ("norm.rms", "norm.add_rms", "norm.layer")
"""Operators whose weight is a scale, in 0.5 to 1.5."""


def fill(maker: Maker) -> torch.Tensor:
    """Values for one argument."""
    operator, role = maker.recipe.operator, maker.argument.role
    custom = VALUES.get((operator, role)) or VALUES.get(("", role))
    if custom is not None:
        return custom(maker)
    dtype = maker.argument.dtype
    if not dtype.startswith("$"):
        raise NoInputs(f"the kit has no inputs for {operator}: it does not know what {role} ({dtype}) may hold")
    cancels = maker.recipe.character == CANCEL
    if role in ("weight", "bias", *OPERATORS[operator].weights):
        if operator in _AROUND_ONE:
            values = 0.5 + torch.rand(maker.shape, generator=maker.generator)
        else:
            values = maker.normal() * 0.25
            if cancels and values.dim() > 1:
                width = values.shape[-1] // 2 * 2
                values[..., 1:width:2] = values[..., 0:width:2]
    else:
        scale = _ROUTER_SCALE if operator == "moe.route" else _SCALE
        values = characterise(maker.normal(), maker.recipe.character, scale)
        if cancels:
            cancel_pairs(values, -1, maker.generator)
    return values.to(getattr(torch, maker.recipe.dtypes[dtype[1:]]))


def cancel_pairs(values: torch.Tensor, axis: int, generator: torch.Generator) -> None:
    """Make every second entry along `axis` nearly the negative of the one before it."""
    by_entry = values.movedim(axis, 0)
    pairs = len(by_entry) // 2
    first = by_entry[0 : 2 * pairs : 2]
    by_entry[1 : 2 * pairs : 2] = 2.0**-6 * torch.randn(first.shape, generator=generator) - first


def characterise(values: torch.Tensor, character: str, scale: Mapping[str, float]) -> torch.Tensor:
    """Normal values turned into large, tiny, zero or equal ones, or into zeros with a few large ones."""
    if character == "zeros":
        return torch.zeros_like(values)
    if character == "equal":
        return torch.full_like(values, 0.75)
    if character == "spikes":
        return torch.where(values.abs() > 1.5, values * scale["large"], torch.zeros_like(values))
    return values * scale.get(character, 1.0)


def generator_of(recipe: Recipe, salt: str = "") -> torch.Generator:
    """A generator that is the same for equal recipes, on every machine."""
    text = (
        f"{recipe.operator} {sorted(recipe.sizes.items())} {recipe.character} {sorted(recipe.scalars.items())} {salt}"
    )
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))


def scalar(recipe: Recipe, argument: Argument) -> Value:
    """The value of an argument that is no tensor."""
    if argument.role in recipe.scalars:
        return recipe.scalars[argument.role]  # type: ignore[no-any-return]
    if argument.role == "block":
        return recipe.sizes["block"]
    if argument.role == "top_k":
        return recipe.sizes["k"]
    raise NoInputs(f"the kit has no inputs for {recipe.operator}: it does not know a value for {argument.role}")


def subjects_of(recipe: Recipe) -> int:
    """How many units of a recipe are compared."""
    is_half = recipe.dtypes.get("x") in ("bfloat16", "float16")
    return MANY_SUBJECTS if recipe.operator in _AROUND_ONE and is_half else SUBJECTS


def make_rows(recipe: Recipe, count: int) -> tuple[dict[str, Value], dict[str, torch.Tensor]]:
    """Shared arguments, and those with one row for each of `count` units; the last ones are loud or not finite."""
    operator = OPERATORS[recipe.operator]
    shared: dict[str, Value] = {}
    by_row: dict[str, torch.Tensor] = {}
    # A value that is made from others (`row_max`) comes after them.
    for argument in sorted(operator.arguments, key=lambda a: a.role == "row_max"):
        row = is_by_row(argument, recipe.sizes)
        if not argument.shape:
            shared[argument.role] = scalar(recipe, argument)
        elif argument.optional and not recipe.optional:
            shared[argument.role] = None
        else:
            shape = (*((count,) if row else ()), *extent(argument, recipe.sizes))
            made = {**by_row, **{k: v for k, v in shared.items() if isinstance(v, torch.Tensor)}}
            values = fill(Maker(recipe, argument, shape, generator_of(recipe, argument.role), made))
            if row and argument.dtype.startswith("$"):
                make_loud(values, count - NEIGHBOURS)
            (by_row if row else shared)[argument.role] = values
    return shared, by_row


def make_loud(rows: torch.Tensor, first: int) -> None:
    """Turn the rows from `first` on into company that a leak would show: very large, NaN, infinite, zero."""
    for at, factor in enumerate((LOUD, torch.nan, torch.inf, 0.0)):
        if first >= 0 and first + at < len(rows):
            rows[first + at] *= factor


def signatures(spec: KernelSpec) -> list[Mapping[str, str]]:
    """The dtype signatures of a kernel, without repetitions."""
    return [dict(pairs) for pairs in dict.fromkeys(tuple(sorted(s.items())) for s in spec.signatures)]
