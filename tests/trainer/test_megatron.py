"""Megatron-core judges the `megatron` order: its own cross entropy, on its own processes, over our logits."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenspeed import LLM
from tokenspeed.kernels.reference.torch_order import logprobs as in_torch_order
from tokenspeed.trainer import adopt, logprobs
from tokenspeed_kernels_aok.cpu.sampling import logprobs as in_tree_order

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARIES = {"Qwen3": 151_936, "Llama 3": 128_256, "DeepSeek": 129_280, "odd": 1001}
ROWS = 48

Tensors = dict[str, torch.Tensor]


def synthetic(vocab: int) -> Tensors:
    generator = torch.Generator().manual_seed(vocab)
    # From nearly uniform to nearly certain: the smaller the logarithm, the more of the sum's last bits show in it.
    scale = torch.linspace(0.5, 12, ROWS).unsqueeze(-1)
    logits = (torch.randn(ROWS, vocab, generator=generator) * scale).to(torch.bfloat16)
    return {"logits": logits, "ids": torch.randint(0, vocab, (ROWS,), generator=generator)}


@pytest.fixture(scope="module")
def sequence() -> list[int]:
    source = random.Random(3)
    return [source.randrange(3, 320) for _ in range(150)]


@pytest.fixture(scope="module")
def model_logits(
    make_folder: Callable[[str, torch.dtype], Path], load_trainer: Callable[[Path], Any], sequence: list[int]
) -> Tensors:
    """The logits of an adopted model, which are the engine's."""
    model = load_trainer(make_folder("Qwen2", torch.bfloat16)).eval()
    adopt(model)
    with torch.no_grad():
        logits = model(torch.tensor([sequence])).logits[0, :-1]
    return {"logits": logits.contiguous(), "ids": torch.tensor(sequence[1:])}


@pytest.fixture(scope="module")
def cases(model_logits: Tensors) -> dict[str, Tensors]:
    return {"model": model_logits, **{name: synthetic(vocab) for name, vocab in VOCABULARIES.items()}}


@pytest.fixture(scope="module", params=[1, 2], ids=lambda ranks: f"{ranks} ranks")
def ranks(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture(scope="module")
def verdicts(cases: dict[str, Tensors], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what Megatron computes for every case, on 1, 2 and 4 processes, and folded over 4 shards."""
    folder = tmp_path_factory.mktemp("megatron")
    save_file({f"{name}.{key}": x for name, case in cases.items() for key, x in case.items()}, folder / "in")
    script = str(Path(__file__).with_name("megatron_judge.py"))
    # Its imports warn; what it computes is compared to the bit.
    command = [sys.executable, "-W", "ignore", script, str(folder / "in"), str(folder), "1", "2", "4", "4-fold"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def verdict(ranks: int, verdicts: Path) -> Tensors:
    """What it computes on so many processes."""
    return load_file(verdicts / str(ranks))


def test_any_vocabulary(ranks: int, cases: dict[str, Tensors], verdict: Tensors) -> None:
    for name, case in cases.items():
        ours = logprobs(case["logits"], case["ids"], order="megatron", vocab_shards=ranks)
        assert torch.equal(ours, verdict[name]), name


def test_the_engine_reports_megatrons_numbers(
    ranks: int,
    make_folder: Callable[[str, torch.dtype], Path],
    sequence: list[int],
    verdict: Tensors,
) -> None:
    trainer = f"megatron,vocab-shards={ranks}"
    sizes = {"threads": 2, "num_kv_pages": 64, "max_num_seqs": 4, "max_model_len": 256}
    with LLM(make_folder("Qwen2", torch.bfloat16), numerics="rl-bitwise", trainer=trainer, **sizes) as llm:
        (score,) = llm.score([sequence])
        assert {spec.name for spec in llm.plan.kernels() if spec.operator == "sampling.logprobs"} == {
            "torch.sampling.logprobs"
        }
    assert torch.equal(torch.tensor(score.logprobs[1:], dtype=torch.float32), verdict["model"])


def test_other_layouts_are_other_numbers(ranks: int, cases: dict[str, Tensors], verdict: Tensors) -> None:
    """Not vacuous: another number of shards, or the kit's own tree, gives other bits."""
    case = cases["Qwen3"]
    arguments = case["logits"], case["ids"].unsqueeze(-1), torch.ones(ROWS), "megatron"
    block = -(-VOCABULARIES["Qwen3"] // (128 * ranks)) * 128
    assert torch.equal(in_torch_order(*arguments, block).squeeze(-1), verdict["Qwen3"])
    assert not torch.equal(in_torch_order(*arguments, block // 2).squeeze(-1), verdict["Qwen3"])
    assert not torch.equal(in_tree_order(*arguments, block).squeeze(-1), verdict["Qwen3"])


def test_more_shards_folded_in_the_order_of_ranks(cases: dict[str, Tensors], verdicts: Path) -> None:
    """Megatron's own steps on each of four shards, the sums added from left to right."""
    verdict = load_file(verdicts / "4-fold")
    for name, case in cases.items():
        ours = logprobs(case["logits"], case["ids"], order="megatron", vocab_shards=4)
        assert torch.equal(ours, verdict[name]), name


def test_a_ring_of_four_ranks_has_no_order_to_follow(cases: dict[str, Tensors], verdicts: Path) -> None:
    """gloo adds four ranks in an order that depends on a token's place in the batch, as the documentation says."""
    ring, folded = load_file(verdicts / "4"), load_file(verdicts / "4-fold")
    assert any(not torch.equal(ring[name], folded[name]) for name in cases)
    assert all(torch.allclose(ring[name], folded[name], atol=1e-5) for name in cases)


class TestTorchOrder:
    """The kernel behind it keeps its promise: a row is a function of itself."""

    @pytest.mark.parametrize("order", ["torch", "megatron"])
    @pytest.mark.parametrize("vocab", [1, 1001, 40_000, 151_936])
    def test_rows_are_invariant(self, order: str, vocab: int) -> None:
        case = synthetic(vocab)
        arguments = case["logits"], case["ids"].unsqueeze(-1), torch.full((ROWS,), 0.7)

        def run(rows: Any) -> torch.Tensor:
            return in_torch_order(*(tensor[rows] for tensor in arguments), order, 32_768)

        whole = run(slice(None))
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(run(slice(None)), whole)
            for rows in (slice(5, 6), slice(47, 48), slice(0, 2), slice(3, 20), [7, 7, 1]):
                assert torch.equal(run(rows), whole[rows])
        torch.set_num_threads(1)

    def test_torchs_own_sum_of_one_row_is_split_over_threads(self) -> None:
        """Why the kernel computes a single row beside a copy of itself."""
        terms = torch.rand(2, 151_936, generator=torch.Generator().manual_seed(1)) * 9
        torch.set_num_threads(2)
        alone = torch.cat([terms[:1].sum(-1), terms[1:].sum(-1)])
        together = terms.sum(-1)
        torch.set_num_threads(1)
        assert not torch.equal(alone, together)

    def test_ids_outside_and_temperature_zero(self) -> None:
        logits = synthetic(1001)["logits"][:2]
        ids = torch.tensor([[-1, 5, 1001], [0, 1000, -7]])
        for order in ("torch", "megatron"):
            found = in_torch_order(logits, ids, torch.tensor([0.0, 1.0]), order, 256)
            assert found.isnan().tolist() == [[True, False, True], [False, False, True]]
            assert torch.equal(found[:, 1], in_torch_order(logits, ids, torch.ones(2), order, 256)[:, 1])
