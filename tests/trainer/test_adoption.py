"""An adopted transformers model computes the engine's bits, in any shape of batch and at any moment of a training."""

from __future__ import annotations

import copy
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tokenspeed import LLM
from tokenspeed.errors import StartRefused
from tokenspeed.trainer import adopt, forget_packed_weights, logprobs, restore
from tokenspeed.trainer.table import MODULES
from tokenspeed_models.plugin import tokenspeed_models

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [512, 257, 256, 255, 129, 128, 127, 65, 64, 63, 33, 31, 17, 16, 15, 2]
VOCAB = 320
FAMILIES = (
    "Llama",
    "Qwen2",
    "Qwen3",
    "Qwen3Moe",
    "Mixtral",
    "DeepseekV3",
    "DeepseekV32",
    "GlmMoeDsa",
    "LongcatFlash",
)
CASES = [(family, dtype) for family in FAMILIES for dtype in (torch.bfloat16, torch.float32)]

MakeFolder = Callable[[str, torch.dtype], Path]
Load = Callable[[Path], Any]


def ragged(count: int = 32) -> list[list[int]]:
    """Sequences of ragged lengths up to 512."""
    source = random.Random(5)
    lengths = (LENGTHS + [source.randint(2, 100) for _ in range(count)])[:count]
    return [[source.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


def start(folder: Path, **options: Any) -> LLM:
    sizes = {"threads": 1, "num_kv_pages": 256, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    return LLM(folder, **{"numerics": "rl-bitwise", "trainer": "transformers", **sizes, **options})


def padded(sequences: list[list[int]], side: str) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, padded on the left or the right."""
    width = max(map(len, sequences))
    ids, mask = (
        torch.zeros(len(sequences), width, dtype=torch.int64),
        torch.zeros(len(sequences), width, dtype=torch.int64),
    )
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if side == "left" else slice(0, len(sequence))
        ids[row, place], mask[row, place] = torch.tensor(sequence), 1
    return {"input_ids": ids, "attention_mask": mask}


def packed(sequences: list[list[int]]) -> dict[str, torch.Tensor]:
    """One row, with positions that start again."""
    positions = [at for sequence in sequences for at in range(len(sequence))]
    return {
        "input_ids": torch.tensor([list(chain.from_iterable(sequences))]),
        "position_ids": torch.tensor([positions]),
    }


def rows_of(logits: torch.Tensor, batch: dict[str, torch.Tensor], sequences: list[list[int]]) -> list[torch.Tensor]:
    """Logits [T,V] of each sequence."""
    flat = logits.reshape(-1, logits.shape[-1])
    if "attention_mask" in batch:
        flat = flat[batch["attention_mask"].flatten().bool()]
    return list(torch.split(flat, [len(sequence) for sequence in sequences]))


def trainer_logprobs(model: Any, batch: dict[str, torch.Tensor], sequences: list[list[int]]) -> list[torch.Tensor]:
    logits = rows_of(model(**batch).logits, batch, sequences)
    return [logprobs(rows[:-1], torch.tensor(sequence[1:])) for rows, sequence in zip(logits, sequences, strict=True)]


def engine_logprobs(llm: LLM, sequences: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(score.logprobs[1:], dtype=torch.float32) for score in llm.score(sequences)]


def checkpoint_activations(model: Any, reentrant: bool) -> None:
    """Under its name in newer or older releases of transformers."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def learning(model: Any) -> list[tuple[str, Any]]:
    """Parameters with a gradient: all but those of indexers, whose choice has none."""
    named = list(model.named_parameters())
    assert all(parameter.grad is None for name, parameter in named if ".indexer." in name)
    return [(name, parameter) for name, parameter in named if ".indexer." not in name]


ONE_OF_MANY = ("layers.1.mlp.up_proj.weight", "layers.0.mlp.experts.down_proj", "layers.1.mlp.experts.down_proj")
"""Parameters of which one value is changed."""


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.detach(), b) for a, b in zip(got, expected, strict=True))


def test_every_architecture_that_promises_can_be_adopted() -> None:
    promised = {profile.architecture for profile in tokenspeed_models() if "rl-bitwise" in profile.numerics_envelopes}
    assert promised == set(MODULES) == {f"{family}ForCausalLM" for family in FAMILIES}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def folder(request: pytest.FixtureRequest, make_folder: MakeFolder) -> Path:
    return make_folder(*request.param)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with start(folder) as found:
        yield found


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[torch.Tensor]:
    """The engine's log-probabilities of the ragged sequences."""
    return engine_logprobs(llm, ragged())


@pytest.fixture
def model(folder: Path, load_trainer: Load) -> Any:
    found = load_trainer(folder)
    adopt(found)
    return found


@torch.no_grad()
def test_any_shape_of_batch(model: Any, expected: list[torch.Tensor]) -> None:
    sequences = ragged()
    model.eval()
    assert same(trainer_logprobs(model, packed(sequences), sequences), expected)
    for first in (0, 16):
        part = slice(first, first + 16)
        for side in ("left", "right"):
            batch = padded(sequences[part], side)
            assert same(trainer_logprobs(model, batch, sequences[part]), expected[part]), (side, first)
    for index in (1, 9, 15, 31):
        alone = {"input_ids": torch.tensor([sequences[index]])}
        assert same(trainer_logprobs(model, alone, [sequences[index]]), [expected[index]])


def test_while_training(model: Any, expected: list[torch.Tensor]) -> None:
    """Train mode, with gradients, with and without checkpointed activations; and the gradients are the same bits."""
    sequences = ragged()[9:]
    batch = packed(sequences)
    model.train()
    gradients = []
    for reentrant in (None, False, True):
        if reentrant is not None:
            checkpoint_activations(model, reentrant)
            model.enable_input_require_grads()
        model.zero_grad()
        found = trainer_logprobs(model, batch | {"use_cache": False}, sequences)
        assert same(found, expected[9:])
        torch.cat(found).mean().backward()
        gradients.append({name: parameter.grad for name, parameter in learning(model)})
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients[0].values())
    for other in gradients[1:]:
        assert all(torch.equal(gradient, other[name]) for name, gradient in gradients[0].items())


