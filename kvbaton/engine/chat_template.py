"""A model's chat template: Jinja, run in a sandbox with what templates made for transformers expect to find.

Invariants: a template can read the messages and nothing else (immutable sandbox, plain data only); whatever it refuses
is a ``LocalError`` about the messages, since the template came with the model and the messages from the caller.

Knows nothing about tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvbaton.types import LocalError


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_text: str) -> str:
    return datetime.now().strftime(format_text)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template (and the one for tools, where a model has its own)."""

    def __init__(self, source: str, tool_source: str | None, variables: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._tool_template = self._template if tool_source is None else environment.from_string(tool_source)
        except jinja2.TemplateError as error:
            raise LocalError(f"the model's chat template is broken: {error}", field="chat_template") from error
        self._variables = dict(variables)  # bos_token and its like

    @classmethod
    def find(cls, path: Path, config: Mapping[str, Any], variables: Mapping[str, str]) -> ChatTemplate | None:
        """The template of a model directory: ``chat_template.jinja`` first, then ``tokenizer_config.json``."""
        file = path / "chat_template.jinja"
        found = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if found is None:
            return None
        if isinstance(found, str):
            return cls(found, None, variables)
        try:
            named = {str(entry["name"]): entry["template"] for entry in found}
        except (TypeError, KeyError):
            named = {"": None}
        if not all(isinstance(template, str) for template in named.values()):
            fix = "give a text, or a list of objects with name and template"
            raise LocalError("chat_template is neither a text nor named texts", field="chat_template", fix=fix)
        if "default" not in named:
            raise LocalError(f"no chat template named default, only {sorted(named)}", field="chat_template")
        return cls(named["default"], named.get("tool_use"), variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        if not messages:
            raise LocalError("messages must not be empty", field="messages")
        variables = {
            **self._variables,
            **(template_kwargs or {}),
            "messages": [_plain_message(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = (self._tool_template if tools else self._template).render(variables)
            text.encode()  # half of a surrogate pair is no text: UnicodeEncodeError is a ValueError
            return text
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise LocalError(f"the chat template refused the messages: {error}", field="messages") from error


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: no null fields, text parts joined into one string."""
    plain = {name: value for name, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(_text_of(part) for part in content)
    return plain


def _text_of(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise LocalError(f"content parts of type {kind!r} are not supported", field="messages", fix="send text parts only")
