"""How each kind of fault is carried out on a world. What strikes which part was drawn before the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .plan import Fault

if TYPE_CHECKING:
    from .fleet import Pod
    from .process import WorkerProcess
    from .world import World


def strike(world: World, fault: Fault) -> None:
    """Nothing any more once all is well; nothing where there is nothing to strike."""
    if world.calm:
        return
    match fault.kind:
        case "cut" | "one_way":
            _cut(world, fault)
        case "reset":
            _reset(world, fault.lot)
        case "router_dies":
            _kill_router(world, fault.lasts_s)
        case "client_leaves":
            open_ones = [each for each in world.requests if each.task is not None and not each.outcome]
            if open_ones:
                open_ones[int(fault.lot * len(open_ones))].leave()
        case _:
            pods = list(world.cluster.pods.values())
            if pods:
                _strike_pod(world, pods[int(fault.lot * len(pods))], fault)


def _strike_pod(world: World, pod: Pod, fault: Fault) -> None:
    process = pod.process
    if process is None or not process.alive:
        return
    match fault.kind:
        case "crash":
            world.story.tell("{}: dies", pod.name)
            process.die()
            world.loop.call_later(fault.lasts_s, world.cluster.start, pod)
        case "slow_engine":
            _slow(world, process, fault.lasts_s, 30.0)
        case "pause":
            _slow(world, process, fault.lasts_s, 300.0)
        case "slow_way":
            world.story.tell("{}: its network is slow", pod.name)
            world.network.slow[pod.name] = 60.0
            world.loop.call_later(fault.lasts_s, world.network.slow.pop, pod.name, None)
        case "suspend":
            _suspend(world, pod)
        case "broken_step":
            process.engine.breaks_next = True
        case "drain" if len(world.cluster.staying(pod.role)) > 1 and not pod.leaving:
            world.spawn(world.cluster.drain(pod))
        case "clear_cache":
            world.story.tell("{}: its prefix cache is cleared", pod.name)
            process.engine.call(lambda engine: engine.clear_cache())


def _reset(world: World, lot: float) -> None:
    wires = list(world.network.wires)
    if wires:
        wire = wires[int(lot * len(wires))]
        world.story.tell("the wire {} -> {} is reset", *wire.way(0))
        wire.break_off()


def _cut(world: World, fault: Fault) -> None:
    """Between the router and a worker, or between two workers; in both directions or in one."""
    names = ["router", *world.cluster.pods]
    source = names[int(fault.lot * len(names))]
    others = [name for name in names if name != source]
    target = others[int(fault.lot * 1000) % len(others)]
    ways = [(source, target)] if fault.kind == "one_way" else [(source, target), (target, source)]
    for way in ways:
        world.network.cut(*way)
        world.loop.call_later(fault.lasts_s, world.network.heal, *way)


def _suspend(world: World, pod: Pod) -> None:
    """A reader stands still, as a machine that is suspended: its clock and its copies. Then nothing passes between it
    and those it reads from, and others ask for their blocks. Its leases run out by the lenders' clocks, not by its own,
    and what is copied afterwards is somebody else's."""
    readers = world.cluster.staying("decode")
    if pod not in readers and readers:
        pod = readers[0]
    if pod.process is None or not pod.process.alive:
        return
    lasts_s = world.rng.uniform(2.4, 3.2)
    world.story.tell("{}: its copies and its clock stand still for {:.2f} s", pod.name, lasts_s)
    world.standing_until_s[pod.name] = world.loop.time() + lasts_s
    pod.process.clock.stand_still(lasts_s)
    world.burst(3)
    for lender in world.cluster.staying("prefill"):
        for way in ((pod.name, lender.name), (lender.name, pod.name)):
            world.loop.call_later(0.5, world.network.cut, *way)
            world.loop.call_later(lasts_s + 0.5, world.network.heal, *way)
    world.loop.call_later(2.1, world.burst, 8)


def _slow(world: World, process: WorkerProcess, lasts_s: float, factor: float) -> None:
    world.story.tell("{}: its engine is {:g} times slower", process.name, factor)
    process.engine.slowness = factor

    def again() -> None:
        process.engine.slowness = 1.0

    world.loop.call_later(lasts_s, again)


def _kill_router(world: World, lasts_s: float) -> None:
    if not world.router.alive:
        return
    world.story.tell("the router dies")
    world.router.die()

    def again() -> None:
        if not world.router.alive:
            world.start_router()

    world.loop.call_later(lasts_s, again)
