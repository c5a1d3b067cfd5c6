"""An adopted transformers model computes the engine's bits, in any shape of batch and at any moment of a training."""

from __future__ import annotations

import copy
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenspeed import LLM
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