def test_gradients_are_those_of_the_stock_model(model: Any, folder: Path, load_trainer: Load) -> None:
    sequences = ragged()[10:20]
    stock = load_trainer(folder)
    # In bf16 a router's near ties are decided otherwise, which is a difference of a whole expert. Indexers rectify
    # their scores and have exact ties, which transformers leaves to chance: here they choose every position.
    routed, sparse = (any(part in name for name, _ in stock.named_parameters()) for part in ("experts", "indexer"))
    tolerance = 1e-4 if stock.dtype == torch.float32 else 0.5 if routed else 0.1
    if sparse:
        sequences = [sequence[: stock.config.index_topk] for sequence in sequences]
    for each in (model, stock):
        batch = padded(sequences, "right")
        found = [
            torch.log_softmax(rows[:-1].float(), -1).gather(-1, torch.tensor(sequence[1:]).unsqueeze(-1))
            for rows, sequence in zip(rows_of(each(**batch).logits, batch, sequences), sequences, strict=True)
        ]
        torch.cat(found).mean().backward()
    for (name, a), (_, b) in zip(learning(model), learning(stock), strict=True):
        if name.endswith("k_proj.bias"):
            continue  # adds the same to all scores of a query, so what is computed for it is rounding alone
        difference = float((a.grad - b.grad).float().norm() / b.grad.float().norm())
        assert difference < tolerance, name


def test_after_optimiser_steps_with_weights_pushed(model: Any, folder: Path) -> None:
    sequences = ragged()[8:20]
    batch = packed(sequences)
    optimisers = [
        torch.optim.SGD(model.parameters(), lr=0.5),
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),
    ]
    with start(folder) as llm:
        seen = [torch.cat(engine_logprobs(llm, sequences))]
        for optimiser in optimisers:
            torch.cat(trainer_logprobs(model, batch, sequences)).mean().neg().backward()
            optimiser.step()
            model.zero_grad()
            after = trainer_logprobs(model, batch, sequences)
            assert not same(after, engine_logprobs(llm, sequences))
            llm.update_weights(model.state_dict().items())
            assert same(after, engine_logprobs(llm, sequences))
            seen.append(torch.cat(after).detach())
    assert all(not torch.equal(a, b) for a, b in pairwise(seen))


