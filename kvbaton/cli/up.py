"""``kvbaton up``: a whole fleet on this machine, ready to answer, and gone without a trace afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import click

from kvbaton.cli import autoscale_options, options, preflight
from kvbaton.cli.autoscale_options import AutoscaleOptions
from kvbaton.cli.child import tie_to_parent
from kvbaton.cli.fleet_control import FleetControl
from kvbaton.cli.placement import LEAST_KV_MIB, assign_cores, emptiest_cores, fit_kv_memory_mib
from kvbaton.cli.supervisor import Child, ChildSpec, Supervisor, Tell
from kvbaton.config import INTERNAL_KEY_VARIABLE, FleetSettings, to_environ, without_settings
from kvbaton.kv.shared_pool import sweep_stale
from kvbaton.kv.tier import tier_options
from kvbaton.kv.tier_directory import TierDirectory, memory_directory, sweep_tiers
from kvbaton.kv.tier_store import parse_store
from kvbaton.router.control import FleetStatus, Process
from kvbaton.types import LocalError, Role

_KEPT_LOG_DIRECTORIES = 10


START_S = {"embedded": 180.0, "vllm": 900.0}  # a vLLM server compiles before it serves


@click.command("up")
@click.option("--prefill", type=click.IntRange(1), help="Prefill workers of a split fleet.  [default: 1]")
@click.option("--decode", type=click.IntRange(1), help="Decode workers of a split fleet.  [default: 1]")
@click.option("--colocated", type=click.IntRange(1), help="Workers of a single pool, instead of a split.")
@click.option("--prefill-tp", type=click.IntRange(1), help="Ranks of each prefill worker, instead of --tp.")
@click.option("--decode-tp", type=click.IntRange(1), help="Ranks of each decode worker, instead of --tp.")
@options.flags(
    options.MODEL_FLAGS, options.ENGINE_FLAGS, options.SERVER_FLAGS, options.ROUTER_FLAGS, options.DRAIN_FLAG
)
@autoscale_options.flags
@options.config_option
@options.log_level_option
@click.option("--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Where the processes' logs go.")
@click.option("--ready-timeout-s", type=float, help="How long the start may take.  [default: 180, vllm 900]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when ready, instead of text.")
@click.option("--tied", is_flag=True, hidden=True, help="End when the parent ends.")
def up_command(
    settings: dict[str, dict[str, Any]], prefill: int | None, decode: int | None, colocated: int | None, **given: Any
) -> int:
    """Start workers and a router on this machine, and print an address that answers.

    \b
        kvbaton up                              one prefill and one decode worker
        kvbaton up --prefill 2 --decode 2
        kvbaton up --colocated 2                the single pool, for comparison
        kvbaton up --autoscale --prefill-max 3 --decode-max 3
        kvbaton up --prefill-tp 2               prefill workers of two processes that share the heads
        kvbaton up --engine vllm --engine-python /opt/vllm/bin/python

    Each worker stays on its own cores. A worker that dies is started again. Ctrl-C drains: open streams end, then
    everything goes; Ctrl-C again ends at once.
    """
    roles = fleet_roles(prefill, decode, colocated)
    fleet = options.read_settings(given["config"], settings)
    scale = autoscale_options.read(roles, given, fleet.router.plan_band)
    preflight.check_engine(fleet.worker.engine, tuple(START_S))
    preflight.check_address(fleet.router.host, fleet.router.port)
    key = secrets.token_urlsafe(32)
    if preflight.check_door(fleet.router, key):  # nobody gets past the keys by asking a worker
        fleet = dataclasses.replace(fleet, worker=dataclasses.replace(fleet.worker, clients="refuse"))
    progress = Progress()
    ranks = ranks_of_roles(fleet.worker.tp, given["prefill_tp"], given["decode_tp"])
    fleet = complete(fleet, [(role, ranks[role]) for role in roles], progress)
    logs = log_directory(given["log_dir"])

    if stale := sweep_stale():
        progress.tell("up", f"removed {len(stale)} shared-memory segment(s) of processes that died")
    start = Start(fleet, logs, {INTERNAL_KEY_VARIABLE: key}, given["log_level"], ranks)
    router, workers = start.child_specs(roles)
    ready_s = given["ready_timeout_s"] or START_S[fleet.worker.engine]

    async def main() -> None:
        supervisor = Supervisor(router, workers, key, progress.tell, start.one_more)

        def about(processes: list[Process]) -> FleetStatus:
            url, transport = supervisor.router.address, fleet.worker.transport
            engine = fleet.worker.engine
            return FleetStatus(
                os.getpid(), url, model_name(fleet), processes, str(logs), transport, key, engine, ready_s
            )

        control = FleetControl(supervisor, about, {role: roles.count(role) for role in roles}, ready_s)
        stop, ready = asyncio.Event(), asyncio.Event()

        def on_ready() -> None:
            announce(supervisor, fleet, logs, given["as_json"])
            ready.set()

        first_s: list[float] = []

        def on_signal() -> None:
            # A terminal and a parent such as make may both pass on one Ctrl-C: at once is not a second thought.
            first_s.append(time.monotonic())
            if first_s[-1] - first_s[0] > 1.0:
                supervisor.kill()
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        if given["tied"]:
            tie_to_parent(asyncio.get_running_loop(), on_signal)
        async with control.listening(), scaling(scale, supervisor, control, progress.tell, (ready, stop), logs):
            await supervisor.run(ready_s, on_ready, stop)

    with tier_held(fleet, key):
        asyncio.run(main())
    progress.tell("up", "everything has ended")
    return 0


@contextlib.contextmanager
def tier_held(fleet: FleetSettings, key: str) -> Iterator[None]:
    """The memory of the shared KV tier outlives each worker, and goes with the fleet."""
    worker = fleet.worker
    wanted = tier_options(worker.kv_tier_memory_mib, worker.kv_tier_disk, worker.kv_tier_store, key)
    sweep_tiers()
    if not wanted.memory_bytes:
        yield
        return
    directory = TierDirectory(memory_directory(wanted.memory_name), passing=True)
    directory.settle()
    try:
        yield
    finally:
        directory.close()


@contextlib.asynccontextmanager
async def scaling(
    scale: AutoscaleOptions | None,
    supervisor: Supervisor,
    control: FleetControl,
    tell: Tell,
    events: tuple[asyncio.Event, asyncio.Event],
    directory: Path,
) -> AsyncIterator[None]:
    """The autoscaler beside the fleet, if one was asked for; its end never keeps the fleet from ending."""
    if scale is None:
        yield
        return
    from kvbaton.cli.autoscale import Autoscaler  # brings the planner along
    from kvbaton.cli.plan_watch import PlanWatch

    plan = PlanWatch(scale.band, directory, tell) if scale.band is not None else None
    task = asyncio.create_task(Autoscaler(supervisor, control, scale, tell, plan).run(*events))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def fleet_roles(prefill: int | None, decode: int | None, colocated: int | None) -> list[Role]:
    """One role for each worker."""
    if colocated is not None:
        if prefill is not None or decode is not None:
            fix = "give it, or --prefill and --decode"
            raise LocalError("--colocated is a single pool", field="colocated", fix=fix)
        return ["both" for _ in range(colocated)]
    pools: list[tuple[Role, int]] = [("prefill", prefill or 1), ("decode", decode or 1)]
    return [role for role, count in pools for _ in range(count)]


def complete(fleet: FleetSettings, workers: list[tuple[Role, int]], progress: Progress) -> FleetSettings:
    """Decide what was left open: the model directory, and KV memory that fits this machine.

    ``workers``: role and number of ranks of each. LocalError when the model's heads cannot be shared by so many.
    """
    model = fleet.model
    if not model.dir:
        from kvbaton.engine.weights import default_model_dir

        progress.tell("up", "preparing the default model")
        model = dataclasses.replace(model, dir=str(default_model_dir()))
    else:
        model = dataclasses.replace(model, dir=str(Path(model.dir).resolve()))
        preflight.check_model(Path(model.dir), fleet.worker.engine)
    for num_ranks in sorted({num_ranks for _, num_ranks in workers} - {1}):
        preflight.check_ranks(Path(model.dir), fleet.worker.engine, num_ranks)
    if not model.kv_blocks and not model.kv_memory_mib:
        import psutil

        # Ranks find their pools there, whatever way KV takes to peers.
        shared = sum(fleet.worker.transport != "tcp" or num_ranks > 1 for _, num_ranks in workers)
        tier_bytes = fleet.worker.kv_tier_memory_mib << 20
        shm_bytes = psutil.disk_usage("/dev/shm").free - tier_bytes if shared else 0
        store = parse_store(fleet.worker.kv_tier_store)
        lent_bytes = len(workers) * store.segment_bytes if store is not None else 0
        memory_bytes = psutil.virtual_memory().available - tier_bytes - lent_bytes
        fits_mib = fit_kv_memory_mib(len(workers), memory_bytes, shared, shm_bytes)
        if fits_mib < LEAST_KV_MIB:
            free_bytes, free_shm_bytes = psutil.virtual_memory().available, shm_bytes + (tier_bytes if shared else 0)
            if fit_kv_memory_mib(len(workers), free_bytes, shared, free_shm_bytes) >= LEAST_KV_MIB:
                raise LocalError(
                    f"{(tier_bytes + lent_bytes) >> 20} MiB of shared KV tier leave no room for the KV memory of "
                    f"{len(workers)} worker(s)",
                    field="kv_tier_memory_mib" if tier_bytes >= lent_bytes else "kv_tier_store",
                    fix="give it less",
                )
            raise LocalError(
                f"only {max(0, fits_mib)} MiB of KV memory would fit for each worker",
                field="kv_memory_mib",
                fix="free memory, start fewer workers, give the container more shared memory, or use --transport tcp",
            )
        model = dataclasses.replace(model, kv_memory_mib=fits_mib)
    router = dataclasses.replace(fleet.router, drain_s=fleet.worker.drain_s)
    return dataclasses.replace(fleet, model=model, router=router)


def ranks_of_roles(tp: int, prefill_tp: int | None, decode_tp: int | None) -> dict[Role, int]:
    """How many ranks a worker of each role has."""
    return {"prefill": prefill_tp or tp, "decode": decode_tp or tp, "both": tp}


@dataclasses.dataclass(frozen=True)
class Start:
    """What to start: every setting goes by the environment, so that nothing is said twice and no secret is listed."""

    fleet: FleetSettings
    logs: Path
    secrets_: dict[str, str]
    log_level: str
    ranks: dict[Role, int]  # of a worker of each role
    taken: list[tuple[int, ...]] = dataclasses.field(default_factory=list)  # cores of each worker so far

    def child_specs(self, roles: list[Role]) -> tuple[ChildSpec, list[ChildSpec]]:
        environ = {**self._base, **to_environ(model=self.fleet.model, router=self.fleet.router)}
        router = ChildSpec("router", "router", environ, self.logs / "router.log", self.fleet.worker.drain_s)
        seen: dict[Role, int] = {}
        workers = []
        cores = iter(assign_cores(_available(), sum(self.ranks[role] for role in roles)))
        for role in roles:
            own = tuple(sorted({core for _ in range(self.ranks[role]) for core in next(cores)}))
            workers.append(self._worker(role, f"{role}-{seen.get(role, 0)}", own))
            seen[role] = seen.get(role, 0) + 1
        return router, workers

    def one_more(self, role: Role, name: str) -> ChildSpec:
        """A worker that joins later shares the cores that fewest others are on."""
        return self._worker(role, name, emptiest_cores(_available(), self.taken))

    @property
    def _base(self) -> dict[str, str]:
        return {**without_settings(os.environ), **self.secrets_, "KVBATON_LOG_LEVEL": self.log_level}

    def _worker(self, role: Role, name: str, own: tuple[int, ...]) -> ChildSpec:
        fleet = self.fleet
        self.taken.append(own)
        threads = fleet.worker.threads or len(own)
        tp = self.ranks[role]
        worker = dataclasses.replace(fleet.worker, role=role, tp=tp, cores=own, threads=threads, port=0, kv_port=0)
        if worker.engine != "embedded":
            worker = dataclasses.replace(worker, engine_log=str(self.logs / f"{name}-engine.log"))
        environ = {
            **self._base,
            **to_environ(model=fleet.model, worker=worker),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        return ChildSpec(name, "worker", environ, self.logs / f"{name}.log", fleet.worker.drain_s, role)


def _available() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def model_name(fleet: FleetSettings) -> str:
    return fleet.model.name or Path(fleet.model.dir).name


class Progress:
    """What happens, on stderr: one line each, with the time since the start."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def tell(self, who: str, what: str) -> None:
        click.echo(f"{time.monotonic() - self._started_s:6.1f} s  {who:<12} {what}", err=True)


