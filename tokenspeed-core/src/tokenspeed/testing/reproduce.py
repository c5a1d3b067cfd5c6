"""Makes a failure small and writes it to a file that shows it again.

The file is safetensors: the arguments of both calls and both results for the unit that differs, with the recipe, the
sides and the kernel as JSON in its metadata. `tokenspeed kernels verify --replay FILE` makes the inputs again, checks
that they are those of the file, runs the kernel and compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tokenspeed.errors import ConfigError
from tokenspeed.kernels.spec import KernelSpec
from tokenspeed.testing.cases import Side, without
from tokenspeed.testing.compare import differing, error, spell_difference, tolerance
from tokenspeed.testing.inputs import Recipe
from tokenspeed.testing.memory import same_bits
from tokenspeed.testing.names import KIT_VERSION
from tokenspeed.testing.subject import load_subject
from tokenspeed.testing.trial import Fault, Trial, Workload
from tokenspeed.testing.verify import CheckResult

SCHEMA = "tokenspeed/kernel-fault@1"

_TRIES = 60
"""Evaluations that making a failure smaller may take."""


def shrink(trial: Trial, fault: Fault) -> Fault:
    """The same fault with as few units in its calls as a greedy search finds; the fault itself when it has no sides."""
    if fault.recipe is None or fault.got is None:
        return fault
    best = fault.got
    tries = 0
    smaller = True
    while smaller and tries < _TRIES:
        smaller = False
        for side in _smaller(best, fault.unit, keep_units=trial.writes_cache):
            tries += 1
            if tries > _TRIES:
                break
            if _shows(trial, fault, side):
                best, smaller = side, True
                break
    return replace(fault, got=best)


def _smaller(side: Side, unit: int, *, keep_units: bool) -> list[Side]:
    """Sides with a call or half of a call's other units left out, the boldest first."""
    found = []
    for call, units in enumerate(side.calls):
        if len(side.calls) > 1 and not keep_units:
            found.append(without(side, call, ()))
        if keep_units or len(units) < 2:
            continue
        half = len(units) // 2
        pieces = [units[:half], units[half:], units[1:], units[:-1]]
        found += [without(side, call, piece) for piece in pieces]
    return [s for s in found if keep_units or any(unit in units for units in s.calls)]


def _shows(trial: Trial, fault: Fault, side: Side) -> bool:
    """Whether the fault is still there on a smaller side."""
    assert fault.recipe is not None
    with torch.inference_mode():
        try:
            return _difference(trial, fault.recipe, fault.unit, fault.expected, side) is not None
        except Exception:  # what the kernel raises on the smaller input is another fault
            return False


def _difference(trial: Trial, recipe: Recipe, unit: int, expected: Side | None, got: Side) -> str | None:
    """How a unit's results on two sides differ (`expected` None: from the reference, beyond its measure)."""
    case = trial.case(recipe)
    ours = case.evaluate(trial.subject, got)
    if expected is not None:
        theirs = case.evaluate(trial.subject, expected)
        return spell_difference(theirs[unit], ours[unit]) if differing(theirs, ours, [unit]) else None
    theirs = case.evaluate(trial.reference, got)
    operator = trial.subject.operator
    for a, b in zip(ours[unit], theirs[unit], strict=False):
        if error(operator, a, b) > tolerance(operator, b.dtype):
            return spell_difference((b,), (a,))
    return None if len(ours[unit]) == len(theirs[unit]) else f"{len(ours[unit])} outputs"


def save_fault(folder: Path, spec: KernelSpec, result: CheckResult) -> Path | None:
    """Write the smallest form of a failure to `folder`; None when it is not a matter of inputs (an import error)."""
    fault, trial = result.fault, result.trial
    if fault is None or trial is None or fault.recipe is None or fault.got is None:
        return None
    fault = shrink(trial, fault)
    assert fault.recipe is not None
    assert fault.got is not None
    case = trial.case(fault.recipe)
    tensors: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        expected = fault.expected or fault.got
        judge = trial.subject if fault.expected else trial.reference
        for side_name, subject, side in (("expected", judge, expected), ("got", trial.subject, fault.got)):
            call = next(units for units in side.calls[::-1] if trial.writes_cache or fault.unit in units)
            arguments = case.arguments(subject, replace(side, calls=(call,)))
            tensors |= _named(f"{side_name}.argument", arguments)
            results = case.evaluate(subject, side).get(fault.unit, ())
            tensors |= _named(f"{side_name}.result", dict(enumerate(results)))
    metadata = {
        "schema": SCHEMA,
        "kit": str(KIT_VERSION),
        "kernel": spec.name,
        "distribution": f"{spec.distribution} {spec.version}",
        "check": result.check,
        "summary": fault.summary,
        "dtypes": json.dumps(dict(trial.subject.dtypes)),
        "recipe": json.dumps(fault.recipe.as_dict()),
        "unit": str(fault.unit),
        "expected": json.dumps(fault.expected.as_dict() if fault.expected else None),
        "got": json.dumps(fault.got.as_dict()),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{spec.name}.{result.check}.safetensors"
    save_file(tensors, path, metadata)
    return path


def _named(prefix: str, values: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return {f"{prefix}.{name}": tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}


def replay(path: Path, specs: Sequence[KernelSpec]) -> tuple[KernelSpec, str | None]:
    """Run what a file holds: the kernel, and how it differs now (None: it no longer does).

    Raises ConfigError when the file is none of ours, another kit wrote it or the kernel is not installed.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is no readable safetensors file: {error}") from error
    if metadata.get("schema") != SCHEMA:
        raise ConfigError(f"{path} is not a file that `tokenspeed kernels verify` wrote")
    spec = next((spec for spec in specs if spec.name == metadata["kernel"]), None)
    if spec is None:
        raise ConfigError(f"{path} is about the kernel {metadata['kernel']}, which is not installed")
    recipe = Recipe(**json.loads(metadata["recipe"]))
    expected = json.loads(metadata["expected"])
    sides = Side.from_dict(expected) if expected else None, Side.from_dict(json.loads(metadata["got"]))
    trial = Trial(load_subject(spec, json.loads(metadata["dtypes"]), specs), Workload())
    unit = int(metadata["unit"])
    with torch.inference_mode():
        case = trial.case(recipe)
        call = next(units for units in sides[1].calls[::-1] if trial.writes_cache or unit in units)
        made = _named("got.argument", case.arguments(trial.subject, replace(sides[1], calls=(call,))))
        if changed := [name for name, tensor in made.items() if name not in saved or not _alike(saved[name], tensor)]:
            raise ConfigError(f"{path} was written by version {metadata['kit']} of the kit: {changed[0]} differs here")
        return spec, _difference(trial, recipe, unit, *sides)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return same_bits(a, b)
