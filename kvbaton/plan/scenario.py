"""One TOML file that says what is to be decided: workload, SLO, model, hardware, engine, search.

Unknown keys and impossible values are errors that name the key. Paths are relative to the file. ``Engine`` turns the
scenario into workers for any parallelism and chunk budget; both arms use the same one.

Knows nothing about how fleets are compared.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import msgspec

from kvbaton.plan import hardware, kernel_tables, measured_rows
from kvbaton.plan.hardware import FabricNumbers, GpuNumbers
from kvbaton.plan.kv_math import KVCost, Sharding, kv_format
from kvbaton.plan.link import LinkModel, from_fabric
from kvbaton.plan.measured_rows import RowFit
from kvbaton.plan.model_presets import preset
from kvbaton.plan.model_shape import ModelShape, read_model
from kvbaton.plan.model_weights import count_weights
from kvbaton.plan.profile_file import ProfileFile, read_profile
from kvbaton.plan.sim_spec import HandoffSpec, WorkerSpec
from kvbaton.plan.step_time import Efficiency, StepModel, kv_budget_bytes, roofline
from kvbaton.plan.workload import Trace, TraceRequest, read_trace, synthetic
from kvbaton.types import LocalError

Count = Annotated[int, msgspec.Meta(ge=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Part = Annotated[float, msgspec.Meta(ge=0, lt=1)]  # of a whole, and never all of it
Efficient = Annotated[float, msgspec.Meta(gt=0, le=1)]
Counts = Annotated[tuple[Count, ...], msgspec.Meta(min_length=1)]


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    trace: str | None = None
    prompt_tokens: Count | None = None  # of a synthetic workload
    output_tokens: Count | None = None
    spread: Part = 0.5  # lengths lie within this share of their mean
    shared_prefix: Part = 0.0  # share of each synthetic prompt that is one of a few common prefixes
    rate: Positive | None = None  # requests a second to serve; None: as much as the GPUs carry
    seed: int = 0
    requests: Count = 400  # simulated for each worker of a fleet, at most what the trace has
    online: bool = True  # False: a batch; nobody waits for first tokens


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ttft_ms: Positive = 2000.0
    tpot_ms: Positive = 100.0
    attainment: float = 0.9  # share of requests that must meet both


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    preset: str | None = None
    config: str | None = None  # a config.json
    weight_bits: Annotated[int, msgspec.Meta(ge=1, le=32)] = 16
    kv_dtype: str = "auto"
    num_params: Count | None = None
    active_params: Count | None = None


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu: str | GpuNumbers = "H100-SXM"
    max_gpus: Count = 16
    usd_per_gpu_hour: Positive = 2.0
    decode_gpu: str | GpuNumbers | None = None  # another kind for the decode pool
    decode_usd_per_gpu_hour: Positive | None = None
    fabric: str | FabricNumbers = "400G"
    host_gb_per_s: Positive = 25.0  # from host memory to one GPU: about 0.8 of PCIe 4 x16
    usd_per_host_gb_hour: NotNegative = 0.0  # of cache tiers; 0: the memory comes with the GPUs
    shared_link: bool = False  # one link for all workers, not one each
    layer_wise: bool = True


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    profile: str | None = None  # measured constants instead of a roofline
    rows: str | None = None  # a table of measured TTFT and TPOT by concurrency, that the roofline is fitted to
    tables: str | None = None  # measured kernel times of an engine ("vllm", "vllm 0.24.0") instead of a roofline
    engine: str = ""  # what the plan is for; compared with the profile
    engine_version: str = ""
    mfu: Efficient | None = None
    mbu: Efficient | None = None
    fixed_ms: NotNegative | None = None
    block_size: Count | None = None
    max_running: Count = 256
    prefix_caching: bool = True
    admission_ms: NotNegative = 2.0
    control_ms: NotNegative = 0.5
    uncertainty: NotNegative = 0.15  # of step and link constants, one at a time, for both arms alike


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tp: Counts = (1, 2, 4, 8)
    decode_tp: Counts | None = None  # of the decode pool; None: as tp
    pp: Counts = (1,)
    decode_pp: Counts | None = None
    chunk_budgets: Counts = (512, 2048, 8192)
    # Uncached tokens below which a prompt stays where it decodes.
    thresholds: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = (0, 512, 2048)
    cache_tiers_gb: tuple[NotNegative, ...] = (0.0, 128.0)  # host memory a GPU that prefills keeps cache in
    verify: Count = 4  # fleets of each arm that are simulated
    precision: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.05  # of goodput
    sensitivity: bool = True
    margin: NotNegative = 0.10  # split must carry this much more per dollar to be worth its parts


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    workload: Workload
    name: str = "scenario"
    slo: Slo = Slo()
    model: Model = Model()
    hardware: Hardware = Hardware()
    engine: EngineOptions = EngineOptions()
    search: Search = Search()


def load(path: str | Path) -> Scenario:
    """Read and check a scenario file."""
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise LocalError(f"cannot read {path}: {error.strerror}", field="SCENARIO") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LocalError(f"{path} is not TOML: {error}", field="SCENARIO") from None
    return parse(raw, path.parent)


def parse(raw: dict, folder: Path = Path()) -> Scenario:
    try:
        scenario = msgspec.convert(raw, Scenario)
    except msgspec.ValidationError as error:
        raise LocalError(f"scenario: {error}", field=_field_of(str(error))) from None
    workload, model, engine = scenario.workload, scenario.model, scenario.engine
    if (workload.trace is None) == (workload.prompt_tokens is None or workload.output_tokens is None):
        raise LocalError("give a trace, or prompt_tokens and output_tokens", field="workload.trace")
    if engine.profile is None and (model.preset is None) == (model.config is None):
        raise LocalError("give a model preset or a config", field="model.preset", fix="or engine.profile")
    sources = {name: value for name in ("profile", "rows", "tables") if (value := getattr(engine, name)) is not None}
    if len(sources) > 1:
        raise LocalError(f"{' and '.join(sources)} are {len(sources)} sources of step times", field="engine",
                         fix="give one")  # fmt: skip
    if engine.rows is not None and (engine.mfu or engine.mbu or engine.fixed_ms):
        raise LocalError("mfu, mbu and fixed_ms come from the rows", field="engine.rows", fix="leave them out")
    if not 0 < scenario.slo.attainment < 1:
        raise LocalError("attainment lies between 0 and 1", field="slo.attainment")
    if workload.trace is not None and workload.shared_prefix:
        raise LocalError("what prompts of a trace share is the trace's to say", field="workload.shared_prefix",
                         fix="leave it out")  # fmt: skip
    rebased = {"trace": workload.trace, "config": model.config, "profile": engine.profile,
               "rows": engine.rows}  # fmt: skip
    rebased = {key: str(folder / value) if value else None for key, value in rebased.items()}
    return msgspec.structs.replace(
        scenario,
        workload=msgspec.structs.replace(workload, trace=rebased["trace"]),
        model=msgspec.structs.replace(model, config=rebased["config"]),
        engine=msgspec.structs.replace(engine, profile=rebased["profile"], rows=rebased["rows"]),
    )


def _field_of(text: str) -> str:
    """What msgspec's message is about: ... field `rat` - at `$.workload`, or Expected `int` - at `$.slo.ttft_ms`."""
    quoted = re.findall(r"`([^`]*)`", text)
    path = quoted[-1].removeprefix("$").removeprefix(".") if quoted and quoted[-1].startswith("$") else ""
    names = [path] if path else []
    if " field `" in text:
        names.append(quoted[0])
    return ".".join(names) or "SCENARIO"


