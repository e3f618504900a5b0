"""From a model directory to something that can run: configuration, weights, kernels, pool, tokenizer.

The one place that chooses between the native kernels and plain torch, and says why.
Knows nothing about requests or peers.
"""

from __future__ import annotations

import importlib.util
import logging
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from kvbaton.engine.model_config import ModelConfig, config_file
from kvbaton.engine.pool import KVPool
from kvbaton.engine.shares import shares
from kvbaton.engine.tokenizer import Tokenizer, definition_path
from kvbaton.engine.weights import ModelWeights, default_model_dir, load_model_dir, weight_files
from kvbaton.kv.compat import fingerprint_of
from kvbaton.kv.layout import DTYPE_BYTES, KVLayout
from kvbaton.kv.rank_pools import RankPools, rank_layout
from kvbaton.kv.shared_pool import SharedPool, segment_name
from kvbaton.types import Fingerprint, LocalError

if TYPE_CHECKING:
    from kvbaton.engine.model import Model
    from kvbaton.engine.rank_group import RankGroup

log = logging.getLogger(__name__)

COMPUTE_DTYPES = ("float32", "bfloat16")
WEIGHT_FORMATS = ("native", "int8", "int4")
Shared = Literal["", "wanted", "needed"]
BACKENDS = ("auto", "native", "torch")
MIB = 1024 * 1024


@dataclass(frozen=True)
class LoadOptions:
    """What the user may choose about a model. ``None`` means: decide from the model or the machine."""

    model_dir: Path | None = None  # None: the small instruct model that ships as a package
    dtype: str = "bfloat16"  # of activations and unquantised weights
    kv_dtype: str = "auto"  # auto: the compute dtype
    weights: str = "native"  # or weight-only int8, int4
    block_size: int = 16
    kv_order: Literal["HND", "NHD"] = "HND"  # tokens of a head side by side, or heads of a token: that runs on torch
    kv_memory_bytes: int = 1024 * MIB
    num_kv_blocks: int | None = None  # overrides kv_memory_bytes
    max_context: int | None = None  # None: what the model's config says
    backend: str = "auto"
    device: str = "auto"  # auto: cuda when the machine has one, unless the native (CPU) backend was asked for
    num_threads: int = 1  # of each rank
    tp: int = 1  # ranks that share the heads and the MLP, each a process
    tp_deadline_s: float = 60.0  # how long a rank may keep the others waiting within a step

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("dtype", self.dtype, COMPUTE_DTYPES),
            ("kv_dtype", self.kv_dtype, ("auto", *DTYPE_BYTES)),
            ("kv_order", self.kv_order, ("HND", "NHD")),
            ("weights", self.weights, WEIGHT_FORMATS),
            ("backend", self.backend, BACKENDS),
        ):
            if value not in allowed:
                raise LocalError(f"{name} {value!r} is unknown", field=name, fix=f"use one of {', '.join(allowed)}")
        if self.block_size < 8 or self.block_size % 8:
            raise LocalError(f"block_size must be a multiple of 8, got {self.block_size}", field="block_size")
        for name in ("num_threads", "tp"):
            if getattr(self, name) < 1:
                raise LocalError(f"{name} must be at least 1, got {getattr(self, name)}", field=name)
        if self.tp_deadline_s <= 0:
            raise LocalError(f"tp_deadline_s must be positive, got {self.tp_deadline_s}", field="tp_deadline_s")


@dataclass(frozen=True)
class LoadedModel:
    config: ModelConfig
    model: Model
    pool: KVPool
    tokenizer: Tokenizer
    fingerprint: Fingerprint
    model_id: str
    max_context: int
    backend: str  # what runs, in words: "native bfloat16 (amx)", "torch float32 on cpu"
    ranks: RankGroup | None = None  # the other processes that compute, if there are any


