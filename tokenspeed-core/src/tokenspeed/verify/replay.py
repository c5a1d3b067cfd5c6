"""Saved replies, read back and derived again bit for bit.

A line of JSON holds what `tokenspeed generate` wrote, or a request and its reply over HTTP as
`{"request": …, "response": …}`. In either form a sample carries its prompt's token ids, the parameters, the seed that
was used, the token ids of the reply and (where they were asked for) their logprobs. It is derived again with
`max_tokens` as long as the reply: where a stop string or a client ended it is no matter of bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tokenspeed.engine.request import SamplingParams
from tokenspeed.errors import RequestError
from tokenspeed.verify.items import Item, Outcome, first_difference, float_bits
from tokenspeed.verify.report import Finding

_NO_MATTER = frozenset({"n", "stop", "stream", "include_stop_str_in_output", "skip_special_tokens", "detokenize"})
"""Parameters that choose how many samples there are, where text is cut or how it is shown."""


@dataclass(frozen=True)
class Saved:
    """One sample of one line. `logprobs_mode` and `fingerprint` are empty where the line does not say."""

    line: int
    item: Item
    outcome: Outcome
    logprobs_mode: str
    fingerprint: str


@dataclass(frozen=True)
class ReplayReport:
    """How many samples were derived again, how many logprobs were compared, and what differs."""

    samples: int
    tokens: int
    logprobs: int
    findings: tuple[Finding, ...]
    other_fingerprints: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Something was compared, and every bit of it is the same."""
        return self.samples > 0 and not self.findings

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "holds": self.holds,
            "samples": self.samples,
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "other_fingerprints": list(self.other_fingerprints),
            "findings": [finding.describe() for finding in self.findings],
        }


def read_saved(lines: Iterable[bytes]) -> list[Saved]:
    """Every sample of every line. Raises RequestError, naming the line, for one that cannot be derived again."""
    found: list[Saved] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line)
            found += _samples(number, row)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestError(f"line {number}: {error}") from error
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise RequestError(
                f"line {number} lacks what a replay needs ({type(error).__name__}: {error}); it should be a line that "
                "`tokenspeed generate` wrote, or a request and its response"
            ) from error
    return found


def replay(
    saved: Sequence[Saved],
    derive: Callable[[list[Item]], Iterable[Outcome]],
    *,
    fingerprint: str = "",
    logprobs_mode: str = "",
) -> ReplayReport:
    """Derive the samples again and compare. `fingerprint` and `logprobs_mode` are those of whoever derives.

    Raises RequestError when the logprobs were saved in the other mode.
    """
    for one in saved:
        if one.logprobs_mode and logprobs_mode and one.logprobs_mode != logprobs_mode:
            raise RequestError(
                f"line {one.line} holds {one.logprobs_mode} logprobs, and {logprobs_mode} ones are computed here; use "
                f"--logprobs-mode {one.logprobs_mode}"
            )
    findings = []
    logprobs = 0
    for one, got in zip(saved, derive([one.item for one in saved]), strict=True):
        logprobs += len(one.outcome.bits) + len(one.outcome.prompt_bits)
        comparable = replace(
            got,
            bits=got.bits if one.outcome.bits else (),
            prompt_bits=got.prompt_bits if one.outcome.prompt_bits else (),
            finish_reason=one.outcome.finish_reason,
        )
        if (difference := first_difference(one.item, one.outcome, comparable)) is not None:
            findings.append(Finding(one.item.name, difference))
    others = sorted({one.fingerprint for one in saved} - {fingerprint, ""}) if fingerprint else []
    tokens = sum(len(one.outcome.token_ids) for one in saved)
    return ReplayReport(len(saved), tokens, logprobs, tuple(findings), tuple(others))


def _samples(number: int, row: dict[str, Any]) -> Iterator[Saved]:
    if "response" in row:
        yield from _http_samples(number, row["request"], row["response"])
        return
    for output in row["outputs"]:
        outcome = Outcome(
            tuple(output["token_ids"]),
            tuple(
                _entry_bits(entry, t)
                for entry, t in zip(output.get("logprobs") or (), output["token_ids"], strict=False)
            ),
            _prompt(row.get("prompt_logprobs"), row["prompt_token_ids"]) if output["index"] == 0 else (),
        )
        yield _saved(
            f"{number}, sample {output['index']}",
            number,
            row["prompt_token_ids"],
            row["sampling_params"],
            output["seed"],
            outcome,
            row.get("logprobs_mode", ""),
            row.get("fingerprint", ""),
        )


def _http_samples(number: int, request: dict[str, Any], response: dict[str, Any]) -> Iterator[Saved]:
    asked = {**response.get("sampling_defaults", {}), **request, **request.get("sampling_params", {})}
    params = {
        name: value for name, value in asked.items() if name in SamplingParams.__struct_fields__ and value is not None
    }
    for choice in response["choices"]:
        prompt = request.get("token_ids") or choice.get("prompt_token_ids") or response.get("prompt_token_ids")
        if prompt is None and isinstance(request.get("prompt"), list):
            prompt = request["prompt"]
        if prompt is None or choice.get("token_ids") is None:
            raise KeyError("prompt_token_ids and token_ids, which `return_token_ids` adds to a reply")
        outcome = Outcome(tuple(choice["token_ids"]), tuple(_http_bits(choice.get("logprobs") or {})))
        yield _saved(
            f"{number}, choice {choice['index']}",
            number,
            prompt,
            params,
            choice["seed"],
            outcome,
            response.get("logprobs_mode", ""),
            response.get("system_fingerprint") or "",
        )


def _saved(
    name: str,
    number: int,
    prompt: Sequence[int],
    params: Mapping[str, Any],
    seed: int,
    outcome: Outcome,
    logprobs_mode: str,
    fingerprint: str,
) -> Saved:
    kept = {key: value for key, value in params.items() if key not in _NO_MATTER}
    length = len(outcome.token_ids)
    kept |= {
        "seed": seed,
        "max_tokens": length,
        "min_tokens": min(int(params.get("min_tokens") or 0), length),
        "logprobs": 0,
        "prompt_logprobs": 0 if outcome.prompt_bits else None,
        "detokenize": False,
    }
    kept.pop("logprob_token_ids", None)
    item = Item(f"line {name}", tuple(prompt), msgspec.convert(kept, SamplingParams, strict=True, str_keys=True))
    return Saved(number, item, outcome, logprobs_mode, fingerprint)


def _entry_bits(entry: Mapping[str, Any], token: int) -> int:
    value = entry[str(token)]["logprob"]
    return float_bits(-math.inf if value is None else value)  # JSON has no infinity


def _prompt(entries: Sequence[Any] | None, prompt: Sequence[int]) -> tuple[int, ...]:
    pairs = zip(entries or (), prompt, strict=False)
    return tuple(_entry_bits(entry, token) for entry, token in pairs if entry is not None)


def _http_bits(logprobs: Mapping[str, Any]) -> Iterator[int]:
    if "token_logprobs" in logprobs:
        yield from (float_bits(value) for value in logprobs["token_logprobs"] if value is not None)
    else:
        yield from (float_bits(entry["logprob"]) for entry in logprobs.get("content") or ())
