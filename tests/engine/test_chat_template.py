from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbaton.engine.chat_template import ChatTemplate
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import LocalError

USER = [{"role": "user", "content": "hi <b>"}]

TEMPLATES = {
    "variables": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}",
    "trimmed": "{% for m in messages %}\n  {% if loop.first %}\n{{ m['content'] | trim }}\n  {% endif %}\n{% endfor %}",
    "tojson": "{{ messages[0] | tojson }} {{ messages[0] | tojson(indent=2) }} {{ {'b': 1, 'a': '<é>'} | tojson }}",
    "loop controls": "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "undefined": "{{ enable_thinking is defined }}{{ tools is none }}{{ messages[0].missing }}",
    "prompt": "{{ messages[-1].content.split('<')[0] }}{% if add_generation_prompt %}>>{% endif %}",
}


def render(source: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate(source, None, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_renders_as_transformers_does(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        [USER], chat_template=TEMPLATES[name], add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert render(TEMPLATES[name]) == expected != ""


@pytest.mark.parametrize(
    ("source", "messages", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", USER, "roles must alternate"),
        ("{{ 'a' + messages[0].content }}", [{"role": "user", "content": None}], "refused"),
        ("{{ messages[0].content + 1 }}", USER, "refused"),
        ("{{ 1 // 0 }}", USER, "refused"),
        ("ok", [], "empty"),
        ("ok", [{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ("{{ ''.__class__.__mro__ }}", USER, "unsafe"),
        ("{{ messages.append(1) }}", USER, "refused"),
        ("{{ range(10 ** 9) | list }}", USER, "refused"),
    ],
)
def test_what_a_template_refuses_is_about_the_messages(source: str, messages: Any, said: str) -> None:
    with pytest.raises(LocalError, match=said) as error:
        render(source, messages)
    assert error.value.field == "messages"


def test_broken_template() -> None:
    with pytest.raises(LocalError, match="broken"):
        ChatTemplate("{% if %}", None, {})


def test_messages_with_parts_and_extra_variables() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render("{{ messages[0].content }}", parts) == "a\nb"
    assert render("{{ enable_thinking }}", template_kwargs={"enable_thinking": False}) == "False"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_where_a_template_is_found(tmp_path: Path, tiny_model_dir: Path) -> None:
    assert ChatTemplate.find(tmp_path, {}, {}) is None
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    both = ChatTemplate.find(tmp_path, {"chat_template": named}, {})
    assert both is not None
    assert both.render(USER) == "plain"
    assert both.render(USER, tools=[{"type": "function"}]) == "tools"
    with pytest.raises(LocalError, match="rag"):
        ChatTemplate.find(tmp_path, {"chat_template": [{"name": "rag", "template": "x"}]}, {})
    (tmp_path / "chat_template.jinja").write_text("from the file")
    from_file = ChatTemplate.find(tmp_path, {"chat_template": "from the config"}, {})
    assert from_file is not None and from_file.render(USER) == "from the file"


def test_a_model_without_a_template_says_so(tmp_path: Path, tiny_model_dir: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_model_dir / "tokenizer.json").read_bytes())
    config = json.loads((tiny_model_dir / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(LocalError, match="no chat template.*completions"):
        tokenizer.chat(USER)


def test_chat_ids_are_the_rendered_text_without_added_specials(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model_dir)
    assert tokenizer.chat(USER) == tokenizer.encode("<|im_start|>user\nhi <b><|im_end|>\n<|im_start|>assistant\n")
