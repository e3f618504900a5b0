"""Every parser of outside bytes takes some hundred inputs, the same each time; `make fuzz` runs a million, guided."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.model_targets import DEEPSEEK, LLAMA, QWEN
from fuzz.plain import try_inputs, try_one
from fuzz.shapes import as_json, as_msgpack
from fuzz.table import all_targets
from fuzz.target import Target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NUM_INPUTS = int(os.environ.get("KVBATON_FUZZ_INPUTS", "120"))
NUM_DOCUMENTS = int(os.environ.get("KVBATON_FUZZ_DOCUMENTS", "25"))
# What once broke a target: by its name.
FOUND: tuple[tuple[str, bytes], ...] = (
    # Nested too deep where nobody looks: no error of the decoder, but one of Python's.
    *(
        (name, b'{"y":' + b"[" * 100_000)
        for name in (
            *("what a worker says of itself", "bodies of requests", "profile files", "config.json (engine)"),
            *("config.json (planner)", "tokenizer.json", "tokenizer_config.json", "samples files", "index of weights"),
        )
    ),
    ("KV events over HTTP", b"\x81\xa1y" + b"\x91" * 100_000),
    ("KV events over ZeroMQ", b"\x92\x01" + b"\x91" * 100_000),
    # What else a block's hash stands for was no list, and the task that follows a server's events ended.
    ("KV events over ZeroMQ", as_msgpack([0, [["BlockStored", [1], None, [5] * 16, 16, None, "GPU", None, [7]]]])),
    ("safetensors headers", b'{"y":' + b"[" * 100_000),
    ("traces (jsonl)", b'{"y":' + b"[" * 100_000),
    ("SSE at the benchmark", b'data: {"y":' + b"[" * 100_000 + b"\n\n"),
    ("HTTP of workers", b"HTTP/1.1 503 x\r\n\r\n" + b'{"error":' + b"[" * 60_000),
    # A worker's report and journal that make no sense were an error of the router.
    ("SSE at the router", b":report {\n\ndata: x\n\n"),
    ("SSE at the router", b":0 x\ndata: {}\n\n:9999999999999999999 1\ndata: {}\n\n"),
    ("SSE at the router", b":0 12 \xff\ndata: {}\n\n"),
    # An array of 2**63 items was counted item by item, and a tensor of no place was read.
    ("GGUF headers", b"GGUF\3\0\0\0" + bytes(8) + (b"\1" + bytes(7)) * 2 + b"a\x09\0\0\0\4\0\0\0" + b"\xff" * 8),
    ("GGUF headers", b"not one"),
    ("config.json (engine)", b'{"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2000000000}'),
    ("conversations (ShareGPT)", b'[{"conversations": [{"value": "q"}, {"value": 7}]}]'),
    ("samples files", b"\x1f\x8b\x08\0\0\0\0\0\2\3cut"),
    ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
    ("tokenizer_config.json", b'{"chat_template": "\\ud800"}'),
    ("tokenizer_config.json", b'{"eos_token": "\\ud800"}'),
    ("scenario files", b"name = '\xff'"),
    # The client was asked for the rest of a body that had been refused already, behind the refusal.
    ("HTTP to the router", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\n"
     b"transfer-encoding: x\r\n\r\n{}"),
    # The internal object with a name that is no UTF-8 was an error of the worker.
    ("internal calls", b'POST /v1/completions\n{"prompt": [1], "kvbaton": {"request\xc8\xca_id": "r"}}'),
    ("internal calls", b'POST /v1/completions\n{"prompt": [1], "kvbaton": {"x": ' + b"[" * 60_000 + b"}}"),
    # The mark of an error inside a line of another kind cut that line in two.
    ("SSE at the router", b':data: {"error": [\n\n:1 2\n\n'),
    ("SSE at the router", b':0 12\ndata: {"error":{"message":"m"}}\n\n'),
    # Numbers that are none, in fields that were passed on as they stand.
    *(("config.json (planner)", json.dumps({**DEEPSEEK, "kv_lora_rank": None, **{name: wrong}}).encode())
      for name in ("v_head_dim", "max_position_embeddings", "num_global_key_value_heads", "hidden_size")
      for wrong in ("default", -1, 1.5, [], True)),
    ("config.json (planner)", json.dumps({**LLAMA, "per_layer_config": {"0": {"head_dim": "x"}}}).encode()),
    ("config.json (planner)", json.dumps({**LLAMA, "per_layer_config": {"0": {"num_key_value_heads": 0}}}).encode()),
    ("tokenizer.json", json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
                                   "decoder": {"type": "Sequence", "decoders": [
        {"type": "Fuse"}, {"typee": "Strip", "content": " ", "start": 1, "stop": 0}]}}).encode()),
    ("tokenizer.json", json.dumps({"decoder": {"type": "ByteLevel"}, "model": {
        "type": "BPE", "vocab": {"a": 2**31 + 4, "b": 1}, "merges": []}}).encode()),
    # A panic of the library in Rust, which is no Exception.
    ("tokenizer.json", json.dumps({"decoder": {"type": "ByteLevel"}, "model": {
        "type": "BPE", "vocab": {"a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]],
        "continuing_subword_prefix": "0/"}}).encode()),
    # The id of an internal call came back in a header, whatever was in it.
    *(("internal calls", b'POST /v1/completions\n{"prompt": "a", "kvbaton": {"request_id": "' + wrong
       + b'", "prompt_token_ids": [[1, 1, 2]], "prefill": null}}') for wrong in (b"\\u0000", b"\\r\\nx: y")),
    # A cache of a negative size, of a worker that sends no events.
    ("what a worker says of itself", json.dumps({
        "state": "serving", "role": "prefill", "model_id": "", "incarnation": "a", "max_context": 0, "kv_host": "a",
        "fingerprint": {"protocol_version": 0, "model_revision": "r", "num_layers": 1, "num_kv_heads": 1, "head_dim": 8,
                        "kv_dtype": "float32", "rope": ""},
        "block_size": -(2**31), "kv_port": 23, "stats": {"num_blocks": 11}, "kv_events": False}).encode()),
    # A base of 1 has no logarithm to divide by; the same of numbers that overflow on the way, or are none.
    *(("config.json (engine)", json.dumps({**QWEN, "rope_scaling": {"type": "yarn", **wrong}}).encode())
      for wrong in ({"rope_theta": 1}, {"rope_theta": 1e300}, {"factor": 1e300}, {"beta_fast": 1e308},
                    {"original_max_position_embeddings": "x"}, {"beta_fast": "x"},
                    {"mscale": "x", "mscale_all_dim": 1}, {"attention_factor": 1e-320})),
    # The token for what is not in the vocabulary is not in it either: every such text raised a plain Exception.
    ("tokenizer.json", json.dumps({"decoder": {"type": "Fuse"}, "model": {
        "type": "BPE", "vocab": {"a": 1, "b": 2}, "merges": [], "unk_token": "<s~"}}).encode()),
    ("SSE at the router", b'data: x\n\n\n:0 12\ndata: {}\n\n'),
    # A list of the blocks of 1e300 tokens.
    ("traces (jsonl)", b'{"timestamp": 0, "input_length": 1e300, "output_length": 1, "hash_ids": [0]}'),
    ("traces (csv)", b"arrival_s,prompt_tokens,output_tokens\n0,9" + b"9" * 40 + b",1\n"),
    ("conversations (ShareGPT)", b'[{"conversations": [{"value": "\\ud800 q"}, {"value": "a"}]}]'),
    ("samples files", b'["kind"]'),
    ("Prometheus text", b"# TYPE \x1c \x80"),
    ("profile files", json.dumps({"step": {"fixed_s": 1e-3, "per_token_s": 1e-3},
                                  "link": {"startup_s": 0.0, "bytes_per_s": 0.0}}).encode()),
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(before)


@pytest.mark.parametrize("target", all_targets(), ids=lambda target: target.name)
def test_bad_input_is_refused(target: Target, tmp_path: Path) -> None:
    run = target.prepare(tmp_path)
    finds = try_inputs(target, run, NUM_INPUTS, seed=0)
    assert not finds, "\n".join(map(str, finds))


@pytest.mark.parametrize("name", sorted({name for name, _ in FOUND}))
def test_what_was_found_is_refused(name: str, tmp_path: Path) -> None:
    target = next(each for each in all_targets() if each.name == name)
    run = target.prepare(tmp_path)
    finds = [try_one(run, data) for known, data in FOUND if known == name]
    assert not any(finds), "\n".join(map(str, finds))


@pytest.mark.parametrize("target", [each for each in all_targets() if each.form in ("json", "msgpack")],
                         ids=lambda target: target.name)  # fmt: skip
def test_any_document_is_refused(target: Target, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hypothesis looks for documents; what fails it makes small."""
    encode = as_json if target.form == "json" else as_msgpack
    run = target.prepare(tmp_path_factory.mktemp("fuzz"))
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    names = st.text(max_size=8) | st.sampled_from(_names(target))
    documents = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=6)
    )

    @settings(
        max_examples=NUM_DOCUMENTS,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(documents)
    def check(document: object) -> None:
        run(encode(document))

    check()


def _names(target: Target) -> list[str]:
    """Keys of its examples."""
    import json

    import msgspec

    decode = json.loads if target.form == "json" else msgspec.msgpack.decode
    found: set[str] = set()
    for seed in target.seeds():
        try:
            document = decode(seed)
        except ValueError:
            continue
        left = [document]
        while left:
            value = left.pop()
            if isinstance(value, dict):
                found |= {key for key in value if isinstance(key, str)}
                left += value.values()
            elif isinstance(value, list):
                left += value
    return sorted(found) or ["type"]