@torch.no_grad()
def test_an_unadopted_model_differs(folder: Path, load_trainer: Load, expected: list[torch.Tensor]) -> None:
    stock = load_trainer(folder).eval()
    sequences, expected = ragged()[8:], expected[8:]
    batch = padded(sequences, "right")
    before = trainer_logprobs(stock, batch, sequences)
    assert not same(before, expected)
    adopt(stock)
    restored = copy.deepcopy(stock)
    restore(restored)
    assert same(trainer_logprobs(restored, batch, sequences), before)
    assert same(trainer_logprobs(stock, batch, sequences), expected)


@torch.no_grad()
def test_one_ulp_of_one_weight_shows(model: Any, expected: list[torch.Tensor]) -> None:
    sequences = ragged()
    weight = next(tensor for name, tensor in model.named_parameters() if name.endswith(ONE_OF_MANY))
    bits = weight.view(torch.int16 if weight.dtype == torch.bfloat16 else torch.int32).view(-1)
    bits[weight.abs().argmax()] += 1
    assert not same(trainer_logprobs(model, packed(sequences), sequences), expected)


@torch.no_grad()
def test_generating_with_a_cache_takes_the_engines_tokens(model: Any, llm: LLM) -> None:
    from tokenspeed import SamplingParams

    prompts = [sequence[:30] for sequence in ragged()[8:16]]
    batch = padded(prompts, "left")
    out = model.eval().generate(**batch, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={2: -100.0})
    replies = llm.generate(prompts, params)
    assert out[:, -12:].tolist() == [reply.outputs[0].token_ids for reply in replies]


@torch.no_grad()
def test_a_compiler_is_kept_out(make_folder: MakeFolder, load_trainer: Load) -> None:
    """Compiled additions are fused and not rounded in between, so none may be handed to a compiler."""
    model = load_trainer(make_folder("Qwen3", torch.bfloat16)).eval()
    ids = torch.tensor([ragged()[5]])
    compiled: list[str] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        compiled.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def additions() -> int:
        torch._dynamo.reset()
        compiled.clear()
        torch.compile(model, backend=backend)(ids)
        model.model.layers[1].compile(backend=backend)
        model(ids)
        model.model.layers[1]._compiled_call_impl = None
        return sum("add" in target for target in compiled)

    assert additions() > 0
    adopt(model)
    assert additions() == 0


@torch.no_grad()
def test_pickled(make_folder: MakeFolder, load_trainer: Load) -> None:
    """An adopted model that was pickled, as workers receive it, is an adopted model."""
    model = load_trainer(make_folder("Qwen3", torch.bfloat16)).eval()
    adopt(model)
    copied = pickle.loads(pickle.dumps(model))
    ids = torch.tensor([ragged()[5]])
    assert torch.equal(copied(ids).logits, model(ids).logits)
    restore(copied)
    assert not torch.equal(copied(ids).logits, model(ids).logits)


@torch.no_grad()
def test_more_positions_than_memory_holds(make_folder: MakeFolder, load_trainer: Load, tmp_path: Path) -> None:
    """Tables reach as far as the engine's context and the trainer's sequences, whatever `config.json` states."""
    folder = tmp_path / "long"
    shutil.copytree(make_folder("Llama", torch.bfloat16), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 10**9}))
    sequences = ragged(8)
    fingerprints = set()
    for length in (513, 2000):
        with start(folder, max_model_len=length) as llm:
            expected = engine_logprobs(llm, sequences)
            fingerprints.add(llm.engine.fingerprint)
    assert len(fingerprints) == 1
    model = load_trainer(folder).eval()
    adopt(model)
    for sequence, logprob in zip(sequences[::-1], expected[::-1], strict=True):  # the longest comes last
        batch = {"input_ids": torch.tensor([sequence])}
        assert same(trainer_logprobs(model, batch, [sequence]), [logprob])


