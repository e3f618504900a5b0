"""The faults that a drill rehearses, and what clients may see of each.

A scenario makes its fault strike at a known moment, keeps it up as long as its seed says, and ends it; what becomes of
the requests is watched by others. ``Promise`` repeats the row of docs/failures.md in words and codes.
Knows nothing about passing or failing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvbaton.bench.fault_proxy import Direction, FaultProxy, Path
from kvbaton.drill.stage import Stage, Unfinished
from kvbaton.drill.verdict import Promise
from kvbaton.router.control import Command
from kvbaton.types import Role
from kvbaton.workers.protocol import WorkerStats

LONG_ANSWER, LONG_PROMPT = -1, -2  # places in the list of prompts, from its end
KILL, FREEZE, CONTROL, ROUTER, SPLIT, SPARE, WIRE = "kill", "freeze", "control", "router", "split", "spare", "wire"
NEEDS = {
    KILL: "its processes cannot be killed from here",
    FREEZE: "processes cannot be frozen from here",
    CONTROL: "it is not a fleet of `kvbaton up` on this machine",
    ROUTER: "the router's process is not known",
    SPLIT: "it has no prefill pool and decode pool",
    SPARE: "it has only one worker",
    WIRE: "its KV takes the engine's own way between its servers, where no byte can be changed",
}
# A whole answer, or a stream not begun, may lose the worker of its one retry too.
POOL_GONE = ("worker_error",)


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    act: Callable[[Stage], Awaitable[None]]
    promise: Promise
    needs: frozenset[str] = field(default_factory=frozenset)


# -- workers die -----------------------------------------------------------------------------------------------------


async def _prefill_killed_idle(stage: Stage) -> None:
    names = list(await stage.members("prefill"))
    await stage.kill(await stage.caught(names, lambda stats: stats.num_active == 0, "an idle prefill worker"))


async def _prefill_killed_computing(stage: Stage) -> None:
    names = list(await stage.members("prefill"))
    for _ in range(12):
        stage.ask(LONG_PROMPT)
    name = await stage.caught(names, lambda stats: stats.waiting_prompt_tokens > 0, "a prefill under way")
    await stage.kill(name)


async def _while_kv_hangs(stage: Stage, role: Role, condition: Callable[[WorkerStats], bool], what: str) -> None:
    """Hold the KV on its way, so that there is time to find a worker in that condition; then kill it."""
    async with stage.through_proxies() as proxies:
        await stage.carried(proxies)
        for proxy in proxies.values():
            proxy.to_client.stall()
        for _ in range(4):
            stage.ask(LONG_PROMPT)
        name = await stage.caught(list(await stage.members(role)), condition, what)
        await stage.kill(name)
        for proxy in proxies.values():
            proxy.heal()  # what a dead process sent before still arrives, and then the end
        await stage.pause(0.2, 1.0)


def _offers(stats: WorkerStats) -> bool:
    return stats.num_leases > 0 and stats.waiting_prompt_tokens == 0


def _holds_for_others(stats: WorkerStats) -> bool:
    """Of a server that tells nothing of leases: blocks are in use, and nobody's request is there."""
    return stats.num_blocks_used > 0 and stats.num_active == 0


def _receives(stats: WorkerStats) -> bool:
    return _waits(stats) and stats.num_blocks_used > 0


def _waits(stats: WorkerStats) -> bool:
    return stats.num_active > stats.num_running


async def _prefill_killed_offered(stage: Stage) -> None:
    await _while_kv_hangs(
        stage,
        "prefill",
        _offers if stage.target.own_wire else _holds_for_others,
        "a prefill worker whose blocks are offered",
    )


async def _decode_killed_receiving(stage: Stage) -> None:
    await _while_kv_hangs(
        stage,
        "decode",
        _receives if stage.target.own_wire else _waits,
        "a decode worker that waits for KV",
    )


async def _decode_killed_streaming(stage: Stage) -> None:
    heard = asyncio.Event()
    where: dict[str, str] = {}
    after = stage.rng.randint(2, 40)

    def on_part(number: int, headers: dict[str, str]) -> None:
        if number >= after and not heard.is_set():
            where.update(headers)
            heard.set()

    streams = [stage.ask(LONG_ANSWER, on_part=on_part) for _ in range(3)]

    async def streaming() -> bool:
        return heard.is_set()

    await stage.until(streaming, "a stream to be under way")
    await stage.kill(where["x-kvbaton-decode"])
    for sample in await asyncio.gather(*streams):
        stage.note(f"a stream under way, begun on {sample.decode}, ended {sample.outcome} {sample.code}")


async def _pool_killed(stage: Stage, role: Role) -> None:
    for name in await stage.members(role):
        await stage.kill(name)
    for _ in range(3):
        stage.ask(LONG_PROMPT)


async def _prefill_pool_gone(stage: Stage) -> None:
    await _pool_killed(stage, "prefill")


async def _decode_pool_gone(stage: Stage) -> None:
    await _pool_killed(stage, "decode")


async def _router_killed(stage: Stage) -> None:
    await stage.kill("router")

    async def back() -> bool:
        return await stage.target.page() is not None

    await stage.until(back, "the router to be back")
    stage.note("the router answers again")


