"""The simulator's word on the very runs that were measured: same requests, arrivals, topology, limits and policy.

Each run is simulated from a profile file (``kvbaton profile``) and held against what was measured of the same requests,
so the error is the simulator's and the profile's, not that of another workload. Nothing is fitted to the runs.

Requests that failed when measured are left out of the figures, but they load the simulated fleet. Knows nothing about
how runs are made. What workers, router and client on the same cores cost each other is the profile's, if it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvbaton.bench import stats
from kvbaton.bench.arms import Arm, flags_of
from kvbaton.bench.samples import RequestSample, Run
from kvbaton.bench.workload import LoadSpec, plan_work
from kvbaton.plan.link import LinkModel
from kvbaton.plan.profile_file import ProfileFile
from kvbaton.plan.sim import Simulation
from kvbaton.plan.sim_spec import FleetSpec, HandoffSpec, PoolSpec, WorkerSpec
from kvbaton.plan.workload import Trace, TraceRequest
from kvbaton.router.policy import PolicyConfig
from kvbaton.types import LocalError

FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "p50": lambda values: float(np.percentile(values, 50)),
    "p95": lambda values: float(np.percentile(values, 95)),
}
POLICIES = ("cost", "static", "least_load", "round_robin")


class Prediction(msgspec.Struct, frozen=True):
    """One figure of one arm, pooled over its runs at one rate."""

    arm: str
    rate_per_s: float
    name: str
    predicted_ms: float
    measured_ms: float
    error: float  # relative; positive: the simulator said too long
    runs_ms: tuple[float, ...] = ()  # measured, of each run: equal loads lie so far apart by themselves


class Simulated(msgspec.Struct, frozen=True):
    """What was simulated, for the report."""

    profile: str  # where the constants come from
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...]

    @property
    def worst_error(self) -> float:
        return max((abs(each.error) for each in self.predictions), default=0.0)


def fleet_spec(arm: Arm, profile: ProfileFile) -> tuple[FleetSpec, list[str]]:
    """The arm as the simulator knows fleets, and what had to be taken for granted."""
    flags, notes = flags_of(arm.up), []
    if not arm.up:
        notes.append(
            f"{arm.name} is an address: its workers are taken to be like the profile's, its policy the default"
        )
    worker = _worker(flags, profile)
    shared = profile.shared_cores if arm.up else None  # what runs elsewhere has cores of its own
    if arm.up and shared is None:
        notes.append("the profile does not say what workers on shared cores cost each other (kvbaton profile --fleet)")
    fleet = arm.fleet
    colocated = round(fleet.colocated_gpus / worker.num_gpus)
    if colocated:
        alone = (PoolSpec("both", colocated, worker),)
        return FleetSpec(alone, None, _policy(flags), profile.admission_s, shared_cores=shared), notes
    link = profile.link
    if link is None:
        link = LinkModel(1e-3, 1e9, "assumed: 1 ms and 1 GB/s")
        notes.append("the profile has no link (kvbaton profile --with-link): 1 ms and 1 GB/s are assumed")
    handoff = HandoffSpec(
        link,
        profile.worker.token_bytes,
        profile.worker.num_layers,
        control_s=profile.control_s,
        reserves_between_steps=profile.origin.engine == "kvbaton",  # its engine loop does what it is asked after a step
    )
    pools = (
        PoolSpec("prefill", round(fleet.prefill_gpus / worker.num_gpus), worker),
        PoolSpec("decode", round(fleet.decode_gpus / worker.num_gpus), worker),
    )
    return FleetSpec(pools, handoff, _policy(flags), profile.admission_s, shared_cores=shared), notes


def _worker(flags: dict[str, str], profile: ProfileFile) -> WorkerSpec:
    spec = profile.worker_spec()
    changes: dict[str, int] = {}
    for flag, field in (
        ("--max-batch-tokens", "max_batch_tokens"),
        ("--chunk-tokens", "max_batch_tokens"),
        ("--max-running", "max_running"),
        ("--kv-blocks", "num_blocks"),
        ("--max-context", "max_context"),
    ):
        if flag in flags:
            changes[field] = int(flags[flag])
    return msgspec.structs.replace(spec, **changes)


def _policy(flags: dict[str, str]) -> PolicyConfig:
    default = PolicyConfig()
    kind = flags.get("--policy", default.kind)
    if kind not in POLICIES:
        raise LocalError(f"no policy {kind!r}", field="policy")
    threshold = flags.get("--threshold-tokens")
    return msgspec.structs.replace(
        default,
        kind=kind,
        threshold_tokens=int(threshold) if threshold is not None else None,
        ttft_slo_s=float(flags.get("--ttft-slo-s", default.ttft_slo_s)),
        tpot_slo_s=float(flags.get("--tpot-slo-s", default.tpot_slo_s)),
        disagg_percent=float(flags.get("--disagg-percent", default.disagg_percent)),
    )


def trace_of_run(run: Run, block_size: int) -> tuple[Trace, list[RequestSample]]:
    """The timed requests as they were due, with the lengths the server counted; prefixes as the load shared them."""
    timed = sorted((each for each in run.samples if each.phase != "warmup"), key=lambda each: each.intended_s)
    shared, block_tokens = _prefixes(run, block_size)
    requests = []
    for sample in timed:
        prompt = sample.usage_prompt_tokens or sample.prompt_tokens
        ids: tuple[int, ...] = ()
        if block_tokens:
            wanted = -(-prompt // block_tokens)
            known = shared.get(sample.index, ())[:wanted]
            # What follows a shared prefix is the request's own.
            ids = known + tuple(-(sample.index << 20) - n - 1 for n in range(wanted - len(known)))
        output = sample.output_tokens or sample.max_tokens
        requests.append(TraceRequest(sample.intended_s, max(1, prompt), max(1, output), ids))
    return Trace("measured run", tuple(requests), block_tokens=block_tokens or None), timed


def _prefixes(run: Run, block_size: int) -> tuple[dict[int, tuple[int, ...]], int]:
    """Block ids by request index, planned again from the run's own specification and seed."""
    config = {name: value for name, value in run.header.config.items() if name in LoadSpec.__struct_fields__}
    spec = msgspec.convert(config, LoadSpec, strict=False)
    if not spec.shared_prefix_tokens and spec.trace is None:
        return _template(run, block_size)
    try:
        work = plan_work(spec, None)
    except LocalError:
        return {}, 0
    if not work.block_tokens or work.block_tokens % block_size:
        return {}, 0
    return {index: item.block_ids for index, item in enumerate(work.items)}, work.block_tokens


