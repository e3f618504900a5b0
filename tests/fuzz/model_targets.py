"""Parsers of what a model directory holds: configuration, weights, tokenizer, chat template, GGUF."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from .target import Run, Target

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 259, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 128,
    "tie_word_embeddings": False, "eos_token_id": 258,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64},
}  # fmt: skip
QWEN = {
    **LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, "sliding_window": 32,
    "use_sliding_window": True, "max_window_layers": 1, "rope_scaling": {"type": "yarn", "factor": 4.0},
    "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 4, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16", "vocab_size": 129280, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
}  # fmt: skip
HYBRID = {
    "text_config": {
        "model_type": "jamba", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_expand": 2, "vocab_size": 100, "intermediate_size": 512,
    }
}  # fmt: skip


@cache
def _tokenizer_folder() -> Path:
    """A byte-level tokenizer with a chat template; it lasts as long as the process."""
    from kvbaton.drill.tiny_model import _write_tokenizer

    path = Path(tempfile.mkdtemp(prefix="kvbaton-fuzz-"))
    import atexit

    atexit.register(shutil.rmtree, path, ignore_errors=True)
    _write_tokenizer(path)
    return path


def byte_tokenizer(folder: Path) -> Any:
    from kvbaton.engine.tokenizer import Tokenizer

    return Tokenizer.load(_tokenizer_folder())


def _engine_config(folder: Path) -> Run:
    """The engine's reader: a configuration it would compute wrongly is refused by name."""
    from kvbaton.engine.model_config import ModelConfig
    from kvbaton.engine.weights import expected_tensors
    from kvbaton.types import LocalError

    path = folder / "config.json"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        try:
            config = ModelConfig.from_dir(folder)
        except LocalError:
            return
        assert len(config.sliding_window) == config.num_layers and len(config.inv_freq) == config.head_dim // 2
        expected_tensors(config)

    return run


def _plan_config(folder: Path) -> Run:
    """The planner's reader, which knows more kinds of models, and what is made of it."""
    from kvbaton.plan.kv_math import KVCost, Sharding, kv_format
    from kvbaton.plan.model_shape import read_model
    from kvbaton.plan.model_weights import count_weights
    from kvbaton.types import LocalError

    path = folder / "config.json"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        try:
            shape = read_model(path)
            cost = KVCost(shape, kv_format("auto", shape), Sharding())
            assert cost.token_bytes >= 0
            count_weights(shape, None, None)
        except LocalError:
            return

    return run


def _config_seeds() -> list[bytes]:
    return [json.dumps(each).encode() for each in (LLAMA, QWEN, DEEPSEEK, HYBRID)]


def _safetensors(folder: Path) -> Run:
    """The length of the header comes first; so that changes of a header reach its reader, it is set right at times."""
    from kvbaton.engine.weights import read_safetensors
    from kvbaton.types import LocalError

    path = folder / "model.safetensors"

    def run(data: bytes) -> None:
        for framed in (data, len(data).to_bytes(8, "little") + data + bytes(256)):
            path.write_bytes(framed)
            try:
                tensors = read_safetensors(path)
            except LocalError:
                continue
            for tensor in tensors.values():
                tensor.bits.sum()  # reads all of it

    return run


def _safetensors_seeds() -> list[bytes]:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
        "d": {"dtype": "F16", "shape": [0, 4], "data_offsets": [33, 33]},
    }
    text = json.dumps(header).encode()
    return [text, len(text).to_bytes(8, "little") + text + bytes(33), b"{}", b"\0" * 8]


def _weight_index(folder: Path) -> Run:
    from kvbaton.engine.weights import weight_files
    from kvbaton.types import LocalError

    (folder / "a.safetensors").write_bytes(b"")
    path = folder / "model.safetensors.index.json"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        try:
            found = weight_files(folder)
        except LocalError:
            return
        assert all(each.parent == folder for each in found)

    return run


def _tokenizer(folder: Path) -> Run:
    from kvbaton.engine.tokenizer import Tokenizer
    from kvbaton.types import LocalError

    def run(data: bytes) -> None:
        (folder / "tokenizer.json").write_bytes(data)
        try:
            tokenizer = Tokenizer.load(folder)
            ids = tokenizer.encode("ab 1")
        except LocalError:
            return
        tokenizer.decode(ids)

    return run