async def _restarted_in_place(stage: Stage) -> None:
    name = await stage.pick()
    before = await stage.target.command(Command("status"))
    await stage.doom(name)
    stage.strikes(f"SIGKILL to {name}, to be started again at the same address")
    after = await stage.target.command(Command("restart", name))
    old, new = (next(p for p in status.processes if p.name == name) for status in (before, after))
    stage.note(f"{name} is back: process {old.pid} at {old.url}, now {new.pid} at {new.url}")
    if old.url != new.url:
        raise Unfinished(f"{name} came back at {new.url} instead of {old.url}")


# -- workers hang ----------------------------------------------------------------------------------------------------


async def _frozen(stage: Stage, role: Role) -> None:
    name = await stage.pick(role)
    await stage.freeze(name)
    for _ in range(3):
        stage.ask(LONG_PROMPT)
    await stage.pause(3.0, 7.0)
    await stage.thaw(name)


async def _prefill_frozen(stage: Stage) -> None:
    await _frozen(stage, "prefill")


async def _decode_frozen(stage: Stage) -> None:
    await _frozen(stage, "decode")


# -- the way between them breaks -------------------------------------------------------------------------------------


async def _on_the_way(
    stage: Stage,
    arm: Callable[[Path, int], None],
    struck: Callable[[Path], int],
    what: str,
    held_s: tuple[float, float],
) -> None:
    """Arm one proxy towards the decode side, send prompts until it strikes, keep it so, heal."""
    async with stage.through_proxies() as proxies:
        await stage.carried(proxies)
        name = stage.rng.choice(sorted(proxies))
        path = proxies[name].to_client
        # Of another engine's hand-off we have the call to the prefill server, whose answer is some hundred bytes.
        after_bytes = stage.rng.randint(1, 200_000 if stage.target.own_wire else 500)
        before = struck(path)
        arm(path, after_bytes)

        async def strikes() -> bool:
            if len(stage.traffic.open_since_s()) < 4:
                stage.ask(LONG_PROMPT)
            return struck(path) > before

        await stage.until(strikes, f"KV of {name} to be {what}")
        stage.strikes(f"KV of {name} {what} after {after_bytes} bytes")
        await stage.pause(*held_s)
        path.heal()
        stage.note("healed")


async def _kv_cut(stage: Stage) -> None:
    def arm(path: Path, after_bytes: int) -> None:
        path.cut_after_bytes = after_bytes

    await _on_the_way(stage, arm, lambda path: path.num_cut, "cut", (0.2, 1.0))


async def _kv_corrupted(stage: Stage) -> None:
    def arm(path: Path, after_bytes: int) -> None:
        path.corrupt_after_bytes = after_bytes

    await _on_the_way(stage, arm, lambda path: path.num_corrupted, "corrupted", (0.2, 1.0))


async def _kv_stalled(stage: Stage) -> None:
    def arm(path: Path, after_bytes: int) -> None:
        path.stall_after_bytes = after_bytes

    # Sometimes for less than anybody's patience, sometimes for longer.
    held_s = stage.rng.choice(((2.0, 4.0), (12.0, 14.0)))
    await _on_the_way(stage, arm, lambda path: path.num_stalled, "stalled", held_s)


async def _one_way(stage: Stage) -> None:
    direction: Direction = stage.rng.choice(("to_server", "to_client"))
    async with stage.through_proxies() as proxies:
        await stage.carried(proxies)
        name = stage.rng.choice(sorted(proxies))
        proxy: FaultProxy = proxies[name]
        proxy.partition(direction)
        stage.strikes(
            f"nothing passes {'to' if direction == 'to_server' else 'from'} {name} any more, all the other way"
        )
        for _ in range(3):
            stage.ask(LONG_PROMPT)
        await stage.pause(*stage.rng.choice(((2.0, 4.0), (16.0, 18.0))))
        proxy.heal()
        stage.note("healed")


# -- on purpose ------------------------------------------------------------------------------------------------------


async def _drained(stage: Stage) -> None:
    members = await stage.members()
    name = stage.rng.choice(list(members))
    role: Role = members[name].role  # type: ignore[assignment]
    for _ in range(4):
        stage.ask(LONG_ANSWER)
    stage.strikes(f"{name} is told to drain")
    await stage.target.command(Command("drain", name))
    stage.note(f"{name} has left")
    status = await stage.target.command(Command("add", role=role))
    stage.note(f"{status.processes[-1].name} has joined")


async def _role_switched(stage: Stage) -> None:
    members = await stage.members("prefill", "decode")
    name = stage.rng.choice(list(members))
    old: Role = "prefill" if members[name].role == "prefill" else "decode"
    new: Role = "decode" if old == "prefill" else "prefill"
    for _ in range(4):
        stage.ask(LONG_ANSWER)
    stage.strikes(f"{name} is told to become {new}")
    await stage.target.command(Command("role", name, role=new))
    now = (await stage.members())[name]
    if now.role != new or now.incarnation != members[name].incarnation:
        raise Unfinished(f"{name} is {now.role}, life {now.incarnation}, instead of {new} in the same life")
    stage.note(f"{name} is {new}, in the same life")
    await stage.pause(0.3, 1.0)
    await stage.target.command(Command("role", name, role=old))
    stage.note(f"{name} is {old} again")


