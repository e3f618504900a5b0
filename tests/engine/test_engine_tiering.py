"""The shared tier behind a real engine: the same tokens with it, whatever it has, loses, or takes too long for."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine.test_engine import WAIT_S, Inbox, held, request

from kvbaton.clock import Clock, ManualClock, MonotonicClock
from kvbaton.engine.engine import Engine, EngineConfig, _Stop
from kvbaton.engine.events import Failed, Reservation, Scheduled
from kvbaton.engine.loader import LoadOptions, load
from kvbaton.engine.scheduler import SchedulerConfig
from kvbaton.kv.tier import MIB, Tier, TierOptions, open_tier
from kvbaton.kv.tier_level import LevelName, Pieces
from kvbaton.kv.tiering import TieringConfig
from kvbaton.types import GenerateRequest, LocalError

BLOCK = 8
PATIENT = TieringConfig(deadline_s=WAIT_S)  # however slow the machine is, nothing is computed for want of time
PROMPT = [7, *range(60)]  # seven full blocks before its last token


class Gate:
    """Reading from the tier waits here."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def attach(self, tier: Tier) -> None:
        real = tier.read

        def read(block_hash: bytes, pieces: Pieces) -> LevelName | None:
            self.reached.set()
            assert self.opened.wait(WAIT_S)
            return real(block_hash, pieces)

        tier.read = read  # type: ignore[method-assign]


@contextmanager
def running(
    model_dir: Path,
    name: str,
    num_blocks: int = 64,
    disk: Path | None = None,
    clock: Clock | None = None,
    gate: Gate | None = None,
    device: str = "cpu",
    config: TieringConfig = PATIENT,
) -> Iterator[Engine]:
    """An engine with a pool of its own over the memory of that name; on the way out nothing is held."""
    options = LoadOptions(
        model_dir=model_dir,
        dtype="float32",
        block_size=BLOCK,
        num_kv_blocks=num_blocks,
        device=device,
        backend="auto" if device == "cpu" else "torch",
    )
    loaded = load(options)
    tier = open_tier(
        TierOptions(0 if disk else 4 * MIB, name, disk, 4 * MIB), loaded.fingerprint, loaded.pool.layout, "test"
    )
    assert tier is not None
    if gate is not None:
        gate.attach(tier)
    scheduler = SchedulerConfig(max_batch_tokens=64, max_running=16, max_context=512)
    engine = Engine(loaded.model, loaded.pool, EngineConfig(scheduler), clock or MonotonicClock(), tier)
    assert engine.tiering is not None
    engine.tiering.config = config
    engine.start()
    try:
        yield engine
        if gate is not None:
            gate.opened.set()
        if engine.alive:
            assert engine.tiering.flush(WAIT_S)
            assert held(engine) == (0, 0, 0)
    finally:
        if gate is not None:
            gate.opened.set()
        engine.stop()
        loaded.pool.close()


def ask(engine: Engine, asked: GenerateRequest) -> tuple[list[int], int]:
    """Its tokens, and how many of its prompt's were cached. What it left is in the tier."""
    inbox = Inbox()
    engine.generate(asked, inbox)
    scheduled = inbox.until(Scheduled)
    assert isinstance(scheduled, Scheduled) and engine.tiering is not None
    tokens = inbox.tokens()
    assert engine.tiering.flush(WAIT_S)
    return tokens, scheduled.num_cached_tokens


@pytest.fixture
def name() -> str:
    return secrets.token_hex(8)


@pytest.fixture
def filled(tiny_model_dir: Path, name: str) -> Iterator[tuple[Engine, list[int]]]:
    """An engine that has answered PROMPT and keeps the tier alive, and the answer."""
    with running(tiny_model_dir, name) as engine:
        tokens, num_cached = ask(engine, request("cold", PROMPT))
        assert num_cached == 0
        yield engine, tokens


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_another_engine_reads_what_one_computed(tiny_model_dir: Path, name: str, device: str) -> None:
    with running(tiny_model_dir, name, device=device) as one, running(tiny_model_dir, name, device=device) as other:
        expected, _ = ask(one, request("cold", PROMPT))
        tokens, num_cached = ask(other, request("warm", PROMPT))
        assert tokens == expected and num_cached == 56
        computed = other.stats().num_prompt_tokens
        assert computed == len(PROMPT) - 56
        assert other.tiering is not None and one.tiering is not None
        stats = other.tiering.stats()
        assert (stats.num_tier_hits, stats.num_tier_tokens, stats.num_tier_fallbacks) == (1, 56, 0)
        assert one.tiering.stats().num_tier_hits == 0


def test_what_one_said_is_a_prefix_for_another(
    filled: tuple[Engine, list[int]], tiny_model_dir: Path, name: str
) -> None:
    with running(tiny_model_dir, name) as engine:
        turn = [*PROMPT, *filled[1], 1, 2, 3]
        assert ask(engine, request("turn", turn))[1] == 64, "a block more than the prompt had"


def test_it_outlives_the_engine_on_disk(tiny_model_dir: Path, name: str, tmp_path: Path) -> None:
    with running(tiny_model_dir, name, disk=tmp_path) as engine:
        expected, _ = ask(engine, request("cold", PROMPT))
    with running(tiny_model_dir, name, disk=tmp_path) as engine:
        assert ask(engine, request("warm", PROMPT)) == (expected, 56)