def announce(supervisor: Supervisor, fleet: FleetSettings, logs: Path, as_json: bool) -> None:
    """The result on stdout: where the fleet answers."""
    url = supervisor.router.address
    model = model_name(fleet)
    if as_json:
        children = [
            {
                "name": child.spec.name,
                "role": child.kind,
                "pid": child.pid,
                "url": child.address,
                "engine_url": engine_url(fleet, child),
            }
            for child in supervisor.children
        ]
        click.echo(json.dumps({"url": url, "model": model, "processes": children, "log_dir": str(logs)}))
        return
    # Greedy: a model this small wanders at OpenAI's default temperature of 1.
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": model, "temperature": 0, "messages": messages})
    click.echo(f"{url}/v1")
    click.echo(f"\n  curl -s {url}/v1/chat/completions -H 'content-type: application/json' \\\n    -d '{body}'\n")
    click.echo(f"logs in {logs}; Ctrl-C ends it", err=True)


def engine_url(fleet: FleetSettings, child: Child) -> str:
    """Of the server behind a worker, which has figures of its own; empty where the worker is the engine."""
    if fleet.worker.engine == "embedded" or not child.kv_port:
        return ""
    host = fleet.worker.kv_host or fleet.worker.host
    return f"http://{'[' + host + ']' if ':' in host else host}:{child.kv_port}"


def log_directory(given: Path | None) -> Path:
    """A fresh directory; of those we made ourselves the oldest are removed."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        return given.resolve()
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kvbaton" / "logs"
    fresh = state / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    fresh.mkdir(parents=True)
    for old in sorted(state.iterdir())[:-_KEPT_LOG_DIRECTORIES]:
        shutil.rmtree(old, ignore_errors=True)
    return fresh
