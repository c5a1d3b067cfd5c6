"""The certificate: what enters the fingerprint, what must not, and that a written one cannot be altered unseen."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from tokenspeed.errors import ConfigError, StartRefused
from tokenspeed.kernels.registry import KernelRegistry
from tokenspeed.kernels.select import select
from tokenspeed.kernels.spec import KernelSpec, Need, trait_table
from tokenspeed.machine import Machine
from tokenspeed.models.profile import ModelProfile
from tokenspeed.numerics.certificate import Certificate, certify, differences
from tokenspeed.numerics.plan import Plan, make_plan
from tokenspeed.numerics.resolve import resolve
from tokenspeed.numerics.weights import TensorDigest, WeightsDigest

NEEDS = [
    Need.of("gemm.linear", dtypes={"x": "bfloat16", "weight": "bfloat16"}, facts={"k": 8, "n": 8}),
    Need.of("gemm.linear", dtypes={"x": "bfloat16", "weight": "bfloat16"}, facts={"k": 8, "n": 16}),
    Need.of("norm.rms", dtypes={"x": "bfloat16"}),
]
WEIGHTS = WeightsDigest({"w": TensorDigest("BF16", (2, 2), "00" * 32)})
AVX2 = Machine("cpu", "x86_64", frozenset({"avx2"}), cores=4)
AVX512 = Machine("cpu", "x86_64", frozenset({"avx2", "avx512f"}), cores=64, memory_bytes=1 << 40)


def make_spec(name: str, operator: str, roles: tuple[str, ...], **more: Any) -> KernelSpec:
    fields: dict[str, Any] = {
        "implementation": "json:dumps",
        "signatures": (dict.fromkeys(roles, "bfloat16"),),
        "features": frozenset({"batch_invariant"}),
        "traits": trait_table({}),
        "bit_order": f"acme/{operator}@1",
        "distribution": "acme",
        "version": "1.0",
        **more,
    }
    return KernelSpec(name=name, operator=operator, solution="acme", **fields)


def make(
    *,
    linear: dict[str, Any] | None = None,
    numerics: str = "rl-bitwise",
    switches: dict[str, str] | None = None,
    machine: Machine = AVX2,
    profile: dict[str, Any] | None = None,
    dtype: str = "bfloat16",
    **more: Any,
) -> Certificate:
    specs = [
        make_spec("acme.linear", "gemm.linear", ("x", "weight"), **(linear or {})),
        make_spec("acme.norm", "norm.rms", ("x",)),
    ]
    fields: dict[str, Any] = {"bit_order": "acme/model@1", "distribution": "acme", "version": "1.0", **(profile or {})}
    needs_switches = frozenset({"layer_boundary_norm"})
    plan: Plan = make_plan(
        model="m",
        dtype=dtype,
        profile=ModelProfile("AcmeForCausalLM", "acme:Model", needs_switches=needs_switches, **fields),
        machine=machine,
        numerics=resolve(numerics, None, switches or {}).numerics,
        selection=select(NEEDS, KernelRegistry(specs), machine),
        core_version="1",
    )
    arguments: dict[str, Any] = {
        "weights": WEIGHTS,
        "model_config": {"hidden_size": 8},
        "eos_ids": (2,),
        "logprobs_mode": "processed",
        "vocab_size": 100,
        "tables": {"rope": "11" * 32},
        "variants": {"acme.linear": "avx2"},
        "provenance": {"threads": 2},
        **more,
    }
    return certify(plan, **arguments)


@pytest.mark.parametrize(
    "change",
    [
        {"machine": AVX512},
        {"variants": {"acme.linear": "avx512"}},
        {"provenance": {"threads": 64, "harness": {"holds": True}}},
        {"linear": {"version": "2.0"}},
        {"linear": {"distribution": "a-fork", "name": "acme.linear"}},
        {"profile": {"version": "9"}},
        {"model_config": {"hidden_size": 8, "transformers_version": "9", "_name_or_path": "x", "torch_dtype": "y"}},
        {"switches": {"autotune": "off"}},
        {"switches": {"moe_combine_order": "slot"}},
    ],
)
def test_what_changes_no_bit_changes_no_fingerprint(change: dict[str, Any]) -> None:
    linear = change.get("linear", {})
    if "name" in linear:
        change = {"linear": {key: value for key, value in linear.items() if key != "name"}}
    assert make(**change).fingerprint == make().fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"weights": WeightsDigest({"w": TensorDigest("BF16", (2, 2), "01" * 32)})},
        {"weights": WeightsDigest({"w": TensorDigest("BF16", (4, 1), "00" * 32)})},
        {"linear": {"bit_order": "acme/gemm.linear@2"}},
        {"profile": {"bit_order": "acme/model@2"}},
        {"model_config": {"hidden_size": 8, "rope_theta": 5.0}},
        {"tables": {"rope": "12" * 32}},
        {"eos_ids": (2, 3)},
        {"logprobs_mode": "raw"},
        {"dtype": "float32"},
        {"numerics": "auto"},
        {"numerics": "auto", "switches": {"layer_boundary_norm": "unfused", "logprob_order": "megatron"}},
    ],
)
def test_what_may_change_a_bit_changes_the_fingerprint(change: dict[str, Any]) -> None:
    assert make(**change).fingerprint != make().fingerprint


@pytest.mark.parametrize("change", [{"version": "2.0"}, {"distribution": "a-fork"}])
def test_a_kernel_without_a_bit_order_counts_by_distribution_version_and_variant(change: dict[str, Any]) -> None:
    silent = {"bit_order": None}
    assert make(linear={**silent, **change}).fingerprint != make(linear=silent).fingerprint
    other_variant = make(linear=silent, variants={"acme.linear": "avx512"})
    assert other_variant.fingerprint != make(linear=silent).fingerprint


def test_a_model_without_a_bit_order_counts_by_distribution_and_version() -> None:
    silent = {"bit_order": None}
    assert make(profile={**silent, "version": "2"}).fingerprint != make(profile=silent).fingerprint


def test_shapes_are_listed_only_where_kernels_differ_by_shape() -> None:
    entries = [entry for entry in make().bits["operators"] if entry["operator"] == "gemm.linear"]
    assert [entry.keys() for entry in entries] == [{"operator", "dtypes", "traits", "order"}]


def test_new_weights_change_it_and_old_ones_bring_it_back() -> None:
    first = make()
    other = WeightsDigest({"w": TensorDigest("BF16", (2, 2), "01" * 32)})
    second = first.with_weights("2", other)
    assert second.fingerprint != first.fingerprint
    assert second.with_weights("3", WEIGHTS).fingerprint == first.fingerprint
    unknown = first.with_weights("2", None)
    assert len({first.fingerprint, second.fingerprint, unknown.fingerprint}) == 3
    assert first.with_weights("3", None).fingerprint != unknown.fingerprint


def test_it_survives_json_and_shows_alterations() -> None:
    certificate = make().with_results({"holds": True})
    written = json.loads(json.dumps(certificate.as_dict()))
    assert Certificate.from_dict(written).fingerprint == certificate.fingerprint
    written["bits"]["weights"]["sha256"] = "02" * 32
    with pytest.raises(ConfigError, match="altered"):
        Certificate.from_dict(written)
    with pytest.raises(ConfigError, match="no certificate"):
        Certificate.from_dict({"bits": {}})


def test_differences_name_the_place() -> None:
    old, new = make(), make(tables={"rope": "12" * 32}, linear={"bit_order": "acme/gemm.linear@2"})
    lines = list(differences(old.bits, new.bits))
    assert any(line.startswith("model.tables.rope: 1111") for line in lines)
    assert any("no longer" in line and "acme/gemm.linear@1" in line for line in lines)
    assert list(differences(old.bits, old.bits)) == []


def test_variants_are_asked_of_the_kernels() -> None:
    base = make_spec("acme.norm", "norm.rms", ("x",))
    plan_of = {
        spec.variant: make_plan(
            model="m",
            dtype="bfloat16",
            profile=ModelProfile("A", "a:B"),
            machine=AVX2,
            numerics=resolve("auto").numerics,
            selection=select(NEEDS[2:], KernelRegistry([spec]), AVX2),
            core_version="1",
        )
        for spec in (base, replace(base, variant="platform:machine"), replace(base, variant="platform:nothing"))
    }
    assert plan_of[None].variants() == {}
    assert list(plan_of["platform:machine"].variants()) == ["acme.norm"]
    with pytest.raises(StartRefused, match="cannot be loaded"):
        plan_of["platform:nothing"].variants()


def test_weights_digest_is_by_name_and_can_be_updated() -> None:
    tensors = {name: TensorDigest("F32", (1,), f"{i:064x}") for i, name in enumerate("abc")}
    digest = WeightsDigest(MappingProxyType(tensors))
    assert WeightsDigest(dict(reversed(tensors.items()))).hex == digest.hex
    changed = digest.updated({"b": TensorDigest("F32", (1,), "ff" * 32)})
    assert changed.hex != digest.hex
    assert changed.updated({"b": tensors["b"]}).hex == digest.hex
    assert digest.only(["a", "b"]).hex != digest.hex
    with pytest.raises(KeyError):
        digest.only(["z"])
