"""What a request may say: known fields with their types; everything else is refused by name.

Servers commonly drop a field that they do not know. Here a misspelt field is an error, since the reply would differ
from what was asked for; so is a known field that this server does not support, when its value asks for something.
Fields that cannot change a reply are accepted and ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from tokenspeed.server.errors import ApiError

T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused at its first wrong item. Otherwise every one of a million becomes an error of its own, and a
body of 32 MB takes all the memory of the machine."""

_MAX_NAME = 64
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})

UnitInterval = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
TokenCount = Annotated[int, Field(ge=0, le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class StrictModel(BaseModel):
    """A request body. Subclasses add to `ignored` and `unsupported` through `fields_of`.

    `ignored`: fields that cannot change the reply. `unsupported`: field → the values that ask for nothing.
    """

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    ignored: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def model_post_init(self, _context: Any, /) -> None:
        """Refuse what is neither known nor harmless."""
        for name, value in (self.model_extra or {}).items():
            if name in self.ignored:
                continue
            if name not in self.unsupported:
                raise self._unknown(name)
            if not any(value is allowed or value == allowed for allowed in (*_NOTHING, *self.unsupported[name])):
                raise ApiError(400, f"`{name}` is not supported by this server", param=name, reason="unsupported_field")

    def _unknown(self, name: str) -> ApiError:
        name = name[:_MAX_NAME]  # the search for a near one takes the square of a name's length
        close = difflib.get_close_matches(name, [*type(self).model_fields, *self.ignored, *self.unsupported], n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        return ApiError(400, f"unknown field `{name}`{hint}", param=name, reason="unknown_field")


IGNORED = frozenset(
    {
        "cache_salt",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "spaces_between_special_tokens",
        "store",
        "stream_interval",
        "user",
    }
)
"""Fields of OpenAI and vLLM requests that cannot change what is generated."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bad_words": (),
    "early_stopping": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "lora_path": (),
    "logits_processors": (),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_token_offsets": (),
    "routed_experts_prompt_start": (0,),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left",),
    "use_beam_search": (),
    "vllm_xargs": (),
    "watermarking": (),
}
"""Fields of OpenAI and vLLM requests that would change the reply, with the values (besides null) that do not."""
