"""`logprobs`: what it refuses, its derivatives, and whose kernels it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from tokenspeed.errors import StartRefused
from tokenspeed.trainer import adopt, logprobs

pytestmark = pytest.mark.usefixtures("one_thread")

MakeFolder = Callable[[str, torch.dtype], Path]
Load = Callable[[Path], Any]


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