def test_a_longer_sequence_between_a_checkpointed_forward_and_its_backward(
    make_folder: MakeFolder, load_trainer: Load
) -> None:
    model = load_trainer(make_folder("Llama", torch.float32)).train()
    adopt(model)
    checkpoint_activations(model, False)
    short, long = torch.tensor([ragged()[15]]), torch.tensor([ragged()[0]])
    loss = model(short).logits.square().mean()
    model(long)
    loss.backward()
    assert model.model.embed_tokens.weight.grad.isfinite().all()


@torch.no_grad()
def test_a_dtype_that_the_model_was_not_adopted_in(make_folder: MakeFolder, load_trainer: Load) -> None:
    """The kernels are those of an engine of one dtype, and a router's logits are in it."""
    folder, ids = make_folder("Qwen3Moe", torch.float32), torch.tensor([ragged()[5]])
    model = load_trainer(folder).eval()
    half = load_trainer(folder).eval().bfloat16()
    adopt(half)
    expected = half(ids).logits
    adopt(model)
    model.bfloat16()
    with pytest.raises(ValueError, match=r"adopted in torch.float32 and computes in torch.bfloat16"):
        model(ids)
    restore(model)
    adopt(model)
    assert torch.equal(model(ids).logits, expected)
    # As the mixed precision of `fully_shard`: parameters of one dtype, and a forward with copies in another.
    kept = load_trainer(folder).eval()
    assert adopt(kept, dtype=torch.bfloat16).dtype == "bfloat16"
    copies = {name: tensor.bfloat16() for name, tensor in kept.named_parameters()}
    assert torch.equal(torch.func.functional_call(kept, copies, (ids,)).logits, expected)
    with pytest.raises(ValueError, match=r"adopted in torch.bfloat16 and computes in torch.float32"):
        kept(ids)


def test_a_batch_without_tokens_is_refused(make_folder: MakeFolder, load_trainer: Load) -> None:
    model = load_trainer(make_folder("Llama", torch.float32))
    adopt(model)
    for shape in ((0, 5), (2, 0)):
        with pytest.raises(ValueError, match=f"the batch is empty: {shape[0]} rows of {shape[1]} tokens"):
            model(torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"input_ids is \[5\], expected \[batch, columns\]"):
        model(torch.zeros(5, dtype=torch.int64))


