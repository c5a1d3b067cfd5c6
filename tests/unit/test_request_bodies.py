"""Request bodies: what a wrong one costs, whichever field it fills."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from tokenspeed.server import app  # noqa: F401 - every body is defined once the application is
from tokenspeed.server.errors import ApiError
from tokenspeed.server.fields import StrictModel
from tokenspeed.server.openai import CompletionRequest

MANY = 5000
ITEMS: list[Any] = [0.5, -1, "a", None, True, [], {}, {"n": "x", "temperature": "x"}]
WRONG: list[Any] = [
    *([item] * MANY for item in ITEMS),
    *({str(i): item for i in range(MANY)} for item in ITEMS),
]


def bodies(kind: type[StrictModel] = StrictModel) -> Iterator[type[StrictModel]]:
    for body in kind.__subclasses__():
        yield body
        yield from bodies(body)


@pytest.mark.parametrize("body", set(bodies()), ids=lambda body: body.__name__)
def test_many_wrong_items_are_few_errors(body: type[StrictModel]) -> None:
    """An error takes a hundred times the memory of the two bytes that cause it; 32 MB of them were the machine's."""
    counts = {(name, repr(value)[:20]): errors(body, {name: value}) for name in body.model_fields for value in WRONG}
    assert {field: count for field, count in counts.items() if count >= 20} == {}


def errors(body: type[StrictModel], content: dict[str, Any]) -> int:
    try:
        body.model_validate(content)
    except ApiError:
        return 1
    except ValidationError as error:
        return error.error_count()
    return 0


def test_there_are_bodies() -> None:
    assert {"CompletionRequest", "ChatCompletionRequest", "GenerateRequest"} <= {body.__name__ for body in bodies()}


def test_a_long_name_of_an_unknown_field_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a near name indexes every character of it."""
    heard: list[int] = []
    search = difflib.get_close_matches

    def near(word: str, *rest: Any, **more: Any) -> list[str]:
        heard.append(len(word))
        return search(word, *rest, **more)

    monkeypatch.setattr(difflib, "get_close_matches", near)
    with pytest.raises(ApiError) as refusal:
        CompletionRequest.model_validate({"prompt": "x", "temprature" + "x" * 10**6: 1})
    assert heard == [64]
    assert len(refusal.value.detail) < 200
