"""The native kernels against a dense float64 model written here, and against themselves for batch invariance."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvbaton.engine import native
from kvbaton.kv.layout import KVLayout
from kvbaton.types import LocalError

pytestmark = pytest.mark.skipif(native.available() is not None, reason=str(native.available()))

RNG_SEED = 7
GROUP = 32


@dataclass(frozen=True)
class TinyConfig:
    """The attributes of ModelConfig that the kernels read."""

    num_layers: int = 2
    hidden_size: int = 96
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 176
    vocab_size: int = 211
    rms_eps: float = 1e-5
    rope_attention_factor: float = 1.0
    tie_embeddings: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...] = (None, None)

    @property
    def inv_freq(self) -> np.ndarray:
        return (10000.0 ** -(np.arange(0, self.head_dim, 2) / self.head_dim)).astype(np.float32)


@dataclass(frozen=True)
class Step:
    token_ids: np.ndarray
    positions: np.ndarray
    seq_starts: np.ndarray
    block_table: np.ndarray
    sample_rows: np.ndarray


SHAPES = {
    "llama": TinyConfig(),
    "one_kv_head_each": TinyConfig(num_heads=3, num_kv_heads=3, hidden_size=64, tie_embeddings=False),
    "group_of_eight": TinyConfig(num_heads=8, num_kv_heads=1, hidden_size=80, intermediate_size=200),
    "head_dim_80": TinyConfig(head_dim=80, num_heads=4, num_kv_heads=2),
    "qwen2_head_dim_128": TinyConfig(head_dim=128, num_heads=2, num_kv_heads=1, qkv_bias=True),
    "qwen3": TinyConfig(qk_norm=True, head_dim=128, num_heads=4, num_kv_heads=2, vocab_size=100),
    "every_bias": TinyConfig(qkv_bias=True, o_bias=True, mlp_bias=True),
    "mistral_window": TinyConfig(sliding_window=(37, None), rope_attention_factor=1.2),
}


def round_to_bf16(array: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def make_weights(config: TinyConfig, seed: int = RNG_SEED) -> dict[str, np.ndarray]:
    """Random weights, already bfloat16 numbers so that both dtypes compute with the same ones."""
    rng = np.random.default_rng(seed)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    h, m = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, h),
        "model.norm.weight": (h,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    for layer in range(config.num_layers):
        p = f"model.layers.{layer}."
        linears = {"self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h)}
        linears |= {"self_attn.o_proj": (h, q), "mlp.gate_proj": (m, h), "mlp.up_proj": (m, h), "mlp.down_proj": (h, m)}
        for name, shape in linears.items():
            shapes[f"{p}{name}.weight"] = shape
            shapes[f"{p}{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{p}{name}.weight"] = (h,)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            shapes[f"{p}{name}.weight"] = (config.head_dim,)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            values = rng.normal(0.0 if name.endswith("bias") else 1.0, 0.2, shape)
        else:
            values = rng.normal(0.0, 1.5 / shape[1] ** 0.5, shape)
        weights[name] = round_to_bf16(values)
    return weights


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def dense_logits(config: TinyConfig, weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Logits of every position, in float64, with nothing cached."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    t, hd, eps = len(tokens), config.head_dim, config.rms_eps
    x = w["model.embed_tokens.weight"][tokens]
    angle = np.arange(t)[:, None].astype(np.float32) * config.inv_freq[None]
    cos, sin = (f(angle)[:, None] * config.rope_attention_factor for f in (np.cos, np.sin))

    def rotate(v: np.ndarray) -> np.ndarray:
        a, b = v[..., : hd // 2], v[..., hd // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    for layer in range(config.num_layers):
        p = f"model.layers.{layer}."

        def linear(v: np.ndarray, name: str, bias: bool, prefix: str = p) -> np.ndarray:
            return v @ w[f"{prefix}{name}.weight"].T + (w[f"{prefix}{name}.bias"] if bias else 0)

        h = rms_norm(x, w[f"{p}input_layernorm.weight"], eps)
        q, k, v = (linear(h, f"self_attn.{n}_proj", config.qkv_bias).reshape(t, -1, hd) for n in "qkv")
        if config.qk_norm:
            q = rms_norm(q, w[f"{p}self_attn.q_norm.weight"], eps)
            k = rms_norm(k, w[f"{p}self_attn.k_norm.weight"], eps)
        q, k = rotate(q), rotate(k)
        group = config.num_heads // config.num_kv_heads
        k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / hd**0.5
        age = np.arange(t)[:, None] - np.arange(t)[None]
        window = config.sliding_window[layer] or t
        scores = np.where((age >= 0) & (age < window), scores, -np.inf)
        attention = np.exp(scores - scores.max(-1, keepdims=True))
        attention /= attention.sum(-1, keepdims=True)
        x = x + linear(np.einsum("hqk,khd->qhd", attention, v).reshape(t, -1), "self_attn.o_proj", config.o_bias)
        h = rms_norm(x, w[f"{p}post_attention_layernorm.weight"], eps)
        gate = linear(h, "mlp.gate_proj", config.mlp_bias)
        x = x + linear(
            gate / (1 + np.exp(-gate)) * linear(h, "mlp.up_proj", config.mlp_bias), "mlp.down_proj", config.mlp_bias
        )
    head = w["model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"]
    return rms_norm(x, w["model.norm.weight"], eps) @ head.T


class Runner:
    """A native model with a pool full of garbage, and sequences that own scattered blocks of it."""

    def __init__(self, config: TinyConfig, tensors: dict[str, np.ndarray], **options: object) -> None:
        dtype = str(options.pop("dtype", "float32"))
        block_size = int(options.pop("block_size", 16))  # type: ignore[call-overload]
        kv_dtype = str(options.pop("kv_dtype", dtype))
        self.layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, kv_dtype)
        self.num_blocks = 2048 // block_size
        self.model = native.NativeModel(config, tensors, self.layout, dtype=dtype, **options)  # type: ignore[arg-type]
        # All ones is NaN in every KV dtype: whatever is read before it was written shows.
        self.pool = np.full(self.layout.pool_bytes(self.num_blocks), 0xFF, dtype=np.uint8)
        self.free = list(np.random.default_rng(3).permutation(self.num_blocks))
        self.blocks: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}
        self.layers_seen: list[int] = []

    def step(self, work: dict[str, list[int]]) -> dict[str, np.ndarray]:
        """Append tokens to sequences in one batch; logits of every new row."""
        tokens, positions, starts = [], [], [0]
        for name, new in work.items():
            start = self.lengths.get(name, 0)
            self.lengths[name] = start + len(new)
            held = self.blocks.setdefault(name, [])
            while len(held) * self.layout.block_size < self.lengths[name]:
                held.append(int(self.free.pop()))
            tokens += new
            positions += range(start, start + len(new))
            starts.append(len(tokens))
        table = np.zeros((len(work), max(len(self.blocks[n]) for n in work)), dtype=np.int32)
        for row, name in enumerate(work):
            table[row, : len(self.blocks[name])] = self.blocks[name]
        arrays = (np.array(a, dtype=np.int32) for a in (tokens, positions, starts))
        token_ids, position_ids, seq_starts = arrays
        step = Step(token_ids, position_ids, seq_starts, table, np.arange(len(tokens), dtype=np.int32))
        logits = self.model.forward_buffer(step, self.pool, self.num_blocks, self.layers_seen.append)  # type: ignore[arg-type]
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(work)}

    def run(self, tokens: list[int], chunks: list[int], name: str = "a") -> np.ndarray:
        """The whole sequence in chunks of these sizes, the last one repeated."""
        out, done = [], 0
        while done < len(tokens):
            size = chunks.pop(0) if len(chunks) > 1 else chunks[0]
            out.append(self.step({name: tokens[done : done + size]})[name])
            done += size
        return np.concatenate(out)


def random_tokens(config: TinyConfig, count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, config.vocab_size, count)]


def variants() -> list[tuple[str, str]]:
    """Every (dtype, engine) that can run here."""
    if native.available() is not None:
        return []
    dtypes = ("float32", "bfloat16")
    best = {dtype: native.ENGINES.index(native.best_engine(dtype)) for dtype in dtypes}
    return [(dtype, engine) for dtype in dtypes for engine in native.ENGINES[: best[dtype] + 1]]


VARIANTS = variants()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "engine"), VARIANTS)
def test_matches_dense_model(shape: str, dtype: str, engine: str) -> None:
    config = SHAPES[shape]
    weights = make_weights(config)
    tokens = random_tokens(config, 150)
    expected = dense_logits(config, weights, tokens)
    logits = Runner(config, weights, dtype=dtype, engine=engine).run(tokens, [97, 40, 1])
    error = np.abs(logits - expected).max() / expected.std()
    assert error < (1e-4 if dtype == "float32" else 0.2)
    if dtype == "bfloat16":
        assert np.sqrt(((logits - expected) ** 2).mean()) / expected.std() < 0.03


@pytest.mark.parametrize("weights_format", ["native", "int8", "int4"])
@pytest.mark.parametrize(("dtype", "engine"), VARIANTS)
def test_bits_do_not_depend_on_batch_chunk_or_block_size(dtype: str, engine: str, weights_format: str) -> None:
    config = replace(SHAPES["mistral_window"], num_heads=9, num_kv_heads=3, hidden_size=128)
    weights = make_weights(config)

    def runner(block_size: int = 16, **options: object) -> Runner:
        options |= {"dtype": dtype, "engine": engine, "weights": weights_format, "block_size": block_size}
        return Runner(config, weights, **options)

    # Several tiles of keys; where it is quick enough also more than one block of 256 rows.
    quick = engine.startswith(("avx512", "amx"))
    count = 330 if quick else 150
    tokens = random_tokens(config, count)
    one_by_one = runner().run(tokens, [1])
    for block_size, chunks in ((16, [count]), (8, [37, 1, 3, 4, 30]), (64, [count - 3, 1]), (24, [5, 128, 200])):
        assert np.array_equal(runner(block_size).run(tokens, chunks), one_by_one), (block_size, chunks)
    assert np.array_equal(runner(num_threads=3).run(tokens, [count - 80, 79, 1]), one_by_one)
    batch = runner()
    others = {name: random_tokens(config, size, seed=size) for name, size in (("b", 290), ("c", 21), ("d", 3))}
    start = count - 12
    batch.step({"a": tokens[:start], **others})
    for position in range(start, count):
        fed = {name: [position % config.vocab_size] for name in others}
        row = batch.step({**fed, "a": tokens[position : position + 1]})["a"]
        assert np.array_equal(row[0], one_by_one[position])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_row_reads_what_was_never_written(dtype: str) -> None:
    config = SHAPES["head_dim_80"]
    logits = Runner(config, make_weights(config), dtype=dtype, block_size=64).run(random_tokens(config, 70), [3, 1, 66])
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8_e4m3"])
@pytest.mark.parametrize(("dtype", "engine"), VARIANTS)
def test_kv_dtypes(dtype: str, engine: str, kv_dtype: str) -> None:
    config = SHAPES["llama"]
    weights = make_weights(config)
    tokens = random_tokens(config, 90)
    expected = dense_logits(config, weights, tokens)
    runner = Runner(config, weights, dtype=dtype, engine=engine, kv_dtype=kv_dtype)
    logits = runner.run(tokens, [50, 1])
    limit = {"float32": 0.03, "bfloat16": 0.03, "float8_e4m3": 0.12}[kv_dtype]
    assert np.sqrt(((logits - expected) ** 2).mean()) / expected.std() < limit
    assert np.array_equal(
        Runner(config, weights, dtype=dtype, engine=engine, kv_dtype=kv_dtype).run(tokens, [1]), logits
    )
    assert runner.layers_seen[:4] == [0, 1, 0, 1]


def test_float8_rounds_to_nearest_even_and_saturates() -> None:
    """V of one token is its value projection as stored: read the pool's bytes back and compare with every code."""
    codes = np.arange(127, dtype=np.uint8)
    exponent, mantissa = (codes >> 3).astype(int), (codes & 7).astype(float)
    values = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    wanted, inputs = [], []
    for code in range(0, 126):
        low, high = values[code], values[code + 1]
        middle = (low + high) / 2
        inputs += [
            low,
            np.nextafter(np.float32(middle), np.float32(0)),
            middle,
            np.nextafter(np.float32(middle), np.float32(1e9)),
        ]
        wanted += [code, code, code if code % 2 == 0 else code + 1, code + 1]
    inputs += [448, 460, 1000, 1e30]
    wanted += [126] * 4
    count = len(inputs)
    heads = -(-count // 16)
    config = TinyConfig(
        num_layers=1, hidden_size=32, num_heads=heads, num_kv_heads=heads, head_dim=16, sliding_window=(None,)
    )
    weights = make_weights(config)
    weights["model.embed_tokens.weight"][0] = 0
    for name in ("v_proj", "k_proj"):
        weights[f"model.layers.0.self_attn.{name}.bias"] = np.zeros(heads * 16, dtype=np.float32)
    config = replace(config, qkv_bias=True)
    for sign in (1, -1):
        bias = np.zeros(heads * 16, dtype=np.float32)
        bias[:count] = np.array(inputs, dtype=np.float32) * sign
        weights["model.layers.0.self_attn.v_proj.bias"] = bias
        runner = Runner(config, weights, kv_dtype="float8_e4m3")
        runner.step({"a": [0]})
        stored = runner.pool.reshape(runner.layout.shape(runner.num_blocks))[0, runner.blocks["a"][0], 1, :, 0]
        assert ((stored.reshape(-1)[:count] & 0x7F) == wanted).all()
        assert ((stored.reshape(-1)[:count][4:] >> 7) == (0 if sign > 0 else 1)).all()


def quantise(weight: np.ndarray, bits: int) -> np.ndarray:
    """What int8 and int4 weights stand for: groups of 32 columns, float16 scale and (4 bits) minimum."""
    rows, columns = weight.shape
    padded = np.pad(weight, ((0, 0), (0, -columns % GROUP)), mode="edge").reshape(rows, -1, GROUP)
    if bits == 8:
        scale = (np.abs(padded).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
        codes = np.clip(np.rint(padded / np.where(scale > 0, scale, 1)), -127, 127)
        out = codes * scale
    else:
        low, high = padded.min(-1, keepdims=True), padded.max(-1, keepdims=True)
        scale = ((high - low) / np.float32(15)).astype(np.float16).astype(np.float32)
        minimum = low.astype(np.float16).astype(np.float32)
        codes = np.clip(np.rint((padded - minimum) / np.where(scale > 0, scale, 1)), 0, 15)
        out = codes * scale + minimum
    return out.reshape(rows, -1)[:, :columns].astype(np.float32)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("dtype", "engine"), VARIANTS)
def test_quantised_weights_match_dequantised_ones(dtype: str, engine: str, bits: int) -> None:
    config = replace(SHAPES["group_of_eight"], tie_embeddings=False)
    weights = make_weights(config)
    tokens = random_tokens(config, 60)
    stands_for = dict(weights)
    for name, value in weights.items():
        if value.ndim == 2 and name != "model.embed_tokens.weight":
            stands_for[name] = quantise(value, 8 if name == "lm_head.weight" else bits)
    expected = dense_logits(config, stands_for, tokens)
    logits = Runner(config, weights, dtype=dtype, engine=engine, weights=f"int{bits}").run(tokens, [40, 1])
    error = np.sqrt(((logits - expected) ** 2).mean()) / expected.std()
    assert error < (1e-5 if dtype == "float32" else 0.03)


@pytest.mark.parametrize("weights_format", ["native", "int8", "int4"])
@pytest.mark.parametrize("seed", range(4))
def test_one_row_and_many_agree_bit_for_bit_in_any_shape(seed: int, weights_format: str) -> None:
    """Few rows, many rows and chunks go through different kernels, over sizes that fill no group and no panel."""
    rng = np.random.default_rng(seed)
    heads = int(rng.integers(1, 4))
    config = TinyConfig(
        num_heads=heads * 2,
        num_kv_heads=heads,
        head_dim=int(rng.choice([16, 48, 80])),
        hidden_size=int(rng.integers(5, 40)) * 4,
        intermediate_size=int(rng.integers(3, 200)),
        vocab_size=int(rng.integers(20, 150)),
        mlp_bias=bool(seed % 2),
    )
    weights = make_weights(config, seed)
    # Outliers and tiny values in one group of activations.
    for layer in range(config.num_layers):
        norm = weights[f"model.layers.{layer}.post_attention_layernorm.weight"]
        norm *= round_to_bf16(2.0 ** rng.integers(-18, 7, norm.shape))
    tokens = random_tokens(config, 45, seed)

    def logits(chunks: list[int]) -> np.ndarray:
        return Runner(config, weights, dtype="bfloat16", weights=weights_format).run(tokens, chunks)

    one_by_one = logits([1])
    assert np.isfinite(one_by_one).all()
    for chunks in ([45], [2], [3], [7, 8, 9, 16, 5], [17, 28]):
        assert np.array_equal(logits(list(chunks)), one_by_one), chunks


@pytest.mark.parametrize("weights_format", ["int8", "int4"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_of_a_group_stay_exact(sign: int, weights_format: str) -> None:
    """Every activation and every weight at the end of its range: the sum that comes closest to 24 bits."""
    config = replace(SHAPES["llama"], tie_embeddings=False, vocab_size=32)
    weights = make_weights(config)
    norm = np.full(config.hidden_size, 255 / 128, dtype=np.float32)  # all eight bits of a bfloat16 set
    norm[1::GROUP] = 129 / (2048 if weights_format == "int8" else 8192)  # and one that needs the last bit kept
    weights["model.embed_tokens.weight"] = np.full((32, config.hidden_size), 1, dtype=np.float32)
    for name, value in weights.items():
        if value.ndim == 2 and name != "model.embed_tokens.weight":
            weights[name] = np.ones_like(value)
            weights[name][:, ::GROUP] = weights_format == "int8"  # int4: a minimum of 0, the rest at its end
        elif name.endswith("norm.weight"):
            weights[name] = norm
    head = weights["lm_head.weight"] = sign * weights["lm_head.weight"]
    runner = Runner(config, weights, dtype="bfloat16", weights=weights_format)
    many = runner.run([0] * 20, [20])
    one = Runner(config, weights, dtype="bfloat16", weights=weights_format).run([0] * 20, [1])
    assert np.array_equal(many, one)
    scale = np.float32(np.float16(np.float32(1) / 127)) * 127
    assert np.allclose(many, (head @ norm)[None] * scale, rtol=1e-3)


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 300])
def test_logits_of_chosen_rows_only(rows: int) -> None:
    config = SHAPES["llama"]
    runner = Runner(config, make_weights(config), dtype="bfloat16", num_threads=2)
    tokens = random_tokens(config, rows)
    every = runner.run(tokens, [rows])
    table = np.array([runner.blocks["a"]], dtype=np.int32)
    chosen = np.array([rows - 1, 0], dtype=np.int64)
    step = Step(np.array(tokens), np.arange(rows), np.array([0, rows]), table, chosen)
    logits = runner.model.forward_buffer(step, runner.pool, runner.num_blocks)  # type: ignore[arg-type]
    assert np.array_equal(logits, every[chosen])
    none = replace(step, sample_rows=np.zeros(0, dtype=np.int32))
    assert runner.model.forward_buffer(none, runner.pool, runner.num_blocks).shape == (0, config.vocab_size)  # type: ignore[arg-type]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.random.default_rng(1).normal(size=(5, 1000)).astype(np.float32)
    logits[1, [70, 999]] = 50
    logits[2] = 0
    logits[3, 999] = 60
    assert native.greedy(logits).tolist() == logits.argmax(1).tolist()
    assert native.greedy(np.zeros((0, 10), dtype=np.float32)).shape == (0,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token_ids", np.array([0, 211])),
        ("token_ids", np.array([0, -1])),
        ("token_ids", np.array([0.0, 1.0])),
        ("positions", np.array([0, 16])),
        ("positions", np.array([15, 16])),
        ("positions", np.array([-1, 0])),
        ("positions", np.array([0])),
        ("seq_starts", np.array([0, 3])),
        ("seq_starts", np.array([1, 2])),
        ("seq_starts", np.array([0, 0, 2])),
        ("block_table", np.array([[128]])),
        ("block_table", np.array([[-1]])),
        ("block_table", np.array([0])),
        ("block_table", np.array([[2**40]])),
        ("sample_rows", np.array([2])),
        ("sample_rows", np.array([-1])),
    ],
)
def test_wrong_steps_raise(field: str, value: np.ndarray) -> None:
    config = SHAPES["llama"]
    runner = Runner(config, make_weights(config))
    good = Step(np.array([1, 2]), np.array([0, 1]), np.array([0, 2]), np.array([[0]]), np.array([1]))
    before = runner.pool.copy()
    with pytest.raises(LocalError) as error:
        runner.model.forward_buffer(replace(good, **{field: value}), runner.pool, runner.num_blocks)  # type: ignore[arg-type]
    assert error.value.field in (field, "block_table", "positions")
    assert np.array_equal(before, runner.pool)
    with pytest.raises(LocalError):
        runner.model.forward_buffer(good, runner.pool[:-1], runner.num_blocks)  # type: ignore[arg-type]