class LowRank(torch.nn.Module):
    """A projection with an adapter beside it, wrapped as PEFT wraps it; `merge` writes as PEFT writes."""

    def __init__(self, base_layer: torch.nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base_layer
        generator = torch.Generator().manual_seed(1)
        down = torch.randn(rank, base_layer.in_features, generator=generator) / 5
        up = torch.randn(base_layer.out_features, rank, generator=generator) / 5
        self.lora_A, self.lora_B = torch.nn.Parameter(down), torch.nn.Parameter(up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delta = torch.nn.functional.linear(torch.nn.functional.linear(x, self.lora_A), self.lora_B)
        return self.base_layer(x) + delta

    def merge(self) -> torch.nn.Linear:
        self.base_layer.weight.data += self.lora_B.data @ self.lora_A.data
        return self.base_layer


class TestChangedAfterwards:
    """An adopted model whose modules are no longer what was adopted is refused when it is called, and never differs."""

    IDS = torch.tensor([ragged()[5]])

    @pytest.fixture
    def adopted(self, make_folder: MakeFolder, load_trainer: Load) -> Any:
        model = load_trainer(make_folder("Llama", torch.float32)).eval()
        adopt(model)
        return model

    @torch.no_grad()
    def test_an_adapter(self, adopted: Any) -> None:
        before = adopted(self.IDS).logits
        attention = adopted.model.layers[1].self_attn
        attention.q_proj = LowRank(attention.q_proj)
        with pytest.raises(ValueError, match="not those that were adopted") as refusal:
            adopted(self.IDS)
        stranger, remedy = str(refusal.value).splitlines()[1:]
        assert stranger.endswith("LowRank")
        assert "model.layers.1.self_attn.q_proj: " in stranger
        assert "merge adapters into the model" in remedy
        # Merged, it is a model like any other, whose weights were written behind torch's back.
        attention.q_proj = attention.q_proj.merge()
        merged = adopted(self.IDS).logits
        assert not torch.equal(merged, before)
        restore(adopted)
        adopt(adopted)
        forget_packed_weights(adopted)
        assert torch.equal(adopted(self.IDS).logits, merged)

    @torch.no_grad()
    @pytest.mark.parametrize("part", ["lm_head", "mlp", "forward", "embedding", "shape"])
    def test_a_replaced_part(self, adopted: Any, part: str) -> None:
        layer = adopted.model.layers[0]
        if part == "lm_head":
            adopted.lm_head = LowRank(adopted.lm_head)
        elif part == "mlp":
            layer.mlp = type(layer.mlp)(adopted.config)
        elif part == "forward":
            layer.mlp.up_proj.forward = partial(torch.nn.Linear.forward, layer.mlp.up_proj)
        elif part == "embedding":
            adopted.model.embed_tokens.forward = partial(torch.nn.Embedding.forward, adopted.model.embed_tokens)
        else:
            adopted.resize_token_embeddings(VOCAB + 8)
        with pytest.raises(ValueError, match="not those that were adopted"):
            adopted(self.IDS)

    @torch.no_grad()
    def test_copies_are_looked_at_by_themselves(self, adopted: Any) -> None:
        copied = copy.deepcopy(adopted)
        copied.lm_head = LowRank(copied.lm_head)
        adopted(self.IDS)
        with pytest.raises(ValueError, match=r"lm_head: .*LowRank"):
            copied(self.IDS)

    @torch.no_grad()
    def test_wrappers_that_compute_nothing(self, adopted: Any) -> None:
        expected = adopted(self.IDS).logits
        adopted.model.layers[0] = checkpoint_wrapper(adopted.model.layers[0])
        sharded = adopted.model.layers[1].mlp
        sharded.__class__ = type("FSDPMLP", (type(sharded),), {"__module__": "torch.distributed.fsdp"})
        adopted.forward = partial(type(adopted).forward, adopted)
        assert torch.equal(adopted(self.IDS).logits, expected)

    def test_restored_inside_what_wraps_it(self, adopted: Any) -> None:
        restore(torch.nn.Sequential(adopted))
        assert "forward" not in vars(adopted.lm_head)
        with pytest.raises(ValueError, match="is not adopted"):
            restore(adopted)


class TestRestore:
    """`restore` leaves nothing behind, in the model or outside it."""

    @pytest.fixture
    def stock(self, make_folder: MakeFolder, load_trainer: Load) -> Any:
        return load_trainer(make_folder("Qwen3", torch.float32)).eval()

    @torch.no_grad()
    def test_the_model_is_as_it_was(self, stock: Any) -> None:
        ids = torch.tensor([ragged()[5]])
        before, attributes = stock(ids).logits, {name: set(vars(m)) for name, m in stock.named_modules()}
        adoption = adopt(stock)
        assert adoption.attention == "sdpa"
        assert adoption.kernels["gemm.linear"] == ("aok.gemm.linear",)
        assert not torch.equal(stock(ids).logits, before)
        restore(stock)
        assert torch.equal(stock(ids).logits, before)
        assert {name: set(vars(m)) for name, m in stock.named_modules()} == attributes
        assert stock.config._attn_implementation == "sdpa"

    @torch.no_grad()
    def test_another_model_is_untouched_meanwhile(
        self, stock: Any, make_folder: MakeFolder, load_trainer: Load
    ) -> None:
        other = load_trainer(make_folder("Qwen3", torch.float32)).eval()
        ids = torch.tensor([ragged()[5]])
        before = other(ids).logits
        adopt(stock)
        assert torch.equal(other(ids).logits, before)

    def test_twice(self, stock: Any) -> None:
        with pytest.raises(ValueError, match="is not adopted"):
            restore(stock)
        adopt(stock)
        with pytest.raises(ValueError, match="adopted already"):
            adopt(stock)


class TestRefusals:
    """What cannot keep the promise is refused, and the model stays as it was."""

    @pytest.fixture
    def stock(self, make_folder: MakeFolder, load_trainer: Load) -> Any:
        return load_trainer(make_folder("Qwen3", torch.float32))

    def refused(self, model: Any, **options: Any) -> str:
        with pytest.raises(StartRefused) as refusal:
            adopt(model, **options)
        assert not any("forward" in vars(module) for module in model.modules())
        assert model.config._attn_implementation == "sdpa"
        return str(refusal.value)

    def test_a_model_without_weights(self, stock: Any) -> None:
        assert "the parameters are on the device meta" in self.refused(stock.to("meta"))

    def test_a_dtype_that_is_none(self, stock: Any) -> None:
        with pytest.raises(TypeError, match="dtype is 'bfloat16', expected one of torch's"):
            adopt(stock, dtype="bfloat16")  # type: ignore[arg-type]
        assert "x int8" in self.refused(stock, dtype=torch.int8)

    def test_unknown_modules_are_named(self, stock: Any) -> None:
        class Adapter(torch.nn.Linear):
            """As a library of adapters puts it in the place of a projection."""

        stock.model.layers[1].self_attn.o_proj = Adapter(192, 96)
        message = self.refused(stock)
        assert "model.layers.1.self_attn.o_proj" in message
        assert "Adapter" in message

    def test_no_kernel_with_the_feature(self, stock: Any) -> None:
        message = self.refused(stock, plugins=("tokenspeed-models", "tokenspeed-reference"))
        assert "batch_invariant" in message
        assert "add tokenspeed-kernels-aok to --plugins" in message

    def test_a_pinned_kernel_without_the_feature(self, stock: Any) -> None:
        assert "reference.gemm.linear" in self.refused(stock, kernel={"gemm.linear": "reference.gemm.linear"})

    def test_two_dtypes(self, stock: Any) -> None:
        stock.model.norm.to(torch.bfloat16)
        assert "2 dtypes" in self.refused(stock)

    def test_dropout(self, stock: Any) -> None:
        stock.model.layers[0].self_attn.attention_dropout = 0.1
        assert "attention_dropout is 0.1" in self.refused(stock)

    def test_an_architecture_without_a_table(self, stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(MODULES, "Qwen3ForCausalLM")
        assert "no table of modules for Qwen3ForCausalLM" in self.refused(stock)

    def test_noise_in_the_router(self, make_folder: MakeFolder, load_trainer: Load) -> None:
        model = load_trainer(make_folder("Mixtral", torch.float32))
        model.model.layers[1].mlp.jitter_noise = 0.01
        assert "model.layers.1.mlp: router_jitter_noise is 0.01" in self.refused(model)

    def test_fp32_elsewhere_than_in_routers(self, make_folder: MakeFolder, load_trainer: Load) -> None:
        model = load_trainer(make_folder("DeepseekV3", torch.bfloat16))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float32}
        model.model.layers[1].mlp.experts.float()
        assert "2 dtypes" in self.refused(model)

    def test_weights_that_the_configuration_does_not_describe(self, stock: Any) -> None:
        """An engine started from what this trainer saves would compute another model, or none."""
        stock.lm_head = torch.nn.Linear(96, VOCAB, bias=True)
        stock.model.layers[2].self_attn.q_norm.weight = torch.nn.Parameter(torch.ones(16))
        message = self.refused(stock)
        assert "lm_head.bias" in message
        assert "model.layers.2.self_attn.q_norm.weight is [16], the model wants [32]" in message

    def test_unknown_architecture(self) -> None:
        import transformers

        shape = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
        assert "GPT2LMHeadModel" in self.refused(model)

    def test_no_transformers_model(self) -> None:
        with pytest.raises(TypeError, match="Linear is no transformers model"):
            adopt(torch.nn.Linear(2, 2))

    def test_attention_weights_are_not_there(self, stock: Any) -> None:
        adopt(stock)
        with pytest.raises(ValueError, match="never has attention weights"):
            stock(torch.tensor([[5, 6]]), output_attentions=True)

    def test_a_sequence_beyond_the_engines_context(self, stock: Any) -> None:
        adopt(stock)
        with pytest.raises(ValueError, match="a sequence has 513 tokens, the engine's context ends at 512"):
            stock(torch.full((1, 513), 5))

    def test_a_static_cache(self, stock: Any) -> None:
        adopt(stock)
        with pytest.raises(ValueError, match="use a DynamicCache"):
            stock.generate(torch.tensor([[5, 6]]), max_new_tokens=2, cache_implementation="static")


@torch.no_grad()
def test_weights_written_through_data(make_folder: MakeFolder, load_trainer: Load) -> None:
    """torch does not count such writes; they show once they are announced."""
    model = load_trainer(make_folder("Qwen2", torch.float32)).eval()
    adopt(model)
    ids = torch.tensor([ragged()[9]])
    before = model(ids).logits
    model.model.layers[0].mlp.down_proj.weight.data *= 1.5
    forget_packed_weights(model)
    assert not torch.equal(model(ids).logits, before)


@torch.no_grad()
def test_weights_that_stand_in_for_the_parameters_are_forgotten_too(
    make_folder: MakeFolder, load_trainer: Load
) -> None:
    """As `fully_shard` gathers them: the model computes with tensors that are none of its parameters at other times."""
    model = load_trainer(make_folder("Qwen2", torch.float32)).eval()
    adopt(model)
    ids = torch.tensor([ragged()[9]])
    gathered = {"model.layers.0.mlp.down_proj.weight": model.model.layers[0].mlp.down_proj.weight.detach().clone()}
    before = torch.func.functional_call(model, gathered, (ids,)).logits
    for weight in gathered.values():
        weight.data *= 1.5
    forget_packed_weights(model)
    assert not torch.equal(torch.func.functional_call(model, gathered, (ids,)).logits, before)


def test_logprobs_refuse_an_unknown_order() -> None:
    with pytest.raises(ValueError, match="'jax' is not one of torch, megatron"):
        logprobs(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), order="jax")
    with pytest.raises(ValueError, match="sums whole rows"):
        logprobs(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), vocab_shards=2)


