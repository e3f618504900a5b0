"""Which tokens of which sequences run in the next step: continuous batching, chunked prefill, preemption by recompute.

    add ------------> waiting --schedule--> running --complete--> finished | held (prefill_only)
                         ^                     |                              |
                         +----- preempted -----+                        hold_released --> finished
    reserve_import -> receiving --import_done--> running          abort: from anywhere to finished

Order is (priority, arrival) everywhere; arrival never changes, so a preempted sequence goes back to its old place.
A step holds one token of every decoding sequence, then prefill chunks in that order until the token budget is spent
(``max_batch_tokens``; one sequence takes at most ``max_chunk_tokens`` of it). First come, first served: a long
prefill is worked off in chunks of whole budgets and delays those behind it, but never a decode, and never for ever.
With ``max_chunk_tokens`` below the budget, short prompts behind a long one run beside it. A prompt whose next block a
prefill before it is about to publish waits for that block instead of computing it twice.

Blocks for a whole prompt are taken when it is first scheduled, so a prefill that has begun never stops for lack of
blocks; only a decoding sequence grows. When it finds no block, the last sequence of the order that may be preempted
loses its blocks, keeps its output, and computes prompt and output anew later. Offered (prefill_only), held and
receiving sequences are never preempted: others read or write their blocks. Imports take blocks at once or are refused,
but never those that a sequence before them in the order waits for.

Invariants: ``num_computed`` tokens of a running sequence have their KV in ``blocks``; a block is published to the
prefix cache only after its last token was computed (``complete``) or arrived (``import_done``); at least one
token is computed after a prefix hit; a sequence that can never fit is refused. ``schedule`` advances nothing: a plan
that is not completed is simply planned again. Knows nothing about time, models, sampling, or what a token means.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from kvbaton.engine.sequence import Sequence, State
from kvbaton.engine.step_plan import StepItem, StepPlan
from kvbaton.kv.blocks import BlockManager, OutOfBlocks
from kvbaton.types import CapacityError, LocalError, TokenOutput


@dataclass(frozen=True)
class SchedulerConfig:
    max_batch_tokens: int = 2048  # rows of one step
    max_running: int = 256  # sequences in one step, receiving ones counted
    max_context: int = 8192  # prompt and output tokens of one sequence
    max_waiting: int = 1024
    max_chunk_tokens: int | None = None  # of one prefill in one step; None: up to the whole budget

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running", "max_context", "max_waiting", "max_chunk_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LocalError(f"{name} must be at least 1, got {value}", field=name)
        if self.max_batch_tokens < self.max_running:  # else decodes alone could fill every step and starve prefill
            raise LocalError(
                f"max_batch_tokens {self.max_batch_tokens} is below max_running {self.max_running}",
                field="max_batch_tokens",
                fix="raise it, or lower max_running",
            )


_order = attrgetter("order")


class Scheduler:
    """Owns every sequence from ``add`` or ``reserve_import`` until it is finished, and their blocks."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.config = config
        self.blocks = blocks
        self._block_size = blocks.block_size
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # both lists are sorted by order
        self._running: list[Sequence] = []
        self._num_receiving = 0
        self._num_held = 0
        self._num_arrived = 0
        self._backlog_tokens = 0
        # Who was last refused for want of blocks, and how much room there must be before another look can succeed:
        # matching a long prompt anew in every step would cost more than the step's planning.
        self._refused: Sequence | None = None
        self._refused_until = 0

    # -- load ----------------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_receiving(self) -> int:
        return self._num_receiving

    @property
    def num_held(self) -> int:
        return self._num_held

    @property
    def waiting_prompt_tokens(self) -> int:
        """Tokens to compute before every known sequence decodes: of the waiting ones those that were not cached when
        they came, and what is left of chunks."""
        return self._backlog_tokens

    def get(self, request_id: str) -> Sequence | None:
        """The sequence, unless it is unknown or finished."""
        return self._sequences.get(request_id)

    # -- coming ----------------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue it. ``CapacityError``: the queue is full; ``LocalError``: it can never run here."""
        self._validate(seq)
        if len(self._waiting) >= self.config.max_waiting:
            raise CapacityError(f"{len(self._waiting)} requests are waiting already", fix="retry later")
        self._register(seq)
        self._enqueue(seq)

    def reserve_import(self, seq: Sequence) -> int:
        """Take blocks for a prompt whose KV will be written from elsewhere, and one more token; or ``CapacityError``.

        Returns how many leading prompt tokens the blocks hold already: a multiple of the block size, below the prompt.
        """
        self._validate(seq)
        order = (seq.request.priority, self._num_arrived + 1)
        num_ahead = bisect_left(self._waiting, order, key=_order)
        if len(self._running) + self._num_receiving + num_ahead >= self.config.max_running:
            raise CapacityError(f"all {self.config.max_running} places in the batch are taken", fix="retry later")
        matched = self._match(seq)
        last_token = min(seq.num_prompt_tokens + 1, seq.num_prompt_tokens + seq.request.sampling.max_tokens - 1)
        num_fresh = self.blocks.blocks_for(last_token) - len(matched)
        num_kept = self._headroom() + sum(self.blocks.blocks_for(w.num_tokens) for w in self._waiting[:num_ahead])
        num_takable = self.blocks.num_takable(matched)
        if num_fresh + num_kept > num_takable:
            raise OutOfBlocks(
                f"{num_fresh} KV blocks are needed, {num_takable} are free and {num_kept} of them are spoken for",
                fix="retry later",
            )
        self._register(seq)
        self._take_blocks(seq, matched, num_fresh)
        seq.state = "receiving"
        seq.num_cached_tokens = seq.num_computed
        self._num_receiving += 1
        return seq.num_cached_tokens

    def import_done(self, request_id: str, first_token: TokenOutput) -> None:
        """The prompt's KV is in place and its first token was sampled elsewhere: it decodes from the next step on."""
        seq = self._expect(request_id, "receiving")
        self._num_receiving -= 1
        seq.num_computed = seq.num_prompt_tokens
        seq.prefilling = False
        self._publish(seq)
        seq.output_token_ids.append(first_token.token_id)
        seq.num_tokens += 1
        if first_token.finish_reason is not None:
            self._finish(seq)
        else:
            seq.state = "running"
            insort(self._running, seq, key=_order)

    def import_failed(self, request_id: str) -> None:
        """The KV will not come, and nothing writes into the blocks any more."""
        seq = self._expect(request_id, "receiving")
        self._num_receiving -= 1
        self._finish(seq)

    def _validate(self, seq: Sequence) -> None:
        max_tokens, num_prompt = seq.request.sampling.max_tokens, seq.num_prompt_tokens
        if seq.request_id in self._sequences:
            raise LocalError(f"request id {seq.request_id} is already in use", field="request_id")
        if num_prompt < 1:
            raise LocalError("the prompt is empty", field="prompt")
        prompt = seq.request.prompt_token_ids
        if prompt and not 0 <= min(prompt) <= max(prompt) < 1 << 32:  # here, so that planning a step cannot fail on it
            raise LocalError("a token id is negative or above 32 bits", field="prompt")
        if max_tokens < 1:
            raise LocalError(f"max_tokens must be at least 1, got {max_tokens}", field="max_tokens")
        if num_prompt + max_tokens > self.config.max_context:
            raise LocalError(
                f"{num_prompt} prompt tokens and {max_tokens} max_tokens exceed the context of "
                f"{self.config.max_context}",
                field="max_tokens",
                fix="shorten the prompt or lower max_tokens",
            )
        # The KV of the last token is never needed.
        num_needed = num_prompt if seq.mode == "prefill_only" else num_prompt + max_tokens - 1
        if self.blocks.blocks_for(num_needed) > self.blocks.num_blocks:
            raise LocalError(
                f"{num_needed} tokens of KV do not fit into {self.blocks.num_blocks} blocks of {self._block_size}",
                field="max_tokens",
                fix="shorten the prompt, lower max_tokens, or give the KV pool more memory",
            )

    def _register(self, seq: Sequence) -> None:
        self._num_arrived += 1
        seq.order = (seq.request.priority, self._num_arrived)
        self._sequences[seq.request_id] = seq

    def _enqueue(self, seq: Sequence) -> None:
        seq.state = "waiting"
        seq.prefilling = True
        insort(self._waiting, seq, key=_order)
        # What is cached now will hardly have to be computed: routers read this as the work that waits here.
        seq.num_foretold_tokens = len(self._match(seq)) * self._block_size
        self._backlog_tokens += seq.num_tokens - seq.num_foretold_tokens

    # -- one step --------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step. Its items are empty when nothing can run."""
        items, prefills, preempted = self._schedule_decodes()
        num_decodes = len(items)
        budget = self.config.max_batch_tokens - num_decodes
        for seq in prefills:
            if budget <= 0:
                break
            budget -= self._append_chunk(items, seq, budget)
        # A preempted sequence would take back what it just gave.
        while budget > 0 and self._waiting and not preempted:
            seq = self._waiting[0]
            if not self._admit(seq):
                break  # first come, first served: nobody overtakes
            budget -= self._append_chunk(items, seq, budget)
        num_prefill_tokens = self.config.max_batch_tokens - num_decodes - budget
        return StepPlan(tuple(items), tuple(preempted), num_decodes, num_prefill_tokens)

    def _schedule_decodes(self) -> tuple[list[StepItem], list[Sequence], list[Sequence]]:
        """One token for each decoding sequence; also the running prefills, and who was preempted for want of blocks."""
        items: list[StepItem] = []
        prefills: list[Sequence] = []
        preempted: list[Sequence] = []
        block_size = self._block_size
        for index, seq in enumerate(self._running):  # preemption shortens the list, but only behind seq
            if seq.prefilling:
                prefills.append(seq)
                continue
            start = seq.num_computed
            if start == len(seq.blocks) * block_size and not self._grow(seq, index, preempted):
                prefills.extend(self._running[index:])  # nobody behind it could be preempted: all prefill_only
                break
            items.append(StepItem(seq, start, 1, True))
        return items, prefills, preempted

    def _grow(self, seq: Sequence, index: int, preempted: list[Sequence]) -> bool:
        """One more block for ``running[index]``; False if it had to be preempted itself."""
        while self.blocks.num_free == 0:
            victim_index = len(self._running) - 1
            while self._running[victim_index].mode == "prefill_only":
                victim_index -= 1
            assert victim_index >= index, "a decoding sequence can be preempted, so the search ends at it"
            victim = self._running.pop(victim_index)
            self._preempt(victim)
            preempted.append(victim)
            if victim is seq:
                return False
        seq.blocks.extend(self.blocks.allocate(1))
        return True

    def _preempt(self, seq: Sequence) -> None:
        if seq.prefilling:
            self._backlog_tokens -= seq.num_tokens - seq.num_computed
        self._drop_blocks(seq)
        seq.num_preemptions += 1
        self._enqueue(seq)

    def _append_chunk(self, items: list[StepItem], seq: Sequence, budget: int) -> int:
        num_left = seq.num_tokens - seq.num_computed
        num_chunk = min(num_left, budget, self.config.max_chunk_tokens or budget)
        items.append(StepItem(seq, seq.num_computed, num_chunk, num_chunk == num_left))
        return num_chunk

    def _admit(self, seq: Sequence) -> bool:
        """Move the first waiting sequence to running, with blocks for all its tokens; False if there is no room."""
        if len(self._running) + self._num_receiving >= self.config.max_running:
            return False
        headroom = self._headroom()
        room = self.blocks.num_free + self.blocks.num_gained - headroom
        if self._refused is seq and room < self._refused_until:
            return False
        matched = self._match(seq)
        num_fresh = self.blocks.blocks_for(seq.num_tokens) - len(matched)
        num_lacking = num_fresh + headroom - self.blocks.num_takable(matched)
        if num_lacking > 0:
            self._refused, self._refused_until = seq, room + num_lacking
            return False
        if self._is_being_computed(seq, len(matched)):
            return False
        del self._waiting[0]
        self._take_blocks(seq, matched, num_fresh)
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed
        self._backlog_tokens += seq.num_foretold_tokens - seq.num_computed
        seq.state = "running"
        insort(self._running, seq, key=_order)
        return True

    def _is_being_computed(self, seq: Sequence, num_matched: int) -> bool:
        """Whether a prefill before it in the order is about to publish the block that ends the match.

        So the same prompt many times at once (``n`` > 1, a shared document) is computed once. The wait is no loss: that
        prefill comes first for the budget anyway.
        """
        if not self.blocks.prefix_caching or num_matched >= (seq.num_tokens - 1) // self._block_size:
            return False
        wanted = seq.block_hashes[num_matched : num_matched + 1]
        return bool(wanted) and any(
            other.prefilling
            and other.order < seq.order
            and other.num_published <= num_matched < other.num_tokens // self._block_size
            and other.block_hashes[num_matched : num_matched + 1] == wanted
            for other in self._running
        )

    def _headroom(self) -> int:
        """Blocks left alone for running sequences to grow into, so that a newcomer does not cause a preemption at once.

        None are kept when nothing runs, so the first in the queue always gets its turn.
        """
        return min(len(self._running), self.blocks.num_blocks // 100)

    def _match(self, seq: Sequence) -> list[int]:
        if not self.blocks.prefix_caching:
            return []
        num_matchable = (seq.num_tokens - 1) // self._block_size  # the last token is always computed
        return self.blocks.match(seq.hashes_of(num_matchable, self._block_size)[:num_matchable])

    def _take_blocks(self, seq: Sequence, matched: list[int], num_fresh: int) -> None:
        self.blocks.acquire(matched)
        seq.blocks = matched + self.blocks.allocate(num_fresh)
        seq.num_published = len(matched)
        seq.num_computed = len(matched) * self._block_size

    def _drop_blocks(self, seq: Sequence) -> None:
        self.blocks.release(seq.blocks)
        seq.blocks = []
        seq.num_computed = 0
        seq.num_published = 0

    def complete(self, plan: StepPlan, sampled: Mapping[str, TokenOutput]) -> None:
        """The step ran: ``sampled`` has a token for each item that samples. Sequences aborted meanwhile are skipped."""
        block_size = self._block_size
        num_left = 0
        for item in plan.items:
            seq = item.seq
            if seq.state != "running" or seq.num_computed != item.start:
                continue
            seq.num_computed += item.num_tokens
            if seq.prefilling:
                self._backlog_tokens -= item.num_tokens
            if seq.num_computed // block_size > seq.num_published:
                self._publish(seq)
            if not item.samples:
                continue
            output = sampled[seq.request_id]
            seq.output_token_ids.append(output.token_id)
            seq.num_tokens += 1
            seq.prefilling = False
            if seq.mode == "prefill_only":
                seq.state = "held"
                self._num_held += 1
                num_left += 1
            elif output.finish_reason is not None:
                self._finish(seq)
                num_left += 1
            else:
                assert seq.num_tokens < seq.max_num_tokens, "the sampler went past max_tokens"
        if num_left:
            self._running = [seq for seq in self._running if seq.state == "running"]

    def steps_alike(self, plan: StepPlan) -> int:
        """How often ``plan``, nothing but decodes, would be planned again in a row as long as nobody comes or goes.

        The last of those steps may finish a sequence; none of them preempts or admits. At least 1.
        """
        items = plan.items
        assert items and plan.num_decodes == len(items) and not plan.preempted
        steps = min(item.seq.request.sampling.max_tokens - item.seq.num_output_tokens for item in items)
        block_size = self._block_size
        num_wanted = sum(max(0, -(-(i.start + steps) // block_size) - len(i.seq.blocks)) for i in items)
        if num_wanted > self.blocks.num_free:
            steps = min(steps, *(len(i.seq.blocks) * block_size - i.start for i in items))
        return max(1, steps)

    def complete_alike(self, plan: StepPlan, steps: int, sampled: Mapping[str, TokenOutput]) -> None:
        """``plan`` ran ``steps`` times in a row (at most ``steps_alike``); ``sampled`` has the last step's tokens.

        For simulators, to which the tokens in between mean nothing: the state is that of so many single steps.
        """
        items = []
        for start, seq in ((item.start, item.seq) for item in plan.items):
            seq.output_token_ids.extend([0] * (steps - 1))
            seq.num_tokens += steps - 1
            num_fresh = self.blocks.blocks_for(start + steps) - len(seq.blocks)
            if num_fresh > 0:
                seq.blocks.extend(self.blocks.allocate(num_fresh))
            items.append(StepItem(seq, start, steps, True))
        self.complete(StepPlan(tuple(items), (), len(items), 0), sampled)

    def _publish(self, seq: Sequence) -> None:
        """Offer the blocks that became full to the prefix cache."""
        num_full = seq.num_computed // self._block_size
        if self.blocks.prefix_caching:
            hashes = seq.hashes_of(num_full, self._block_size)
            for index in range(seq.num_published, min(num_full, len(hashes))):
                self.blocks.publish(seq.blocks[index], hashes[index])
        seq.num_published = num_full

    # -- going -----------------------------------------------------------------------------------------------------

    def hold_released(self, request_id: str) -> bool:
        """The reader is done with the blocks of a held sequence, or gone. False if nothing was held."""
        seq = self._sequences.get(request_id)
        if seq is None or seq.state != "held":
            return False
        self._num_held -= 1
        self._finish(seq)
        return True

    def abort(self, request_id: str) -> bool:
        """Forget a sequence in any state. False if it is unknown or finished."""
        seq = self._sequences.get(request_id)
        if seq is None:
            return False
        match seq.state:
            case "waiting":
                del self._waiting[bisect_left(self._waiting, seq.order, key=_order)]
                self._backlog_tokens -= seq.num_tokens - seq.num_foretold_tokens
            case "running":
                del self._running[bisect_left(self._running, seq.order, key=_order)]
                if seq.prefilling:
                    self._backlog_tokens -= seq.num_tokens - seq.num_computed
            case "receiving":
                self._num_receiving -= 1
            case "held":
                self._num_held -= 1
        self._finish(seq)
        return True

    def _finish(self, seq: Sequence) -> None:
        if self._refused is seq:
            self._refused = None
        self._drop_blocks(seq)
        seq.state = "finished"
        del self._sequences[seq.request_id]

    def _expect(self, request_id: str, state: State) -> Sequence:
        seq = self._sequences.get(request_id)
        assert seq is not None and seq.state == state, f"{request_id} is not {state}: {seq}"
        return seq

    # -- invariants ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant, those of the blocks too: their references are the sequences' and the leases'."""
        by_state = Counter(seq.state for seq in self._sequences.values())
        assert by_state["finished"] == 0
        assert by_state["waiting"] == len(self._waiting) and all(s.state == "waiting" for s in self._waiting)
        assert by_state["running"] == len(self._running) and all(s.state == "running" for s in self._running)
        assert by_state["receiving"] == self._num_receiving and by_state["held"] == self._num_held
        assert self._waiting == sorted(self._waiting, key=_order) and self._running == sorted(self._running, key=_order)
        assert len(self._running) + self._num_receiving <= self.config.max_running
        backlog_tokens = 0
        held: Counter[int] = Counter()
        for request_id, seq in self._sequences.items():
            assert request_id == seq.request_id
            assert seq.num_tokens == seq.num_prompt_tokens + len(seq.output_token_ids)
            assert len(set(seq.blocks)) == len(seq.blocks)
            held.update(seq.blocks)
            if seq.state == "waiting":
                assert not seq.blocks and seq.num_computed == 0
            else:
                assert seq.num_computed <= len(seq.blocks) * self._block_size
                assert seq.num_computed < seq.num_tokens
                assert seq.num_published >= seq.num_computed // self._block_size or seq.state == "receiving"
            if seq.state == "waiting":
                backlog_tokens += seq.num_tokens - seq.num_foretold_tokens
            elif seq.state == "running" and seq.prefilling:
                backlog_tokens += seq.num_tokens - seq.num_computed
            if seq.state == "running" and not seq.prefilling:
                assert seq.num_computed == seq.num_tokens - 1, "a decoding sequence lacks just its last token"
            if seq.state == "held":
                assert seq.num_computed == seq.num_prompt_tokens
        assert backlog_tokens == self._backlog_tokens
        self.blocks.check(held)