def _tokenizer_seeds() -> list[bytes]:
    """Small enough that a change is likely to hit something; one of bytes and one with a byte fallback."""
    byte_level = json.loads((_tokenizer_folder() / "tokenizer.json").read_text())
    fallback = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None,
        "added_tokens": [{"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": False, "special": True}],
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<s>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False,
                  "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3, "<0x31>": 4, "\u2581": 5}, "merges": [["a", "b"]]},
    }  # fmt: skip
    byte_level["model"]["vocab"] = {"a": 0, "b": 1, "Ġ": 2, "1": 3, "<|im_end|>": 4}
    byte_level["added_tokens"] = byte_level["added_tokens"][-1:]
    byte_level["added_tokens"][0]["id"] = 4
    return [json.dumps(each).encode() for each in (byte_level, fallback)]


def _tokenizer_config(folder: Path) -> Run:
    """Special tokens and the chat template, and a conversation laid out by it."""
    from kvbaton.engine.tokenizer import Tokenizer
    from kvbaton.types import LocalError

    shutil.copy(_tokenizer_folder() / "tokenizer.json", folder)

    def run(data: bytes) -> None:
        (folder / "tokenizer_config.json").write_bytes(data)
        try:
            tokenizer = Tokenizer.load(folder)
            tokenizer.chat([{"role": "user", "content": "hi <|im_end|>"}])
        except LocalError:
            return

    return run


def _tokenizer_config_seeds() -> list[bytes]:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m.content }}\n{% endfor %}{{ bos_token }}"
    named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "{{ tools }}"}]
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "model_max_length": 10}
    return [json.dumps({**config, "chat_template": each}).encode() for each in (template, named)]


def _gguf(folder: Path) -> Run:
    from kvbaton.engine.gguf_model import convert
    from kvbaton.types import LocalError

    path, out = folder / "model.gguf", folder / "out"
    out.mkdir()

    def run(data: bytes) -> None:
        path.write_bytes(data)
        try:
            convert(path, out)
        except LocalError:
            return

    return run


@cache
def _tiny_gguf() -> bytes:
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        writer = GGUFWriter(path, "llama")
        sizes = {"context_length": 64, "embedding_length": 32, "block_count": 1, "head_count": 2, "head_count_kv": 1}
        for name, number in {**sizes, "feed_forward_length": 32, "rope_dimension_count": 16}.items():
            getattr(writer, f"add_{name}")(number)
        writer.add_rope_freq_base(10000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(["<s>", "</s>", "a", "b", "ab"])
        writer.add_token_types([3, 3, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_pad_token_id(1)
        writer.add_chat_template("{{ messages[0].content }}")
        rng = np.random.default_rng(0)
        for name, shape in (("attn_q", (32, 32)), ("attn_k", (16, 32))):
            blocks = quantize(rng.standard_normal(shape).astype(np.float32), GGMLQuantizationType.Q4_1)
            writer.add_tensor(f"blk.0.{name}.weight", blocks, raw_dtype=GGMLQuantizationType.Q4_1)
        writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _gguf_seeds() -> list[bytes]:
    whole = _tiny_gguf()
    return [whole, whole[:400], whole[:64], b"GGUF\3\0\0\0" + bytes(16)]


TARGETS = (
    Target("config.json (engine)", _engine_config, _config_seeds, "json", 1.5),
    Target("config.json (planner)", _plan_config, _config_seeds, "json", 1.5),
    Target("safetensors headers", _safetensors, _safetensors_seeds, "json", 1.0),
    Target("index of weights", _weight_index, lambda: [b'{"weight_map": {"x": "a.safetensors"}}'], "json", 0.4),
    Target("tokenizer.json", _tokenizer, _tokenizer_seeds, "json", 0.4),
    Target("tokenizer_config.json", _tokenizer_config, _tokenizer_config_seeds, "json", 0.2),
    Target("GGUF headers", _gguf, _gguf_seeds, "bytes", 0.5),
)