LOGITS, IDS = torch.linspace(-3, 3, 21).view(3, 7), torch.tensor([0, 1, 2])
NONSENSE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "negative temperature": ({"temperature": -1.0}, ValueError, "temperature -1 is out of range, 0 to 10000"),
    "no temperature": ({"temperature": float("nan")}, ValueError, "temperature nan is out of range"),
    "infinite temperature": ({"temperature": float("inf")}, ValueError, "temperature inf is out of range"),
    "a row of negative temperature": ({"temperature": torch.tensor([1.0, -2.0, 1.0])}, ValueError, "temperature -2 is"),
    "temperature as text": ({"temperature": "1"}, TypeError, "temperature is '1', expected a number or a tensor"),
    "a truth value": ({"temperature": True}, TypeError, "temperature is True"),
    "temperatures of other rows": ({"temperature": torch.ones(2)}, ValueError, r"temperature is \[2\] and ids \[3\]"),
    "a learned temperature": ({"temperature": torch.ones(3, requires_grad=True)}, ValueError, "detach it"),
    "an unknown id": ({"ids": torch.tensor([0, 7, 1])}, ValueError, "id 7 is not in the vocabulary of 7"),
    "ids of other rows": ({"ids": torch.tensor([0, 1])}, ValueError, r"logits is \[3, 7\] and ids \[2\]"),
    "small ids": ({"ids": IDS.int()}, TypeError, "ids is torch.int32, expected int64"),
    "no vocabulary": ({"logits": LOGITS[:, :0]}, ValueError, r"logits is \[3, 0\]"),
    "another device": ({"ids": IDS.to("meta")}, ValueError, "logits is on cpu and ids on meta"),
    "an unknown operator": ({"kernel": {"sampling.logprob": "a"}}, StartRefused, "did you mean sampling.logprobs"),
    "pins that are none": ({"kernel": "sampling.logprobs"}, ValueError, "kernel: expected KEY=VALUE"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_logprobs_refuse_what_means_nothing(case: str) -> None:
    given, error, message = NONSENSE[case]
    with pytest.raises(error, match=message):
        logprobs(**{"logits": LOGITS, "ids": IDS, **given})


def test_logprobs_of_nothing() -> None:
    logits = torch.zeros(2, 0, 7, requires_grad=True)
    found = logprobs(logits, torch.zeros(2, 0, dtype=torch.int64))
    assert found.shape == (2, 0)
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape


def test_second_derivatives_of_logprobs() -> None:
    """As a penalty on the gradient asks for them."""

    def second(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        logits = LOGITS.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(logits).square().sum(), logits, create_graph=True)
        return torch.autograd.grad(first.square().sum(), logits)[0]

    found = second(lambda logits: logprobs(logits, IDS, temperature=0.7))
    plain = second(lambda logits: torch.log_softmax(logits / 0.7, -1).gather(-1, IDS.unsqueeze(-1)))
    assert plain.abs().max() > 0.1
    torch.testing.assert_close(found, plain)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by torch's own import
def test_forward_mode_derivatives_are_refused(make_folder: MakeFolder, load_trainer: Load) -> None:
    """torch would take them for zero."""
    model = load_trainer(make_folder("Llama", torch.float32)).eval()
    adopt(model)
    embeds = model.get_input_embeddings()(torch.tensor([[5, 6, 7]])).detach()
    logprobs(LOGITS, IDS)
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="not by forward-mode differentiation"):
            logprobs(forward_ad.make_dual(LOGITS, LOGITS), IDS)
        with pytest.raises(NotImplementedError, match="not by forward-mode differentiation"):
            model(inputs_embeds=forward_ad.make_dual(embeds, embeds))


