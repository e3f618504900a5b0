"""The router's description of its own API (OpenAPI 3.1), made of what its parsers are made of.

Fields and types come from the structs that bodies are decoded into, bounds from the tables and limits they are checked
against, so that the two cannot part. What no schema says (token ids within the vocabulary, a prompt within the context)
is answered with the error that every 4xx here is. Knows nothing about requests.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton import __version__
from kvbaton.workers.openai_body import Body, Message
from kvbaton.workers.openai_request import (
    BOUNDS,
    CHAT_ONLY,
    COMPLETIONS_ONLY,
    MAX_TOKENS,
    ROLES,
    UNSUPPORTED,
    RequestLimits,
)

PATH = "/openapi.json"
_COMPONENTS = "#/components/schemas/{name}"
Schema = dict[str, Any]


def document(model: str, limits: RequestLimits | None = None) -> Schema:
    limits = limits or RequestLimits()
    schemas = _schemas(model, limits)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvbaton", "version": __version__},
        "paths": {
            "/v1/chat/completions": {"post": _generation("ChatRequest", "a conversation goes on")},
            "/v1/completions": {"post": _generation("CompletionRequest", "texts go on")},
            "/v1/models": {"get": _page("the model that is served")},
            "/v1/models/{name}": {
                "get": {
                    **_page("one model"),
                    "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
                }
            },
            **{path: {"get": _page(what)} for path, what in _PAGES.items()},
            "/metrics": {"get": _page("figures for Prometheus", "text/plain")},
        },
        "components": {"schemas": schemas},
    }


_PAGES = {
    "/health": "200 while the process runs",
    "/ready": "200 while it takes requests",
    "/version": "what two deployments must share to be compared",
    "/fleet": "members, their state and load",
    PATH: "this document",
}


def _generation(body: str, what: str) -> Schema:
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "summary": what,
        "requestBody": {"required": True, "content": {"application/json": {"schema": _reference(body)}}},
        "responses": {"200": {"description": "the answer, whole or as events", "content": answer}, **_errors()},
    }


def _page(what: str, kind: str = "application/json") -> Schema:
    content = {kind: {"schema": {"type": "string" if kind == "text/plain" else "object"}}}
    return {"summary": what, "responses": {"200": {"description": what, "content": content}, **_errors()}}


def _errors() -> Schema:
    content = {"application/json": {"schema": _reference("Error")}}
    return {
        "4XX": {"description": "what is wrong with the request, by the name of the field", "content": content},
        "5XX": {"description": "no room, no worker, or no answer in time", "content": content},
    }


def _reference(name: str) -> Schema:
    return {"$ref": _COMPONENTS.format(name=name)}


_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _schemas(model: str, limits: RequestLimits) -> Schema:
    message = _without_raw(Message, {})
    body = _without_raw(Body, {"messages": list[message] | None})  # type: ignore[valid-type]
    found: Schema = msgspec.json.schema_components([body], ref_template=_COMPONENTS)[1]
    whole = found.pop("Body")["properties"]
    for name in [name for name in whole if name.startswith("kv")]:  # for routers and engines, refused from clients
        del whole[name]
    _bound(whole, model, limits)
    found["Message"]["properties"]["role"]["enum"] = list(ROLES)
    found["ContentPart"]["properties"]["type"]["enum"] = ["text"]
    for name, left_out, required in (
        ("ChatRequest", COMPLETIONS_ONLY, "messages"),
        ("CompletionRequest", CHAT_ONLY, "prompt"),
    ):
        fields = {field: schema for field, schema in whole.items() if field not in left_out}
        fields[required] = {"anyOf": [each for each in fields[required]["anyOf"] if each != {"type": "null"}]}
        found[name] = {"type": "object", "properties": fields, "required": [required], "additionalProperties": False}
    return {**found, "Error": _ERROR}


def _without_raw(struct: type[msgspec.Struct], replaced: dict[str, Any]) -> type[msgspec.Struct]:
    """The same fields; what is kept undecoded may be anything."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(struct):
        kind = replaced.get(field.name, Any if field.type is msgspec.Raw else field.type)
        fields.append((field.name, kind) if field.required else (field.name, kind, None))
    return msgspec.defstruct(struct.__name__, fields)


def _bound(fields: Schema, model: str, limits: RequestLimits) -> None:
    for name, (_, low, high) in BOUNDS.items():
        _narrow(fields[name], "number", {"minimum": low, "maximum": high})
    for name in ("max_tokens", "max_completion_tokens"):
        _narrow(fields[name], "number", {"minimum": 1, "maximum": MAX_TOKENS})
    _narrow(fields["n"], "number", {"minimum": 1, "maximum": limits.max_choices})
    _narrow(fields["top_logprobs"], "number", {"minimum": 0, "maximum": limits.max_logprobs})
    _narrow(fields["messages"], "array", {"minItems": 1, "maxItems": limits.max_messages})
    _narrow(fields["stop_token_ids"], "array", {"maxItems": limits.max_stop_token_ids})
    _narrow(fields["stop"], "array", {"maxItems": limits.max_stops})
    _narrow(fields["stop"], "string", {"minLength": 1, "maxLength": limits.max_stop_chars})
    _narrow(fields["cache_salt"], "string", {"maxLength": limits.max_salt_chars})
    _narrow(fields["logit_bias"], "object", {"maxProperties": limits.max_logit_bias})
    _narrow(fields["prompt"], "array", {"minItems": 1})
    fields["model"]["examples"] = [model]
    for name, harmless in UNSUPPORTED.items():
        fields[name] = {"enum": [None, *harmless], "description": "accepted only with what changes nothing"}


def _narrow(schema: Schema, kind: str, bounds: Schema) -> None:
    """Of what a field may be, the branches of that kind get bounds."""
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") == kind or (kind == "number" and branch.get("type") == "integer"):
            branch.update(bounds)
