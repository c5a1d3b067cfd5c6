"""Is a trainer's dump what this engine computes? Every log-probability, bit by bit, and where the first difference is.

The engine teacher-forces each sequence of a dump alone and all of them together. What it reports while generating must
be what it reports for the same tokens when they are given. With activations in the dump, a difference is located by
position, module and operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenspeed.engine.request import SamplingParams
from tokenspeed.errors import ConfigError
from tokenspeed.layers.attention import SelfAttention
from tokenspeed.layers.embedding import LMHead
from tokenspeed.layers.linear import Linear, MergedLinear
from tokenspeed.layers.mla import LatentAttention
from tokenspeed.layers.mlp import GatedMLP
from tokenspeed.layers.moe import Experts, Router
from tokenspeed.layers.norm import ResidualRMSNorm, RMSNorm
from tokenspeed.layers.sparse import SparseLatentAttention
from tokenspeed.llm import LLM
from tokenspeed.models.base import CausalLM
from tokenspeed.numerics.resolve import resolve
from tokenspeed.plugins import load_plugins
from tokenspeed.verify.dump import Dump, DumpedSequence
from tokenspeed.verify.harness import Listener, judge
from tokenspeed.verify.items import Difference, Item, Outcome, float_bits
from tokenspeed.verify.report import Finding, Report, Result
from tokenspeed.verify.scenario import Check, Trial

CONTINUED_TOKENS = 16
"""Tokens that the engine generates behind half of a sequence whose dump reports none."""

CONTINUED_SEQUENCES = 8
"""How many such sequences are continued."""

_ALONE = "each sequence alone has the trainer's log-probabilities"
_PACKED = "so have all of them together"
_LOGITS = "the first rows of logits are the trainer's"
_RESPONSE = "what was reported while generating is what teacher forcing gives"


def align(llm: LLM, dump: Dump, listener: Listener = lambda _result, _over: None) -> Report:
    """Compare an engine with a dump. `listener` is told of every step.

    Raises ConfigError when the engine adds log-probabilities up in another order than the dump's trainer.
    """
    check_order(llm, dump)
    aligner = _Aligner(llm, dump)
    subject = f"{llm.plan.model}, dump by {dump.commit}"
    report = Report(subject, f"{len(dump.sequences)} sequences, {dump.layout}", llm.engine.fingerprint, ["one process"])
    for name, states, trials in (
        ("alone", _ALONE, aligner.alone()),
        ("packed", _PACKED, aligner.packed()),
        ("response", _RESPONSE, aligner.response()),
    ):
        report.results.append(judge(name, states, {"tokens": 1}, trials, locate=aligner.locate, listener=listener))
    if any(sequence.logits is not None for sequence in dump.sequences):
        report.results.append(aligner.logits())
        listener(report.results[-1], True)
    return report


def check_order(llm: LLM, dump: Dump) -> None:
    """Raises ConfigError unless the engine's log-probabilities have the order of the dump's trainer."""
    host = load_plugins()
    wanted = resolve("rl-bitwise", dump.trainer, profiles=host.trainer_profiles(), kernels=host.kernels())
    if wanted.problems:
        raise ConfigError("\n".join(problem.render() for problem in wanted.problems))
    vocab = llm.engine.limits.vocab_size
    orders = [
        (numerics.switches["logprob_order"], numerics.logprob_block(vocab), dict(numerics.traits.get(_KERNEL, {})))
        for numerics in (wanted.numerics, llm.plan.numerics)
    ]
    if orders[0][0] != orders[1][0] or (orders[0][0] == "megatron" and orders[0] != orders[1]):
        raise ConfigError(
            f"the dump has the log-probabilities of --trainer {dump.trainer}, the engine those of "
            f"--logprob-order {orders[1][0]}; start it with --numerics rl-bitwise --trainer {dump.trainer}"
        )


_KERNEL = "sampling.logprobs"


class _Aligner:
    """One engine and one dump."""

    def __init__(self, llm: LLM, dump: Dump) -> None:
        self._llm = llm
        self._dump = dump
        self._alone: list[Outcome] = []
        longest = max(len(sequence.ids) for sequence in dump.sequences)
        if longest > llm.engine.limits.max_model_len:
            raise ConfigError(
                f"the dump has a sequence of {longest} tokens, the engine's context is "
                f"{llm.engine.limits.max_model_len}; raise --max-model-len"
            )

    def alone(self) -> Iterator[Trial]:
        """One sequence after another on an idle engine."""
        for index in range(len(self._dump.sequences)):
            (outcome,) = self._score([index])
            self._alone.append(outcome)
            yield _trial([self._check(index, outcome)])

    def packed(self) -> Iterator[Trial]:
        """All at once, as many in a batch as the engine takes."""
        outcomes = self._score(range(len(self._dump.sequences)))
        yield _trial([self._check(index, outcome) for index, outcome in enumerate(outcomes)])

    def response(self) -> Iterator[Trial]:
        """The dump's own report where it has one; else some sequences are continued, and the result teacher-forced."""
        continued = 0
        for index, sequence in enumerate(self._dump.sequences):
            if sequence.reported is not None and sequence.prompt_length is not None:
                forced = self._alone[index].prompt_bits[sequence.prompt_length - 1 :]
                item = _item(index, sequence.ids[: sequence.prompt_length].tolist(), self._dump.temperature)
                tokens = tuple(sequence.ids[sequence.prompt_length :].tolist())
                yield _trial([Check(item, Outcome(tokens, _bits(sequence.reported)), Outcome(tokens, forced))])
            elif continued < CONTINUED_SEQUENCES:
                continued += 1
                yield _trial([self._continued(index, sequence)])

    def logits(self) -> Result:
        """The first rows of logits of every sequence that has some in the dump."""
        result = Result("logits", _LOGITS, {"tokens": 1})
        for index, sequence in enumerate(self._dump.sequences):
            if sequence.logits is None:
                continue
            rows = len(sequence.logits)
            with _watching(self._llm.engine.model, _is_head) as seen:
                self._score([index])
            got = torch.cat(seen["lm_head"])[:rows].to(sequence.logits.dtype)
            result.compared += 1
            result.tokens += rows
            result.evidence["tokens"] += rows
            equal = (got == sequence.logits[: len(got)]).all(-1)
            if not equal.all():
                result.differing += 1
                position = int((~equal).nonzero()[0])
                column = int((got[position] != sequence.logits[position]).nonzero()[0])
                shown = [f"{float(x[position, column]):.9g} for token {column}" for x in (sequence.logits, got)]
                result.findings.append(Finding(str(index), Difference("logits", position, *shown)))
        return result

    def locate(self, check: Check) -> str:
        """The first activation of a sequence that differs from the trainer's, in words."""
        index = int(check.item.name)
        recorded = self._dump.sequences[index].activations
        if not recorded:
            return "the dump has no activations; record them to see which operator differs first"
        with _watching(self._llm.engine.model, lambda _name, _module: True) as seen:
            self._score([index])
        return _first_difference(self._llm, {name: torch.cat(parts) for name, parts in seen.items()}, recorded)

    def _continued(self, index: int, sequence: DumpedSequence) -> Check:
        prompt = sequence.ids[: max(len(sequence.ids) // 2, 1)].tolist()
        room = self._llm.engine.limits.max_model_len - len(prompt)
        params = SamplingParams(
            max_tokens=min(CONTINUED_TOKENS, room),
            temperature=self._dump.temperature,
            seed=index,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        (sample,) = self._llm.generate([prompt], params)[0].outputs
        assert sample.logprobs is not None
        reported = [entry[token].logprob for entry, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        (score,) = self._llm.score([prompt + sample.token_ids], temperature=self._dump.temperature)
        forced = [float_bits(value) for value in score.logprobs[len(prompt) :] if value is not None]
        tokens = tuple(sample.token_ids)
        expected = Outcome(tokens, tuple(float_bits(value) for value in reported))
        blame = "generated by the engine; it does not reproduce itself"
        return Check(
            _item(index, prompt, self._dump.temperature), expected, Outcome(tokens, tuple(forced)), blame=blame
        )

    def _score(self, indices: Sequence[int]) -> list[Outcome]:
        sequences = [self._dump.sequences[index].ids.tolist() for index in indices]
        scores = self._llm.score(sequences, temperature=self._dump.temperature)
        return [
            Outcome(prompt_bits=tuple(float_bits(value) for value in score.logprobs if value is not None))
            for score in scores
        ]

    def _check(self, index: int, got: Outcome) -> Check:
        sequence = self._dump.sequences[index]
        item = _item(index, sequence.ids.tolist(), self._dump.temperature)
        return Check(item, Outcome(prompt_bits=_bits(sequence.logprob)), got)


def _item(index: int, prompt: list[int], temperature: float) -> Item:
    return Item(str(index), tuple(prompt), SamplingParams(temperature=temperature))


def _trial(checks: list[Check]) -> Trial:
    trial = Trial(checks)
    trial.evidence["tokens"] += sum(len(check.got.prompt_bits) + len(check.got.bits) for check in checks)
    return trial


def _bits(values: torch.Tensor) -> tuple[int, ...]:
    return tuple(float_bits(value) for value in values.tolist())


@dataclass(frozen=True)
class _Part:
    """Where an activation is: its name among the engine's, and which columns of it (`stop` None: all from `start`)."""

    name: str
    operators: str
    start: int = 0
    stop: int | None = None


def _parts(model: CausalLM) -> dict[str, _Part]:
    """Every activation that is comparable, by its name in a trainer's model."""
    found: dict[str, _Part] = {"model.embed_tokens": _Part("model.embed_tokens", "embedding.lookup")}
    for path, module in model.named_modules():
        if isinstance(module, RMSNorm):
            found[path] = _Part(path, "norm.rms")
            if isinstance(module, ResidualRMSNorm):
                found[f"{path}.input"] = _Part(f"{path}.input", "hidden state + residual")
        elif isinstance(module, MergedLinear):
            found |= _split(path, module)
        elif isinstance(module, Linear) and not isinstance(module, LMHead):
            found[path] = _Part(path, "gemm.linear")
        elif isinstance(module, Router):
            found |= {f"{path}.{name}": _Part(f"{path}.{name}", "gemm.linear or moe.route") for name in _CHOICE}
        elif isinstance(module, Experts):
            found[path] = _Part(path, "moe.experts")
        for kind, projection, operators in _READERS:
            if isinstance(module, kind):
                name = f"{path}.{projection}.input"
                found[name] = _Part(name, operators)
    return found


_CHOICE = ("weights", "ids")
"""What a router returns, by name."""

_READERS = (
    (SelfAttention, "o_proj", "rope.apply, cache.write or attention.paged"),
    (LatentAttention, "o_proj", "gemm.batched, rope.apply, cache.write_latent or attention.mla_paged"),
    (
        SparseLatentAttention,
        "o_proj",
        "gemm.batched, norm.layer, rope.apply, cache.write_latent, attention.index_scores, attention.index_topk or "
        "attention.sparse_paged",
    ),
    (GatedMLP, "down_proj", "activation.silu_and_mul"),
)
"""What writes the input of a projection in each kind of layer; of several kinds the last one counts."""


def _split(path: str, layer: MergedLinear) -> dict[str, _Part]:
    parent = path.rpartition(".")[0]
    found, start = {}, 0
    for name, size in layer.parts.items():
        found[f"{parent}.{name}"] = _Part(path, "gemm.linear", start=start, stop=start + size)
        start += size
    return found


def _is_head(_name: str, module: nn.Module) -> bool:
    return isinstance(module, LMHead)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where the dump's tensors are, whatever the engine runs on."""
    return tensor.to("cpu", copy=True)


@contextmanager
def _watching(model: Any, wanted: Any) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Outputs of the engine's layers (and what projections read, as NAME.input), one tensor for each step.

    In the order of the forward.
    """
    seen: dict[str, list[torch.Tensor]] = {}

    def hook_of(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            if isinstance(module, Linear | ResidualRMSNorm):
                seen.setdefault(f"{name}.input", []).append(_on_host(inputs[0]))
            if isinstance(module, Router):
                for part, tensor in zip(_CHOICE, output, strict=True):
                    seen.setdefault(f"{name}.{part}", []).append(_on_host(tensor))
            if isinstance(output, torch.Tensor):
                seen.setdefault(name, []).append(_on_host(output.flatten(1)))

        return hook

    handles = [
        module.register_forward_hook(hook_of(name)) for name, module in model.named_modules() if wanted(name, module)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _first_difference(llm: LLM, computed: dict[str, torch.Tensor], recorded: Any) -> str:
    """The earliest position at which an activation differs, and there the first in the order of the forward."""
    first: tuple[int, int] | None = None
    place = ""
    compared = 0
    model: Any = llm.engine.model
    turns = {name: turn for turn, name in enumerate(computed)}
    for name, part in _parts(model).items():
        if name not in recorded or part.name not in computed:
            continue
        turn = turns[part.name]
        got = computed[part.name][:, part.start : part.stop]
        expected = recorded[name]
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return (
                f"{name} is {expected.dtype}{list(expected.shape)} in the dump, the engine's is "
                f"{got.dtype}{list(got.shape)}"
            )
        compared += 1
        differing = (got != expected).any(-1).nonzero()
        if len(differing) and (first is None or (int(differing[0]), turn) < first):
            first = int(differing[0]), turn
            gap = float((got[first[0]].float() - expected[first[0]].float()).abs().max())
            place = f"position {first[0]}, {name} ({part.operators}): differs by up to {gap:.3g}"
    if first is None:
        return (
            f"all {compared} recorded activations agree; the difference is in lm_head (gemm.linear) or in the "
            "log-probabilities' own arithmetic"
        )
    return f"{place}; everything that was recorded before it agrees"
