"""Chat templates: the dialect of transformers, in a sandbox, with errors that are the client's."""

from __future__ import annotations

import pytest

from tokenspeed.chat import ChatTemplate
from tokenspeed.errors import CheckpointError, RequestError

HELLO = [{"role": "user", "content": "Hi <b>"}]

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

DIALECT = """{{ bos_token }}{{ messages | tojson }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}
{% break %}{% endfor %}{% generation %}said{% endgeneration %}{{ strftime_now('%Y') | length }}{{ tools is none }}"""


def test_chatml() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(HELLO) == "<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HELLO, add_generation_prompt=False).endswith("<|im_end|>\n")


@pytest.mark.parametrize("source", [CHATML, DIALECT])
def test_equal_to_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*HELLO, {"role": "assistant", "content": " ü \n"}]
    special = {"bos_token": "<s>"}
    expected, _ = render_jinja_template([messages], chat_template=source, add_generation_prompt=True, **special)
    assert ChatTemplate(source, special).render(messages) == expected[0]


@pytest.mark.parametrize("content", ["So far", "So far  ", "  So far"])
def test_continuing_the_final_message(content: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    template = ChatTemplate(CHATML)
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("assistant\nSo far")
    with pytest.raises(RequestError, match="ask for one"):
        template.render(messages, continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].nothing.more }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_the_clients_error(source: str) -> None:
    with pytest.raises(RequestError) as refused:
        ChatTemplate(source).render(HELLO)
    assert refused.value.param == "messages"


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate("fine\n{% if %}")
    with pytest.raises(RequestError, match="at least one"):
        ChatTemplate(CHATML).render([])