async def _overloaded(stage: Stage) -> None:
    number = stage.rng.randint(150, 250)
    stage.strikes(f"{number} requests at once")
    burst = [stage.ask(stage.rng.randrange(1, len(stage.traffic.prompts))) for _ in range(number)]
    await asyncio.gather(*burst)
    stage.note("the last of them has ended")


def _needs(*names: str) -> frozenset[str]:
    return frozenset(names)


SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "prefill-killed-idle",
        "kill -9 of a prefill worker that holds nothing",
        _prefill_killed_idle,
        Promise("nobody notices; requests go to others"),
        _needs(KILL, SPLIT),
    ),
    Scenario(
        "prefill-killed-computing",
        "kill -9 of a prefill worker while it computes prompts",
        _prefill_killed_computing,
        Promise("another prefill worker computes them again, or the decode worker itself"),
        _needs(KILL, SPLIT),
    ),
    Scenario(
        "prefill-killed-offered",
        "kill -9 of a prefill worker whose prompts are computed and not yet read",
        _prefill_killed_offered,
        Promise("the prompts are computed again elsewhere"),
        _needs(KILL, SPLIT, CONTROL),
    ),
    Scenario(
        "decode-killed-receiving",
        "kill -9 of a decode worker that waits for KV",
        _decode_killed_receiving,
        Promise("another worker takes the request; the lender lets the blocks go"),
        _needs(KILL, SPLIT, CONTROL),
    ),
    Scenario(
        "decode-killed-streaming",
        "kill -9 of a decode worker in the middle of streams",
        _decode_killed_streaming,
        Promise("streams go on elsewhere, without a token twice or wrong"),
        _needs(KILL, SPARE),
    ),
    Scenario(
        "prefill-frozen",
        "SIGSTOP of a prefill worker for some seconds, then SIGCONT",
        _prefill_frozen,
        Promise("what it has waits or goes elsewhere; nothing new is sent there"),
        _needs(FREEZE, SPLIT),
    ),
    Scenario(
        "decode-frozen",
        "SIGSTOP of a decode worker for some seconds, then SIGCONT",
        _decode_frozen,
        Promise("its streams pause or go on elsewhere; nothing new is sent there"),
        _needs(FREEZE, SPLIT),
    ),
    Scenario(
        "kv-cut",
        "the KV connection is reset in the middle of a transfer",
        _kv_cut,
        Promise("the hand-off is tried again"),
        _needs(SPLIT, CONTROL),
    ),
    Scenario(
        "kv-stalled",
        "the KV connection stops delivering in the middle of a transfer",
        _kv_stalled,
        Promise("the transfer goes on, or is given up after its patience and tried again"),
        _needs(SPLIT, CONTROL),
    ),
    Scenario(
        "kv-corrupted",
        "one byte on the KV connection is inverted",
        _kv_corrupted,
        Promise("the damage is noticed and the hand-off tried again; no wrong token is ever sent"),
        _needs(SPLIT, CONTROL, WIRE),
    ),
    Scenario(
        "one-way-partition",
        "nothing passes one way between a prefill worker and its readers",
        _one_way,
        Promise("what waits goes on or is tried elsewhere"),
        _needs(SPLIT, CONTROL),
    ),
    Scenario(
        "router-killed",
        "kill -9 of the router",
        _router_killed,
        Promise(
            "what goes through it breaks and clients try again; until it has heard of its workers it says 503",
            ("no_workers",),
            may_break=True,
        ),
        _needs(KILL, ROUTER),
    ),
    Scenario(
        "restarted-in-place",
        "kill -9 of a worker that comes back at the same addresses",
        _restarted_in_place,
        Promise("the new life is told from the old one by its incarnation; nothing of the old one is believed"),
        _needs(CONTROL, SPARE),
    ),
    Scenario(
        "prefill-pool-gone",
        "kill -9 of all prefill workers",
        _prefill_pool_gone,
        Promise("decode workers prefill themselves until one is back"),
        _needs(KILL, SPLIT),
    ),
    Scenario(
        "decode-pool-gone",
        "kill -9 of all decode workers",
        _decode_pool_gone,
        Promise("prefill workers serve whole requests; one that lost two workers ends with an error", POOL_GONE),
        _needs(KILL, SPLIT),
    ),
    Scenario(
        "drain-under-load",
        "a worker drains and leaves, another joins",
        _drained,
        Promise("nobody notices"),
        _needs(CONTROL, SPARE),
    ),
    Scenario(
        "role-switched",
        "a worker becomes the other role and is changed back, without a restart",
        _role_switched,
        Promise("nobody notices"),
        _needs(CONTROL, SPLIT, SPARE),
    ),
    Scenario(
        "overload-burst",
        "many times more requests at once than the fleet has room for",
        _overloaded,
        Promise("some wait, some are refused with 429 or 503; all others are right", ("429", "503")),
    ),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