def load(options: LoadOptions, incarnation: str = "", shared: Shared = "") -> LoadedModel:
    """Load everything. ``shared`` puts the KV pool in a named segment that a peer on this host can map: ``needed``
    fails where shared memory is short, ``wanted`` then takes memory of its own."""
    model_dir = options.model_dir or default_model_dir()
    config, weights = load_model_dir(model_dir)
    tokenizer = Tokenizer.load(model_dir)
    layout = KVLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=options.block_size,
        dtype=options.dtype if options.kv_dtype == "auto" else options.kv_dtype,
        order=options.kv_order,
    )
    max_context = min(options.max_context or config.max_context, config.max_context)
    ranks: RankGroup | None = None
    fingerprint = fingerprint_of(layout, config.revision, config.rope_text)
    if options.tp == 1:
        num_blocks = options.num_kv_blocks or max(1, options.kv_memory_bytes // layout.block_bytes)
        model, backend, device = _make_model(options, config, weights, layout)
        pool = KVPool(_make_pool(layout, num_blocks, incarnation, shared), device=device)
    else:
        model, pool, ranks, backend = _start_ranks(options, model_dir, (config, weights), layout, incarnation, shared)
        fingerprint = msgspec.structs.replace(fingerprint, tp_size=options.tp)
        num_blocks = pool.num_blocks
    log.info("model %s: %s, %d KV blocks of %d tokens", model_dir.name, backend, num_blocks, options.block_size)
    return LoadedModel(
        config=config,
        model=model,
        pool=pool,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        model_id=model_dir.name,
        max_context=max_context,
        backend=backend,
        ranks=ranks,
    )


def check_ranks(options: LoadOptions, config: ModelConfig) -> None:
    """Refuse what cannot be shared by ranks, before anything is started."""
    shares(config, options.tp)
    if options.tp == 1:
        return
    fix = "leave it out, or use one rank"
    if options.backend == "native":
        raise LocalError("several ranks run on torch, not on the native kernels", field="backend", fix=fix)
    if options.weights != "native":
        raise LocalError(
            f"weights {options.weights!r} need the native kernels, and so one rank", field="weights", fix=fix
        )
    if options.device not in ("auto", "cpu"):
        raise LocalError(f"several ranks run on the CPU, not on {options.device}", field="device", fix=fix)


def _start_ranks(
    options: LoadOptions,
    model_dir: Path,
    model: tuple[ModelConfig, ModelWeights],
    layout: KVLayout,
    incarnation: str,
    shared: Shared,
) -> tuple[Model, KVPool, RankGroup, str]:
    """Every rank's pool is a named segment, for its process has to find it; whether peers may, ``shared`` says."""
    check_ranks(options, model[0])
    _require_torch("several ranks run on torch")
    from kvbaton.engine.tensor_parallel import RankOptions, load_ranks

    heads = [share.kv_heads for share in shares(model[0], options.tp)]
    block_bytes = sum(rank_layout(layout, held).block_bytes for held in heads)
    num_blocks = options.num_kv_blocks or max(1, options.kv_memory_bytes // block_bytes)
    pools = RankPools.create(layout, num_blocks, heads, incarnation or secrets.token_hex(8), lent=bool(shared))
    try:
        rank_options = RankOptions(options.tp, options.tp_deadline_s, options.dtype, options.num_threads)
        loaded, pool = load_ranks(rank_options, model_dir, model, pools)
    except BaseException:
        pools.unlink()
        pools.close()
        raise
    return loaded, pool, loaded.ranks, f"torch {options.dtype} on cpu, {options.tp} ranks"


def _make_pool(layout: KVLayout, num_blocks: int, incarnation: str, shared: Shared) -> SharedPool:
    if shared:
        try:
            return SharedPool.create(layout, num_blocks, segment_name(incarnation), incarnation)
        except LocalError as error:
            if shared == "needed":
                raise
            log.warning("the KV pool is not in shared memory: %s", error)
    return SharedPool.create(layout, num_blocks, None, incarnation)


def check_model_dir(path: Path, embedded: bool = True) -> None:
    """Refuse what ``load`` would refuse, as far as it can be seen without reading the weights.

    Of a model for another engine (not ``embedded``) only what a router reads has to be there.
    """
    config_file(path)
    definition_path(path)
    if embedded:
        ModelConfig.from_dir(path)
        weight_files(path)


def _make_model(
    options: LoadOptions, config: ModelConfig, weights: ModelWeights, layout: KVLayout
) -> tuple[Model, str, str]:
    on_cuda = options.backend != "native" and _wants_cuda(options.device)
    reason: str | None = "torch was asked for" if options.backend == "torch" else "torch runs on the accelerator"
    if options.backend != "torch" and not on_cuda:
        from kvbaton.engine import native

        reason = native.available() or native.unsupported(config, layout)
        if reason is None:
            kernels = native.NativeModel(
                config, weights, layout, dtype=options.dtype, weights=options.weights, num_threads=options.num_threads
            )
            return kernels, f"native {options.dtype}, weights {options.weights}", "cpu"
        if options.backend == "native":
            raise LocalError(f"the native kernels cannot run: {reason}", field="backend", fix="use auto or torch")
    if options.weights != "native":
        raise LocalError(
            f"weights {options.weights!r} need the native kernels, and {reason}", field="weights", fix="use native"
        )
    if options.backend == "auto" and not on_cuda:
        log.warning("plain torch runs the model: %s", reason)
    return _make_torch_model(options, config, weights, layout, "cuda" if on_cuda else "cpu", reason)


def _wants_cuda(device: str) -> bool:
    """Whether torch should run on an accelerator; torch itself is asked only where the machine has one."""
    if device != "auto" or not Path("/dev/nvidia0").exists() or importlib.util.find_spec("torch") is None:
        return device.startswith("cuda")
    import torch

    return torch.cuda.is_available()


def _require_torch(reason: str | None) -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        fix = "install the extra: pip install 'kvbaton[engine]'"
        raise LocalError(f"{reason}, and torch is not installed", field="backend", fix=fix) from None


def _make_torch_model(
    options: LoadOptions, config: ModelConfig, weights: ModelWeights, layout: KVLayout, default: str, reason: str | None
) -> tuple[Model, str, str]:
    _require_torch(reason)
    import torch

    from kvbaton.engine.torch_model import TorchModel

    torch.set_num_threads(options.num_threads)
    device = default if options.device == "auto" else options.device
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # what torch raises depends on how it was built
        told = str(error).splitlines()[0]
        raise LocalError(f"device {device!r} cannot be used: {told}", field="device", fix="use cpu") from error
    return TorchModel(config, weights, layout, options.dtype, device), f"torch {options.dtype} on {device}", device