def trace_of(scenario: Scenario) -> Trace:
    """The workload with arrivals and, where known, shared blocks. Everything by the scenario's seed."""
    workload, rng = scenario.workload, Random(scenario.workload.seed)
    if workload.trace is not None:
        trace = read_trace(workload.trace, rng)
        if not trace.has_arrivals:
            trace = trace.with_poisson_arrivals(workload.rate or 1.0, rng)
        return trace
    assert workload.prompt_tokens is not None and workload.output_tokens is not None
    count = max(12_000, workload.requests * 24)
    lengths = (workload.prompt_tokens, workload.output_tokens)
    trace = synthetic(count, workload.rate or 1.0, lengths, rng, workload.spread)
    return with_prefixes(trace, workload.shared_prefix, rng) if workload.shared_prefix > 0 else trace


def with_prefixes(trace: Trace, share: float, rng: Random, block_tokens: int = 64, families: int = 8) -> Trace:
    """Give each prompt one of ``families`` common prefixes that covers ``share`` of it."""
    requests = []
    for index, each in enumerate(trace.requests):
        blocks = -(-each.prompt_tokens // block_tokens)
        common = int(blocks * share)
        family = rng.randrange(families)
        ids = tuple(family << 20 | n if n < common else (index + families) << 20 | n for n in range(blocks))
        requests.append(TraceRequest(each.arrival_s, each.prompt_tokens, each.output_tokens, ids))
    return msgspec.structs.replace(trace, requests=tuple(requests), block_tokens=block_tokens)


Knob = Literal["none", "compute", "memory", "fixed", "link"]


class Engine:
    """Workers and hand-offs for a scenario, with one knob turned for both arms alike."""

    def __init__(self, scenario: Scenario, knob: Knob = "none", factor: float = 1.0, bandwidth: float = 1.0) -> None:
        self.scenario = scenario
        self.profile: ProfileFile | None = None
        self.warnings: tuple[str, ...] = ()
        self._fitted: RowFit | None = None
        self._turn = (knob, factor)
        self._bandwidth = bandwidth
        options = scenario.engine
        if options.profile is not None:
            self.profile = read_profile(options.profile)
            wanted = msgspec.structs.replace(
                self.profile.origin,
                engine=options.engine or self.profile.origin.engine,
                engine_version=options.engine_version or self.profile.origin.engine_version,
            )
            self.warnings = tuple(self.profile.mismatches(wanted))
            return
        self.shape = _shape(scenario.model)
        self.weights = count_weights(self.shape, scenario.model.num_params, scenario.model.active_params)
        if options.rows is not None:
            rows = measured_rows.read_rows(Path(options.rows))
            model = measured_rows.RowModel(self.shape, scenario.model.weight_bits, scenario.model.kv_dtype)
            fit = self._fitted = measured_rows.fit_rows(rows, model, f"fitted to {Path(options.rows).name}")
            said = f"{fit.num_rows} measured rows fitted to {fit.mean_relative_error:.1%} in the mean"
            left = f", {fit.num_flagged} with a full cache left out" if fit.num_flagged else ""
            self.warnings = (said + left,)
        if options.tables is not None:
            # At once: a search takes a worker that cannot be built for one that does not fit.
            for device in {scenario.hardware.gpu, scenario.hardware.decode_gpu or scenario.hardware.gpu}:
                self._tables(hardware.gpu(device)).check(self.shape, scenario.model.weight_bits)

    def with_knob(self, knob: Knob, factor: float) -> Engine:
        return Engine(self.scenario, knob, factor, self._bandwidth)

    def with_bandwidth(self, factor: float) -> Engine:
        return Engine(self.scenario, *self._turn, self._bandwidth * factor)

    @property
    def source(self) -> str:
        if self.profile:
            return self.profile.step.source
        hw = self.scenario.hardware
        gpus = dict.fromkeys(map(hardware.gpu, (hw.gpu, hw.decode_gpu or hw.gpu)))
        if self.scenario.engine.tables:
            names = ", ".join(each.name for each in gpus)
            return f"{kernel_tables.PACKAGE} tables of {self.scenario.engine.tables} on {names}"
        peaks = "; ".join(f"{found.name}: {found.source}" for found in gpus)
        how = "with round constants" if self._fitted is None else self._fitted.efficiency.source
        return f"roofline {how} over the peaks of {peaks}"

    @property
    def measured(self) -> bool:
        return self.profile is not None or self._fitted is not None

    def price(self, decode: bool = False) -> float:
        """Dollars for one GPU hour."""
        hw = self.scenario.hardware
        if decode and hw.decode_usd_per_gpu_hour is not None:
            return hw.decode_usd_per_gpu_hour
        return hw.usd_per_gpu_hour

    def cost(self, sharding: Sharding) -> KVCost:
        return KVCost(self.shape, kv_format(self.scenario.model.kv_dtype, self.shape), sharding)

    def worker(
        self, sharding: Sharding, budget: int, block_size: int, decode: bool = False, tier_gb: float = 0.0
    ) -> WorkerSpec:  # fmt: skip
        """One worker, with a cache tier of so many GB for each GPU; ``LocalError`` when the model does not fit it."""
        spec = self._worker(sharding, budget, block_size, decode)
        if tier_gb <= 0:
            return spec
        rank_bytes = self.profile.worker.token_bytes if self.profile else self.cost(sharding).token_bytes
        # Ranks of one worker keep their own parts of each token, and load them at the same time.
        return msgspec.structs.replace(
            spec,
            tier_blocks=int(tier_gb * 1e9 // (rank_bytes * block_size)),
            tier_s_per_token=rank_bytes / (self.scenario.hardware.host_gb_per_s * 1e9),
        )

    def _worker(self, sharding: Sharding, budget: int, block_size: int, decode: bool) -> WorkerSpec:
        options = self.scenario.engine
        if self.profile is not None:
            spec = self.profile.worker_spec(options.prefix_caching)
            budget = max(budget, spec.max_running)
            blocks = spec.num_blocks * spec.block_size // block_size
            return msgspec.structs.replace(
                spec, step=self._turned(spec.step), max_batch_tokens=budget, num_blocks=blocks, block_size=block_size
            )
        hw, model = self.scenario.hardware, self.scenario.model
        device = hardware.gpu(hw.decode_gpu if decode and hw.decode_gpu else hw.gpu)
        cost = self.cost(sharding)
        room = kv_budget_bytes(device, cost, self.weights, model.weight_bits) // (cost.token_bytes * block_size)
        if room < 1:
            raise LocalError("no room for a single KV block", field="search.tp", fix="more tensor parallel ranks")
        return WorkerSpec(
            step=self._turned(self._step(cost, device)),
            num_blocks=int(room),
            block_size=block_size,
            max_batch_tokens=max(budget, options.max_running),
            max_running=options.max_running,
            prefix_caching=options.prefix_caching,
            num_gpus=sharding.num_gpus,
        )

    def _step(self, cost: KVCost, device: hardware.Gpu) -> StepModel:
        options, bits = self.scenario.engine, self.scenario.model.weight_bits
        if options.tables is None:
            return roofline(cost, self.weights, device, self._efficiency(), bits)
        if cost.sharding.num_gpus != cost.sharding.tp:
            raise LocalError("kernel tables are read for tensor parallelism only", field="engine.tables")
        fit = kernel_tables.fit_tables(self._tables(device), self.shape, cost.sharding.tp, bits, cost.form.name)
        fixed_ms = kernel_tables.FIXED_MS if options.fixed_ms is None else options.fixed_ms
        return kernel_tables.with_overheads(fit.step, fixed_ms)

    def _tables(self, device: hardware.Gpu) -> kernel_tables.KernelTables:
        name, _, version = (self.scenario.engine.tables or "").partition(" ")
        return kernel_tables.tables_for(kernel_tables.Choice(device.name, name, version or None))

    def _efficiency(self) -> Efficiency:
        if self._fitted is not None:
            return self._fitted.efficiency
        options, default = self.scenario.engine, Efficiency()
        mbu = options.mbu or default.mbu
        return msgspec.structs.replace(
            default, mfu=options.mfu or default.mfu, mbu=mbu, mbu_kv=mbu, fixed_ms=options.fixed_ms or default.fixed_ms
        )

    def _turned(self, step: StepModel) -> StepModel:
        knob, factor = self._turn
        names = {
            "compute": ("per_token_s", "per_pair_s"),
            "memory": ("per_context_s", "expert_read_s"),
            "fixed": ("fixed_s", "per_sequence_s", "per_chunk_s"),
        }.get(knob, ())
        return msgspec.structs.replace(step, **{name: getattr(step, name) * factor for name in names})

    def handoff(self) -> HandoffSpec:
        hw, options = self.scenario.hardware, self.scenario.engine
        if self.profile is not None and self.profile.link is not None:
            link = self.profile.link
        else:
            link = from_fabric(hardware.fabric(hw.fabric))
        link = LinkModel(link.startup_s, link.bytes_per_s * self._bandwidth, link.source)
        if self._turn[0] == "link":
            link = link.slower(self._turn[1])
        if self.profile is not None:
            token_bytes, layers, fixed = self.profile.worker.token_bytes, self.profile.worker.num_layers, 0
            control_s = self.profile.control_s
        else:
            cost = self.cost(Sharding())
            token_bytes, layers, fixed = cost.token_bytes, self.shape.num_layers, cost.fixed_bytes
            control_s = options.control_ms / 1e3
        return HandoffSpec(
            link=link, token_bytes=token_bytes, num_layers=layers, fixed_bytes=fixed, layer_wise=hw.layer_wise,
            shared_link=link if hw.shared_link else None, control_s=control_s,
        )  # fmt: skip

    @property
    def admission_s(self) -> float:
        return self.profile.admission_s if self.profile else self.scenario.engine.admission_ms / 1e3


def _shape(model: Model) -> ModelShape:
    return preset(model.preset) if model.preset is not None else read_model(model.config or "")
