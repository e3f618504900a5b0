"""How much a fleet carries at the gates, and which fleets are worth trying.

Goodput is found by bisection over simulated rates: the highest rate at which the wanted share of requests meets both
limits, the first third of each run left out as warm-up. Phase goodputs of single workers size the pools in closed
form; fleets chosen that way are then simulated whole. Both arms go through the same functions.

Knows nothing about verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import msgspec
import numpy as np

from kvbaton.plan.closed_forms import workers_for
from kvbaton.plan.kv_math import Sharding
from kvbaton.plan.link import LinkModel
from kvbaton.plan.scenario import Engine, Scenario, Slo
from kvbaton.plan.sim import simulate
from kvbaton.plan.sim_result import SimResult
from kvbaton.plan.sim_spec import FleetSpec, PoolSpec, WorkerSpec
from kvbaton.plan.trace_stats import describe
from kvbaton.plan.workload import Trace
from kvbaton.router.policy import PolicyConfig
from kvbaton.types import LocalError

Progress = Callable[[str], None]
DEFAULT_BLOCK = 64  # tokens; coarse blocks make simulation fast and waste half a block a sequence
STEADY_LIVES = 2.5  # a run must last so many request lifetimes
MOST_REQUESTS = 12_000
ON_DECODE_GPUS = "colocated on decode GPUs"
INSTANT = LinkModel(0.0, 1e18, "no transfer")


class Layout(msgspec.Struct, frozen=True):
    """A fleet in words: what a search varies."""

    prefill: int  # workers; 0 means colocated
    decode: int  # decode or colocated workers
    prefill_sharding: Sharding
    decode_sharding: Sharding
    prefill_budget: int
    decode_budget: int
    threshold: int = 0
    cache_gb: float = 0.0  # host memory for the cache, for each GPU of those workers that compute prompts
    decode_gpus: bool = False  # a single pool on the kind of GPU that the decode pool of a split has

    @property
    def split(self) -> bool:
        return self.prefill > 0

    @property
    def num_gpus(self) -> int:
        return self.prefill * self.prefill_sharding.num_gpus + self.decode * self.decode_sharding.num_gpus

    @property
    def label(self) -> str:
        tier = f", {self.cache_gb:g} GB host cache a GPU" if self.cache_gb else ""
        if not self.split:
            where = " on decode GPUs" if self.decode_gpus else ""
            return f"{self.decode} colocated x {self.decode_sharding.label}{where}, budget {self.decode_budget:,}{tier}"
        return (
            f"{self.prefill} prefill x {self.prefill_sharding.label}, budget {self.prefill_budget:,}{tier} + "
            f"{self.decode} decode x {self.decode_sharding.label}, threshold {self.threshold:,}"
            + (f", budget {self.decode_budget:,}" if self.threshold else "")
        )


class Sizer:
    """Simulates layouts of one scenario; counts and reports what it does."""

    def __init__(
        self, scenario: Scenario, trace: Trace, engine: Engine, progress: Progress, wanted: float | None = None
    ) -> None:
        """``wanted``: the rate to carry, headroom included; None: the scenario's, if it has one."""
        self.scenario = scenario
        rate = scenario.workload.rate
        self.wanted = wanted if wanted is not None or rate is None else rate * (1.0 + headroom(trace, rate))
        self.trace = trace
        self.engine = engine
        self.num_simulations = 0
        self._progress = progress
        self._goodputs: dict[tuple, float] = {}
        self.tried: dict[Layout, float] = {}  # whole fleets, with their goodput
        self.most = min(len(trace.requests), MOST_REQUESTS)
        chosen = scenario.engine.block_size
        self.block_size = chosen or trace.block_tokens or DEFAULT_BLOCK

    def with_engine(self, engine: Engine, trace: Trace | None = None) -> Sizer:
        return Sizer(self.scenario, trace or self.trace, engine, self._progress, self.wanted)

    # -- fleets ----------------------------------------------------------------------------------------------------

    def fleet(self, layout: Layout) -> FleetSpec:
        if not layout.split:
            both = self._worker(layout.decode_sharding, layout.decode_budget, layout.decode_gpus, layout.cache_gb)
            return FleetSpec((PoolSpec("both", layout.decode, both),), admission_s=self.engine.admission_s)
        decode = self._worker(layout.decode_sharding, layout.decode_budget, True)
        prefill = self._worker(layout.prefill_sharding, layout.prefill_budget, False, layout.cache_gb)
        return FleetSpec(
            (PoolSpec("prefill", layout.prefill, prefill), PoolSpec("decode", layout.decode, decode)),
            self.engine.handoff(),
            PolicyConfig(threshold_tokens=layout.threshold),
            admission_s=self.engine.admission_s,
        )

    def _worker(self, sharding: Sharding, budget: int, decode: bool, tier_gb: float = 0.0) -> WorkerSpec:
        return self.engine.worker(sharding, budget, self.block_size, decode, tier_gb)

    def _sample(self, workers: int) -> Trace:
        return self.trace.head(min(len(self.trace.requests), self.scenario.workload.requests * workers, 4_000))

    def run(self, layout: Layout, rate: float) -> SimResult:
        self.num_simulations += 1
        return simulate(self.fleet(layout), self._sample(layout.prefill + layout.decode).at_rate(rate))

    def _carries(self, fleet: FleetSpec, trace: Trace, guess: float) -> float:
        """Goodput; of an offline batch the rate at which it is worked off when all of it is there at once."""
        if not self.scenario.workload.online:
            self.num_simulations += 1
            result = simulate(fleet, trace.at_rate(1e6))
            return result.num_requests / result.span_s if result.span_s else 0.0
        return _bisect(lambda rate: self._holds(fleet, trace, rate), guess, self.scenario.search.precision)

    def _holds(self, fleet: FleetSpec, trace: Trace, rate: float) -> bool:
        """Whether the fleet meets the limits at that rate, seen over long enough to be a steady state.

        A burst shorter than the requests live fills an empty fleet and proves nothing, so the sample grows with it.
        """
        slo, size = self.scenario.slo, len(trace.requests)
        while True:
            self.num_simulations += 1
            result = simulate(fleet, trace.at_rate(rate))
            if settled_attainment(result, slo) < slo.attainment:
                return False
            wanted = int(rate * STEADY_LIVES * result.e2e.mean)
            if wanted <= size * 1.1:
                return True
            if size >= self.most:  # more requests at once than the whole sample: no rate it could be shown to hold
                return False
            size = min(self.most, int(wanted * 1.2))
            trace = self._longer(trace, size)

    def _longer(self, trace: Trace, size: int) -> Trace:
        """More of the scenario's requests, with the output lengths of the phase at hand."""
        more = self.trace.head(size).requests
        if all(each.output_tokens == 1 for each in trace.requests):
            more = tuple(msgspec.structs.replace(each, output_tokens=1) for each in more)
        return msgspec.structs.replace(trace, requests=more)

    def goodput(self, layout: Layout, guess: float) -> float:
        """Requests a second of the whole fleet at the gates."""
        found = self._carries(self.fleet(layout), self._sample(layout.prefill + layout.decode), guess)
        self._progress(f"{layout.label}: {found:.2f} requests/s")
        self.tried[layout] = found
        return found

    def goodput_with(self, layout: Layout, guess: float, change: Callable[[FleetSpec], FleetSpec]) -> float:
        """The same of a changed fleet; it is not one of those the search may choose."""
        return self._carries(change(self.fleet(layout)), self._sample(layout.prefill + layout.decode), guess)

    @property
    def tried_alone(self) -> tuple[tuple[str, Sharding, int], ...]:
        """(phase, parallelism, chunk budget) of the single workers that were sized."""
        return tuple(self._goodputs)

    # -- phases ----------------------------------------------------------------------------------------------------

    def phase_goodput(self, phase: str, sharding: Sharding, budget: int) -> float:
        """Goodput of one worker that does one phase, or both; 0 when the model does not fit."""
        key = (phase, sharding, budget)
        if key not in self._goodputs:
            try:
                self._goodputs[key] = self._phase_goodput(phase, sharding, budget)
            except LocalError:
                self._goodputs[key] = 0.0
            self._progress(f"{phase} worker {sharding.label}, budget {budget:,}: {self._goodputs[key]:.2f} requests/s")
        return self._goodputs[key]

    def _phase_goodput(self, phase: str, sharding: Sharding, budget: int) -> float:
        worker = self._worker(sharding, budget, phase in ("decode", ON_DECODE_GPUS))
        trace = self._sample(1)
        if phase == "prefill":
            # The first token only; the time a token costs later is not this worker's business.
            requests = tuple(msgspec.structs.replace(each, output_tokens=1) for each in trace.requests)
            trace = msgspec.structs.replace(trace, requests=requests)
            fleet = FleetSpec((PoolSpec("both", 1, worker),), admission_s=self.engine.admission_s)
        elif phase == "decode":
            # Prompts arrive computed: an ideal prefill pool and link in front of the one decode worker.
            ideal = msgspec.structs.replace(
                worker.step, fixed_s=1e-9, per_token_s=0.0, per_pair_s=0.0, per_sequence_s=0.0, per_context_s=0.0,
                expert_read_s=0.0, per_chunk_s=0.0,
            )  # fmt: skip
            source = msgspec.structs.replace(worker, step=ideal, num_blocks=1 << 20, max_batch_tokens=1 << 20)
            handoff = msgspec.structs.replace(self.engine.handoff(), link=INSTANT, shared_link=None, control_s=0.0)
            fleet = FleetSpec((PoolSpec("prefill", 1, source), PoolSpec("decode", 1, worker)), handoff, PolicyConfig(0))
        else:
            fleet = FleetSpec((PoolSpec("both", 1, worker),), admission_s=self.engine.admission_s)

        return self._carries(fleet, trace, self._guess(worker, phase))

    def _guess(self, worker: WorkerSpec, phase: str) -> float:
        """A first rate from mean lengths."""
        requests = self._sample(1).requests
        prompt = sum(each.prompt_tokens for each in requests) / len(requests)
        output = sum(each.output_tokens for each in requests) / len(requests)
        prefill_s = worker.step.prefill_s(int(prompt), budget=worker.max_batch_tokens)
        batch = min(worker.max_running, worker.num_blocks * worker.block_size / (prompt + output))
        decode_s = output * worker.step.tpot_s(max(1, int(batch)), prompt + output / 2) / max(1.0, batch)
        busy_s = {"prefill": prefill_s, "decode": decode_s}.get(phase, prefill_s + decode_s)
        return 0.7 / busy_s

    # -- candidates ------------------------------------------------------------------------------------------------

    def shardings(self, decode: bool = False) -> list[Sharding]:
        if self.engine.profile is not None:
            return [Sharding()]
        search = self.scenario.search
        tps = search.decode_tp if decode and search.decode_tp else search.tp
        pps = search.decode_pp if decode and search.decode_pp else search.pp
        most = self.scenario.hardware.max_gpus
        return [Sharding(tp=tp, pp=pp) for tp, pp in product(tps, pps) if tp * pp <= most]

    def tiers_gb(self) -> tuple[float, ...]:
        """Cache tiers worth trying besides none: without block hashes in the trace nothing could be found in them."""
        return tuple(size for size in self.scenario.search.cache_tiers_gb if size > 0 and self.trace.block_tokens)

    def colocated_layouts(self) -> Iterator[tuple[Layout, float]]:
        """(layout, estimated goodput): the largest fleets the budget allows, or with a rate wanted those it takes."""
        most, hardware = self.scenario.hardware.max_gpus, self.scenario.hardware
        phases = ["colocated", ON_DECODE_GPUS] if hardware.decode_gpu not in (None, hardware.gpu) else ["colocated"]
        for phase, sharding, budget in product(phases, self.shardings(), self.scenario.search.chunk_budgets):
            rate = self.phase_goodput(phase, sharding, budget)
            count = most // self.gpus(sharding)
            if rate > 0 and self.wanted is not None:
                count = min(count, workers_for(self.wanted, rate))
            if rate > 0 and count:
                there = phase == ON_DECODE_GPUS
                yield Layout(0, count, sharding, sharding, budget, budget, decode_gpus=there), rate * count

    def fitting_singles(self) -> Iterator[Layout]:
        """Single pools of all GPUs, whatever they carry."""
        for sharding, budget in product(self.shardings(), self.scenario.search.chunk_budgets):
            try:
                self._worker(sharding, budget, False)
            except LocalError:
                continue
            count = self.scenario.hardware.max_gpus // self.gpus(sharding)
            yield Layout(0, count, sharding, sharding, budget, budget)

    def split_layouts(self) -> Iterator[tuple[Layout, float]]:
        """(layout, estimated goodput) for every pair of pools that fits the budget.

        With a rate wanted: n = ceil(rate / g_p) and m = ceil(rate / g_d) where the budget has room for them.
        """
        most, search = self.scenario.hardware.max_gpus, self.scenario.search
        last = max(search.chunk_budgets)
        for sharding, budget, other in product(self.shardings(), search.chunk_budgets, self.shardings(decode=True)):
            prefill = self.phase_goodput("prefill", sharding, budget)
            decode = self.phase_goodput("decode", other, last)
            if prefill <= 0 or decode <= 0:
                continue
            counts = range(1, most // self.gpus(sharding) + 1)
            if self.wanted is not None:
                count, useful = workers_for(self.wanted, prefill), workers_for(self.wanted, decode)
                if count * self.gpus(sharding) + useful * self.gpus(other) <= most:
                    counts = range(count, count + 1)
            for count in counts:
                left = (most - count * self.gpus(sharding)) // self.gpus(other)
                if left < 1:
                    continue
                useful = min(left, workers_for(min(count * prefill, self.wanted or count * prefill), decode))
                yield Layout(count, useful, sharding, other, budget, last), min(count * prefill, useful * decode)

    def gpus(self, sharding: Sharding) -> int:
        """GPUs (or core sets) of one worker."""
        return self.engine.profile.worker.num_gpus if self.engine.profile else sharding.num_gpus

    def holds(self, layout: Layout, rate: float, trace: Trace) -> bool:
        """Whether the fleet meets the limits at that rate with those requests."""
        sample = trace.head(min(len(trace.requests), self.scenario.workload.requests, 4_000))
        return self._holds(self.fleet(layout), sample, rate)

    def layout_gpus(self, layout: Layout) -> int:
        return layout.prefill * self.gpus(layout.prefill_sharding) + layout.decode * self.gpus(layout.decode_sharding)


def headroom(trace: Trace, rate_per_s: float, window_s: float = 60.0) -> float:
    """Share kept free so that nine minutes of ten, drawn at the trace's burstiness, stay below capacity."""
    burstiness = max(describe(trace).gap_cv, 0.1)
    return float(min(0.5, 1.28 * burstiness / np.sqrt(max(1.0, rate_per_s * window_s))))


def settled_attainment(result: SimResult, slo: Slo) -> float:
    """Share of the last two thirds of the requests that met both limits; lost requests count as missed."""
    skipped = result.num_requests // 3
    ttft_s, tpot_s = slo.ttft_ms / 1e3, slo.tpot_ms / 1e3
    paired = result.paired[skipped:]
    good = sum(ttft <= ttft_s and tpot <= tpot_s for ttft, tpot in paired)
    counted = result.num_requests - skipped
    return good / counted if counted else 0.0


def _bisect(holds: Callable[[float], bool], guess: float, precision: float) -> float:
    """The highest rate that holds, to ``precision`` of itself; 0 when even a hundredth of the guess does not."""
    low, high = 0.0, guess
    while holds(high):
        low, high = high, high * 1.6
        if high > guess * 200:
            return low
    if low == 0.0:
        trial = guess / 2
        while not holds(trial):
            high, trial = trial, trial / 3
            if trial < guess / 100:
                return 0.0
        low = trial
    while high - low > precision * low:
        middle = (low * high) ** 0.5
        if holds(middle):
            low = middle
        else:
            high = middle
    return low