def test_a_tenant_finds_nothing_of_another(filled: tuple[Engine, list[int]], tiny_model_dir: Path, name: str) -> None:
    with running(tiny_model_dir, name) as engine:
        plain = request("warm", PROMPT)
        salted = GenerateRequest("salted", plain.prompt_token_ids, plain.sampling, cache_salt="another")
        assert ask(engine, salted) == (filled[1], 0)
        assert engine.tiering is not None and engine.tiering.stats().num_tier_hits == 0


def test_a_damaged_block_is_computed(filled: tuple[Engine, list[int]], tiny_model_dir: Path, name: str) -> None:
    with running(tiny_model_dir, name) as engine:
        assert engine.tiering is not None
        (level,) = engine.tiering.tier.levels
        chain = filled[0].call(lambda one: one._blocks.cached_hashes()).result(WAIT_S)  # in order of publication
        path = level.directory.block_path(engine.tiering.tier.key(chain[2]))
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        assert ask(engine, request("warm", PROMPT)) == (filled[1], 2 * BLOCK)
        stats = engine.tiering.stats()
        assert (stats.num_tier_wrong_blocks, stats.num_tier_fallbacks, stats.num_tier_tokens) == (1, 1, 2 * BLOCK)
        assert path.exists(), "it was written anew"


def test_what_takes_too_long_is_computed(filled: tuple[Engine, list[int]], tiny_model_dir: Path, name: str) -> None:
    gate, clock = Gate(), ManualClock()
    with running(tiny_model_dir, name, clock=clock, gate=gate) as engine:
        inbox = Inbox()
        engine.generate(request("warm", PROMPT), inbox)
        assert gate.reached.wait(WAIT_S)
        clock.advance(WAIT_S + 1.0)
        assert inbox.tokens() == filled[1]
        assert engine.tiering is not None
        stats = engine.tiering.stats()
        assert (stats.num_tier_hits, stats.num_tier_fallbacks) == (0, 1)
        assert engine.call(lambda engine: engine.stats().num_blocks_pinned).result(WAIT_S) == 7, "still read into"
        gate.opened.set()
        assert ask(engine, request("again", PROMPT)) == (filled[1], 56)


def test_one_that_leaves_while_it_is_read_holds_nothing(
    filled: tuple[Engine, list[int]], tiny_model_dir: Path, name: str
) -> None:
    gate = Gate()
    with running(tiny_model_dir, name, gate=gate) as engine:
        engine.generate(request("warm", PROMPT), Inbox())
        assert gate.reached.wait(WAIT_S)
        engine.abort("warm")
        assert engine.call(lambda engine: engine.stats().num_active).result(WAIT_S) == 0
        gate.opened.set()
        assert ask(engine, request("warm", PROMPT))[0] == filled[1], "the name is free again"


def test_the_end_fails_what_waits_for_a_prefix(
    filled: tuple[Engine, list[int]], tiny_model_dir: Path, name: str
) -> None:
    gate, inbox, stop = Gate(), Inbox(), _Stop()
    with running(tiny_model_dir, name, gate=gate) as engine:
        engine.generate(request("warm", PROMPT), inbox)
        assert gate.reached.wait(WAIT_S)
        engine._commands.put(stop)  # before anything can be read
        gate.opened.set()
        assert isinstance(inbox.next(), Failed)
        assert stop.done.wait(WAIT_S)
        engine._thread.join(WAIT_S)


def test_a_reservation_counts_what_the_tier_has(
    filled: tuple[Engine, list[int]], tiny_model_dir: Path, name: str
) -> None:
    with running(tiny_model_dir, name) as engine:
        reservation = engine.reserve(request("import", PROMPT), Inbox()).result(WAIT_S)
        assert isinstance(reservation, Reservation) and reservation.num_cached_tokens == 56
        engine.abort("import")
        too_long = engine.reserve(request("long", PROMPT, max_tokens=1000), Inbox())
        with pytest.raises(LocalError, match="context"):
            too_long.result(WAIT_S)
        assert engine.reserve(request("long", PROMPT), Inbox()).result(WAIT_S).num_cached_tokens == 56, "its id is free"
        engine.abort("long")


def test_a_small_pool_takes_what_fits(filled: tuple[Engine, list[int]], tiny_model_dir: Path, name: str) -> None:
    with running(tiny_model_dir, name, num_blocks=16) as engine:
        blocker = engine.reserve(request("blocker", list(range(100, 190)), max_tokens=1), Inbox()).result(WAIT_S)
        assert len(blocker.block_ids) == 12
        inbox = Inbox()
        engine.generate(request("warm", PROMPT), inbox)  # four of seven blocks fit now, the prompt only afterwards
        assert engine.tiering is not None
        engine.call(lambda engine: None).result(WAIT_S)
        engine.abort("blocker")
        assert inbox.tokens() == filled[1]


def test_more_than_can_be_written_is_dropped_and_counted(tiny_model_dir: Path, name: str) -> None:
    with running(tiny_model_dir, name, config=TieringConfig(max_queued_blocks=0)) as engine:
        ask(engine, request("cold", PROMPT))
        assert engine.tiering is not None
        stats = engine.tiering.stats()
        assert stats.num_tier_dropped_blocks >= 7 and stats.tier_written_bytes == 0
