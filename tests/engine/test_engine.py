"""The engine loop on a tiny real model: exact tokens whatever happens around them, and nothing held afterwards."""

from __future__ import annotations

import queue
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvbaton.clock import ManualClock, MonotonicClock
from kvbaton.engine.engine import Engine, EngineConfig
from kvbaton.engine.events import Event, Failed, Progress, Scheduled, Token
from kvbaton.engine.loader import LoadOptions, load
from kvbaton.engine.sampler import SequenceSampler
from kvbaton.engine.scheduler import SchedulerConfig
from kvbaton.types import CapacityError, GenerateRequest, LocalError, SamplingParams, TokenOutput

WAIT_S = 60.0  # a bound on a wait, not a claim about speed


class Inbox:
    """Events of one request, waited for with a deadline."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()

    def __call__(self, event: Event) -> None:
        self.events.put(event)

    def next(self) -> Event:
        return self.events.get(timeout=WAIT_S)

    def tokens(self) -> list[int]:
        """All tokens up to the last; a failure is raised."""
        found = []
        while True:
            event = self.next()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Token):
                found.append(event.output.token_id)
                if event.output.finish_reason is not None:
                    return found

    def until(self, kind: type[Event]) -> Event:
        while not isinstance(event := self.next(), kind):
            assert not isinstance(event, Failed), event
        return event


@contextmanager
def running(
    model_dir: Path, num_blocks: int = 64, lease_s: float = 30.0, clock: ManualClock | None = None, **scheduler: int
) -> Iterator[Engine]:
    """A started engine; on the way out everything must have been given back."""
    loaded = load(LoadOptions(model_dir=model_dir, dtype="float32", block_size=8, num_kv_blocks=num_blocks))
    settings = {"max_batch_tokens": 64, "max_running": 16, "max_context": 512, **scheduler}
    config = EngineConfig(SchedulerConfig(**settings), lease_s=lease_s)
    engine = Engine(loaded.model, loaded.pool, config, clock or MonotonicClock())
    engine.start()
    try:
        yield engine
        assert held(engine) == (0, 0, 0)
    finally:
        engine.stop()
        loaded.pool.close()


def held(engine: Engine) -> tuple[int, int, int]:
    """Requests, blocks and pins, read between two steps, after every invariant was checked."""

    def read(engine: Engine) -> tuple[int, int, int]:
        engine.check()
        stats = engine.stats()
        return stats.num_active, stats.num_blocks_used, stats.num_blocks_pinned

    return engine.call(read).result(WAIT_S)


def request(name: str, prompt: list[int], max_tokens: int = 8) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)


def prompts(num: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(250) for _ in range(rng.randint(1, longest))] for _ in range(num)]


def one_by_one(engine: Engine, found: list[list[int]], max_tokens: int) -> list[list[int]]:
    results = []
    for i, prompt in enumerate(found):
        inbox = Inbox()
        engine.generate(request(f"alone-{i}", prompt, max_tokens), inbox)
        results.append(inbox.tokens())
    return results


def test_preemption_changes_no_token(tiny_model_dir: Path) -> None:
    work = prompts(12, longest=40)
    with running(tiny_model_dir, num_blocks=512) as engine:
        expected = one_by_one(engine, work, 48)
    with running(tiny_model_dir, num_blocks=20) as engine:  # each fits alone, together they need three times the pool
        inboxes = [Inbox() for _ in work]
        for i, (prompt, inbox) in enumerate(zip(work, inboxes, strict=True)):
            engine.generate(request(f"r{i}", prompt, 48), inbox)
        assert [inbox.tokens() for inbox in inboxes] == expected
        assert engine.stats().num_preemptions > 0


def test_a_prefix_hit_changes_no_token_and_is_counted(tiny_model_dir: Path) -> None:
    prompt = [7, *range(60)]
    with running(tiny_model_dir) as engine:
        first, second = Inbox(), Inbox()
        engine.generate(request("cold", prompt), first)
        expected = first.tokens()
        engine.generate(request("warm", prompt), second)
        scheduled = second.until(Scheduled)
        assert isinstance(scheduled, Scheduled) and scheduled.num_cached_tokens == 56  # 61 tokens, whole blocks of 8
        assert second.tokens() == expected


def test_abort_at_any_point_gives_everything_back(tiny_model_dir: Path) -> None:
    rng = random.Random(5)
    with running(tiny_model_dir, num_blocks=24) as engine:
        for i, prompt in enumerate(prompts(40, longest=60, seed=5)):
            inbox = Inbox()
            start = rng.choice((engine.generate, engine.prefill))
            start(request(f"r{i}", prompt, 32), inbox)
            if rng.random() < 0.7:
                inbox.until(rng.choice((Scheduled, Token)))
            engine.abort(f"r{i}")
            engine.abort(f"r{i}")  # once more is harmless
        assert held(engine) == (0, 0, 0)


def test_offered_blocks_stay_until_released(tiny_model_dir: Path) -> None:
    prompt = list(range(30))
    with running(tiny_model_dir) as engine:
        inbox = Inbox()
        engine.prefill(request("offer", prompt), inbox)
        scheduled = inbox.next()
        assert isinstance(scheduled, Scheduled) and len(scheduled.block_ids) == 4
        progress = [inbox.next() for _ in range(engine.pool.layout.num_layers)]
        assert progress == [Progress(tokens_ready=30, layers_ready=layer + 1) for layer in range(len(progress))]
        assert isinstance(inbox.next(), Token)
        assert held(engine) == (1, 4, 4)
        assert engine.renew("offer", 30.0).result(WAIT_S)
        engine.release("offer")
        assert held(engine) == (0, 0, 0)
        assert not engine.renew("offer", 30.0).result(WAIT_S)


def test_a_silent_reader_loses_its_lease_and_the_blocks_change_generation(tiny_model_dir: Path) -> None:
    clock = ManualClock()
    with running(tiny_model_dir, num_blocks=4, lease_s=5.0, clock=clock) as engine:
        inbox = Inbox()
        engine.prefill(request("offer", list(range(30))), inbox)
        scheduled = inbox.until(Scheduled)
        assert isinstance(scheduled, Scheduled)
        inbox.until(Token)
        offered = [int(engine.pool.generations[block]) for block in scheduled.block_ids]
        assert held(engine) == (1, 4, 4)
        clock.advance(5.1)
        failed = inbox.next()
        assert isinstance(failed, Failed) and "lease" in failed.error.message
        other = Inbox()
        engine.generate(request("other", list(range(100, 128)), 2), other)
        other.tokens()
        now = [int(engine.pool.generations[block]) for block in scheduled.block_ids]
        assert all(new > old for new, old in zip(now, offered, strict=True))
        assert engine.stats().num_lease_expiries == 1


def test_a_full_pool_waits_for_a_release_without_spinning(tiny_model_dir: Path) -> None:
    with running(tiny_model_dir, num_blocks=4) as engine:
        offer, waiting = Inbox(), Inbox()
        engine.prefill(request("offer", list(range(30))), offer)
        offer.until(Token)
        engine.generate(request("waiting", list(range(20)), 2), waiting)
        assert held(engine)[0] == 2
        steps = engine.stats().num_steps
        engine.release("offer")
        assert len(waiting.tokens()) == 2
        assert engine.stats().num_steps == steps + 2


def test_reserve_is_refused_when_there_is_no_room_and_takes_nothing(tiny_model_dir: Path) -> None:
    with running(tiny_model_dir, num_blocks=8) as engine:
        reservation = engine.reserve(request("a", list(range(40))), Inbox()).result(WAIT_S)
        assert len(reservation.block_ids) == 6 and reservation.num_cached_tokens == 0
        with pytest.raises(CapacityError):
            engine.reserve(request("b", list(range(40))), Inbox()).result(WAIT_S)
        assert held(engine) == (1, 6, 0)
        stats = engine.stats()
        assert (stats.num_receiving, stats.num_held, stats.num_reservations_refused) == (1, 0, 1)
        engine.abort("a")


def test_an_import_goes_on_where_the_peer_stopped(tiny_model_dir: Path) -> None:
    """Prefill in one engine, bytes copied by hand, decode in another: the tokens of one engine alone."""
    prompt = list(range(37))
    with running(tiny_model_dir) as prefill, running(tiny_model_dir) as decode:
        alone, offer, rest = Inbox(), Inbox(), Inbox()
        decode.generate(request("alone", prompt), alone)
        expected = alone.tokens()
        decode.call(Engine.clear_cache).result(WAIT_S)
        prefill.prefill(request("offer", prompt), offer)
        scheduled = offer.until(Scheduled)
        first = offer.until(Token)
        assert isinstance(scheduled, Scheduled) and isinstance(first, Token)
        reservation = decode.reserve(request("import", prompt), rest).result(WAIT_S)
        source, target = prefill.pool.shared.view(), decode.pool.shared.view()
        for there, here in zip(scheduled.block_ids, reservation.block_ids, strict=False):
            target[:, here] = source[:, there]
        prefill.release("offer")
        decode.start_import("import", first.output)
        assert [first.output.token_id, *rest.tokens()] == expected
        again = decode.reserve(request("again", prompt), Inbox()).result(WAIT_S)
        assert again.num_cached_tokens == 32  # what was imported serves later prompts
        decode.abort("again")


def test_a_failed_step_fails_its_requests_and_no_others(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tiny_model_dir) as engine:
        forward = engine.model.forward

        def broken(*args: object, **kwargs: object) -> object:
            monkeypatch.setattr(engine.model, "forward", forward)
            raise MemoryError("no room for scratch")

        monkeypatch.setattr(engine.model, "forward", broken)
        unlucky, lucky = Inbox(), Inbox()
        engine.generate(request("unlucky", [1, 2, 3]), unlucky)
        with pytest.raises(LocalError, match="no room for scratch"):
            unlucky.tokens()
        engine.generate(request("lucky", [1, 2, 3]), lucky)
        assert len(lucky.tokens()) == 8
        assert engine.stats().num_failed_steps == 1


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [
        ([], 4, "prompt"),
        ([1, 320], 4, "prompt"),  # the vocabulary has 320
        ([-1], 4, "prompt"),
        (list(range(200)), 400, "max_tokens"),
        ([1], 0, "max_tokens"),
    ],
)
def test_what_can_never_run_is_refused_by_field(
    tiny_model_dir: Path, prompt: list[int], max_tokens: int, field: str
) -> None:
    with running(tiny_model_dir) as engine:
        inbox = Inbox()
        engine.generate(request("bad", prompt, max_tokens), inbox)
        failed = inbox.next()
        assert isinstance(failed, Failed) and failed.error.field == field


def test_a_request_the_model_cannot_take_does_not_disturb_its_neighbours(tiny_model_dir: Path) -> None:
    with running(tiny_model_dir) as engine:
        good, bad_token, bad_bias = Inbox(), Inbox(), Inbox()
        engine.generate(request("good", [1, 2, 3], 24), good)
        engine.generate(request("bad token", [1, 10**6]), bad_token)
        sampling = SamplingParams(logit_bias={10**6: 5.0})
        engine.generate(GenerateRequest("bad bias", prompt_token_ids=(1,), sampling=sampling), bad_bias)
        with pytest.raises(LocalError, match="0 .. 319"):
            bad_token.tokens()
        with pytest.raises(LocalError, match="logit_bias"):
            bad_bias.tokens()
        assert len(good.tokens()) == 24
        assert engine.stats().num_failed_steps == 0


def test_what_cannot_be_sampled_ends_its_own_request_alone(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = SequenceSampler.sample

    def broken(self: SequenceSampler, row: np.ndarray) -> TokenOutput:
        if self._params.seed == 666:
            raise IndexError("nothing to draw from")
        return sample(self, row)

    monkeypatch.setattr(SequenceSampler, "sample", broken)
    with running(tiny_model_dir) as engine:
        good, bad = Inbox(), Inbox()
        engine.generate(request("good", [1, 2, 3], 24), good)
        engine.generate(GenerateRequest("bad", (1, 2), SamplingParams(max_tokens=8, seed=666)), bad)
        assert len(bad.tokens()) == 1 and len(good.tokens()) == 24
        assert engine.stats().num_failed_steps == 0


def test_stop_tells_everybody(tiny_model_dir: Path) -> None:
    loaded = load(LoadOptions(model_dir=tiny_model_dir, dtype="float32", block_size=8, num_kv_blocks=64))
    config = EngineConfig(SchedulerConfig(max_batch_tokens=64, max_running=16, max_context=512))
    engine = Engine(loaded.model, loaded.pool, config, MonotonicClock())
    engine.start()
    inbox = Inbox()
    engine.generate(request("long", [1, 2, 3], 500), inbox)
    inbox.until(Token)
    engine.stop()
    with pytest.raises(LocalError, match="stopped"):
        inbox.tokens()
    stats = engine.stats()
    assert not engine.alive
    assert (stats.num_active, stats.num_blocks_used) == (0, 0)


def test_import_that_ends_at_its_first_token_leaves_nothing(tiny_model_dir: Path) -> None:
    with running(tiny_model_dir) as engine:
        engine.reserve(request("short", list(range(10)), 4), Inbox()).result(WAIT_S)
        engine.start_import("short", TokenOutput(5, finish_reason="stop"))
        assert held(engine) == (0, 0, 0)