def _template(run: Run, block_size: int) -> tuple[dict[int, tuple[int, ...]], int]:
    """What every prompt begins with: the chat template, as far as most of the requests found it in the cache.

    A property of the prompts, not of how fast they were served; prompts themselves are not kept with a run.
    """
    found = [sample.cached_tokens or 0 for sample in run.samples if sample.ok]
    blocks = int(np.median(found)) // block_size if found else 0
    if not blocks:
        return {}, 0
    return {sample.index: tuple(range(blocks)) for sample in run.samples}, block_size


def predict(
    arm: Arm, rate_per_s: float, runs: Sequence[Run], profile: ProfileFile
) -> tuple[list[Prediction], list[str]]:
    """The arm's runs at one rate, simulated and measured, over the same requests."""
    spec, notes = fleet_spec(arm, profile)
    pairs = [simulated_pairs(run, spec, profile.worker.block_size) for run in runs]
    found = []
    for what in ("TTFT", "TPOT"):
        said, seen = ([value for of_run in pairs for value in _side(of_run[what], side)] for side in (0, 1))
        for name, figure in FIGURES.items() if seen else ():
            predicted, measured = figure(said), figure(seen)
            of_runs = tuple(figure(_side(of_run[what], 1)) for of_run in pairs if of_run[what])
            found.append(
                Prediction(arm.name, rate_per_s, f"{name} {what}", predicted, measured, predicted / measured - 1.0,
                           of_runs)
            )  # fmt: skip
    return found, notes


Pairs = list[tuple[float, float]]  # (simulated, measured) milliseconds of requests


def _side(pairs: Pairs, side: int) -> list[float]:
    return [pair[side] for pair in pairs]


def simulated_pairs(run: Run, spec: FleetSpec, block_size: int) -> dict[str, Pairs]:
    """Of the requests that count, in order of when they were due."""
    trace, samples = trace_of_run(run, block_size)
    simulation = Simulation(spec, trace)
    simulation.run()
    found: dict[str, Pairs] = {"TTFT": [], "TPOT": []}
    for number, sample in enumerate(samples):
        record = simulation.records[f"r{number}"]
        if sample.phase != "steady" or not sample.ok:
            continue
        for name, predicted, measured in (
            ("TTFT", record.ttft_s, stats.ttft_s(sample)),
            ("TPOT", record.tpot_s, stats.tpot_s(sample)),
        ):
            if predicted is not None and measured is not None:
                found[name].append((predicted * 1e3, measured * 1e3))
    return found


def predict_all(
    arms: Sequence[Arm], recorded: dict[float, list[tuple[str, Run]]], profile: ProfileFile
) -> Simulated:  # fmt: skip
    """Every arm at every rate."""
    predictions: list[Prediction] = []
    notes: list[str] = [f"profile: {note}" for note in profile.notes]
    for rate, runs in recorded.items():
        for arm in arms:
            found, more = predict(arm, rate, [run for style, run in runs if style == arm.style], profile)
            predictions += found
            notes += more
    origin = profile.origin
    name = f"{origin.engine} {origin.engine_version}, {origin.model_id}, on {origin.hardware}, {profile.measured_at}"
    return Simulated(name, tuple(predictions), tuple(dict.fromkeys(notes)))
