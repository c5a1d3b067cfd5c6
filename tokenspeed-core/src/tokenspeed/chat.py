"""Chat templates: messages to a prompt, in the dialect of Jinja that checkpoints are written for.

Knows messages and special tokens; does not know token ids. A template comes with the model and runs in a sandbox that
can neither reach Python objects' internals nor change what it is given.

The dialect is that of transformers (`utils/chat_template_utils.py`): `trim_blocks` and `lstrip_blocks`, loop controls,
`{% generation %}` blocks (marking what an assistant says; plain text here), a `tojson` that does not escape HTML,
`raise_exception(message)` and `strftime_now(format)`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tokenspeed.errors import CheckpointError, ConfigError, RequestError

if TYPE_CHECKING:
    from tokenspeed.config import EngineConfig


class ChatTemplate:
    """One compiled template. `special_tokens` (`bos_token`, `eos_token`, …) are visible to it by name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is broken at line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text, special tokens included.

        `continue_final_message` leaves the last message open, for the model to continue. `variables` are further names
        for the template (`enable_thinking`). Raises RequestError when the template refuses the messages.
        """
        if not messages:
            raise RequestError("messages: give at least one message", param="messages", code="invalid_value")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message leaves the last message open and add_generation_prompt closes it; ask for one",
                param="continue_final_message",
                code="invalid_value",
            )
        names = {
            **self._special_tokens,
            **variables,
            "messages": [dict(message) for message in messages],
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(names)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template: {error}", param="messages", code="chat_template") from error
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError, MemoryError) as error:
            # A template computes with what the client sent: a wrong type in a message is the client's.
            message = f"the chat template cannot render these messages: {type(error).__name__}: {error}"
            raise RequestError(message, param="messages", code="chat_template") from error
        return _cut_after(text, messages[-1]) if continue_final_message else text


def given_template(config: EngineConfig) -> str | None:
    """What the file of `--chat-template` holds. Raises ConfigError when it cannot be read, or is no template."""
    if config.chat_template is None:
        return None
    try:
        source = Path(config.chat_template).read_text(encoding="utf-8")
        ChatTemplate(source)
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        raise ConfigError(f"--chat-template {config.chat_template}: {error}") from None
    return source


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance attribute)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.datetime.now().strftime(format_)


def _cut_after(text: str, message: Mapping[str, Any]) -> str:
    """`text` up to the end of the last message's content, whether or not the template trimmed it."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        raise RequestError(
            "continue_final_message needs a last message with text", param="messages", code="invalid_value"
        )
    start = text.rfind(content.strip())
    if start < 0:
        raise RequestError(
            "continue_final_message: the chat template changes the last message, so it cannot be continued",
            param="messages",
            code="chat_template",
        )
    whole = content.lstrip()
    end = start + len(whole if text.startswith(whole, start) else content.strip())
    return text[:end]