def test_wrong_models_raise() -> None:
    config = SHAPES["llama"]
    weights = make_weights(config)
    layout = KVLayout(2, 2, 64, 16, "float32")
    for bad_layout in (
        KVLayout(2, 2, 64, 12, "float32"),
        KVLayout(3, 2, 64, 16, "float32"),
        KVLayout(2, 2, 64, 16, "float16"),
        KVLayout(2, 2, 64, 16, "float32", "NHD"),
    ):
        with pytest.raises(LocalError):
            native.NativeModel(config, weights, bad_layout, dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(LocalError, match="no tensor"):
        native.NativeModel(config, {}, layout, dtype="float32")  # type: ignore[arg-type]
    wrong = weights | {"model.norm.weight": np.ones(7, dtype=np.float32)}
    with pytest.raises(LocalError, match="shape"):
        native.NativeModel(config, wrong, layout, dtype="float32")  # type: ignore[arg-type]
    for options in (
        {"dtype": "float16"},
        {"dtype": "float32", "weights": "int2"},
        {"dtype": "float32", "engine": "amx"},
    ):
        with pytest.raises(LocalError):
            native.NativeModel(config, weights, layout, **options)  # type: ignore[arg-type]
    model = native.NativeModel(config, weights, layout, dtype="float32")  # type: ignore[arg-type]
    model.close()
    good = Step(np.array([1]), np.array([0]), np.array([0, 1]), np.array([[0]]), np.array([0]))
    with pytest.raises(LocalError, match="closed"):
        model.forward_buffer(good, np.zeros(layout.pool_bytes(1), dtype=np.uint8), 1)  # type: ignore[arg-type]
