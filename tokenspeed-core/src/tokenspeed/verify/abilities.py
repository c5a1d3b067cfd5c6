"""What a server lets a harness see, found out by asking: whatever it does not report cannot be tested over HTTP.

A server of ours reports everything; one that does not is broken, and its scenarios fail rather than being left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tokenspeed.verify.endpoint import Endpoint, EndpointError
from tokenspeed.verify.items import SAMPLING, Item, make_item

PROMPT_LOGPROBS = "prompt logprobs"
STREAMED_LOGPROBS = "streamed logprobs"
SAMPLE_SEEDS = "seeds of samples"
CACHED_TOKENS = "cached tokens"
TOKEN_IDS = "token ids"
PREEMPTIONS = "preemptions"

_PROMPT = tuple(range(3, 83))
_OUTPUT_TOKENS = 4


@dataclass(frozen=True)
class Abilities:
    """`missing` has a reason for each ability that a server lacks, `kinds` the ways of sampling that it takes.

    `refused` has a reason for every other way of sampling.
    """

    missing: Mapping[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = tuple(name for name, _ in SAMPLING)
    refused: Mapping[str, str] = field(default_factory=dict)


def probe(endpoint: Endpoint) -> Abilities:
    """Ask a server that is not ours with a few short requests. EndpointError when it cannot answer the plainest one."""
    plain = _item("plain")
    endpoint.settle(plain)
    missing = dict(_missing(endpoint, plain))
    refused = {}
    for name, params in SAMPLING:
        try:
            endpoint.one(_item(name, **params))
        except EndpointError as error:
            refused[name] = str(error)
    kinds = tuple(name for name, _ in SAMPLING if name not in refused)
    return Abilities(missing, kinds, refused)


def _missing(endpoint: Endpoint, plain: Item) -> Iterator[tuple[str, str]]:
    """Abilities that the server lacks, with what was seen instead."""
    if not endpoint.names_ids:
        yield TOKEN_IDS, "the server names tokens by their text"
        yield PROMPT_LOGPROBS, "the server names tokens by their text, so that no reply can be given as a prompt"
    elif reason := _fails(lambda: len(endpoint.one(plain, prompt_logprobs=0).prompt_bits) == len(plain.prompt) - 1):
        yield PROMPT_LOGPROBS, reason
    if reason := _fails(lambda: len(endpoint.stream(plain).bits) == _OUTPUT_TOKENS):
        yield STREAMED_LOGPROBS, reason
    if reason := _fails(lambda: all(reply.seed is not None for reply in endpoint.complete(plain, n=2))):
        yield SAMPLE_SEEDS, reason
    if reason := _fails(lambda: any(endpoint.one(plain).cached_tokens > 0 for _ in range(2))):
        yield CACHED_TOKENS, reason
    yield PREEMPTIONS, "only our servers count them"


def _fails(reports: Callable[[], bool]) -> str:
    """Why something is not reported; empty when it is."""
    try:
        return "" if reports() else "the server does not report them"
    except EndpointError as error:
        return str(error)


def _item(name: str, **params: object) -> Item:
    return make_item(name, _PROMPT, 5, _OUTPUT_TOKENS, **{"temperature": 0.0, **params})