def test_plugins_are_read_as_the_engine_reads_them() -> None:
    assert torch.equal(
        logprobs(LOGITS, IDS, plugins="tokenspeed-reference,tokenspeed-kernels-aok"),  # type: ignore[arg-type]
        logprobs(LOGITS, IDS, plugins=("tokenspeed-reference", "tokenspeed-kernels-aok")),
    )


def test_logprobs_of_the_kernel_that_the_engine_was_told_to_use() -> None:
    logits, ids = torch.randn(64, 5000, generator=torch.Generator().manual_seed(3)), torch.arange(64)
    default = logprobs(logits, ids)
    other = logprobs(logits, ids, kernel={"sampling.logprobs": "torch.sampling.logprobs", "norm.rms": "aok.norm.rms"})
    assert not torch.equal(other, default)
    assert torch.equal(logprobs(logits, ids, plugins=("tokenspeed-reference",)), other)
    assert torch.equal(logprobs(logits, ids), default)
    with pytest.raises(StartRefused, match="lacks the required feature batch_invariant"):
        logprobs(logits, ids, kernel={"sampling.logprobs": "reference.sampling.logprobs"})


@pytest.mark.parametrize(("order", "trainer"), [("torch", "transformers"), ("megatron", "megatron")])
@torch.no_grad()
def test_temperature_and_order(order: str, trainer: str, make_folder: MakeFolder, load_trainer: Load) -> None:
    folder = make_folder("Llama", torch.bfloat16)
    model = load_trainer(folder).eval()
    adopt(model)
    sequence = ragged()[4]
    logits = model(torch.tensor([sequence])).logits[0, :-1]
    ids = torch.tensor(sequence[1:])
    with start(folder, trainer=trainer) as llm:
        for temperature in (1.0, 0.7, 0.0):
            (score,) = llm.score(sequence, temperature=temperature)
            expected = torch.tensor(score.logprobs[1:], dtype=torch.float32)
            assert torch.equal(logprobs(logits, ids, order=order, temperature=temperature), expected)
    with start(folder, trainer=trainer, logprobs_mode="raw") as llm:
        (score,) = llm.score(sequence, temperature=0.7)
        expected = torch.tensor(score.logprobs[1:], dtype=torch.float32)
        assert torch.equal(logprobs(logits, ids, order=order), expected)
    other = logprobs(logits, ids, order="torch" if order == "megatron" else "megatron")
    assert torch.allclose(other, logprobs(logits, ids, order=order), atol=1e-5)
