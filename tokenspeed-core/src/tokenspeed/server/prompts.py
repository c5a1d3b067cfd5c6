"""From the `prompt` field to token ids: one prompt or many, as text or as ids."""

from __future__ import annotations

from typing import Any, TypeVar

from tokenspeed.server.errors import ApiError
from tokenspeed.server.generation import Prompt
from tokenspeed.server.service import Service

T = TypeVar("T")


async def read_prompts(
    service: Service, value: Any, *, add_special_tokens: bool, param: str = "prompt"
) -> list[Prompt]:
    """The prompts of `value`: a string, a list of strings, a list of ids or a list of lists of ids.

    Ids are taken as they are; whether they fit the model is checked later. Raises ApiError or ContextOverflow.
    """
    match value:
        case str():
            texts = [value]
        case [] | [[]]:
            raise ApiError(
                400, f"`{param}` is empty: a prompt needs at least one token", param=param, reason="empty_prompt"
            )
        case [str(), *_]:
            texts = _all_of(str, value, param)
        case [list(), *_]:
            lists = _all_of(list, value, param)
            service.limits.check_samples(len(lists), 1)
            return [Prompt(_all_of(int, ids, param)) for ids in lists]
        case list():
            return [Prompt(_all_of(int, value, param))]
        case _:
            raise ApiError(400, f"`{param}` must be a string, a list of strings or token ids", param=param)
    service.limits.check_samples(len(texts), 1)
    encoded = await service.text.encode(texts, add_special_tokens=add_special_tokens)
    return [Prompt(ids, text) for ids, text in zip(encoded, texts, strict=True)]


def _all_of(kind: type[T], values: list[Any], param: str) -> list[T]:
    for value in values:
        if type(value) is not kind:
            names = {str: "strings", int: "integer token ids", list: "lists of token ids"}
            message = f"`{param}` mixes types: expected {names[kind]}, found {type(value).__name__}"
            raise ApiError(400, message, param=param, reason="invalid_value")
    return values
