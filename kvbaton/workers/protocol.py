"""What a worker is to the code above it: one protocol, the events of one request, and the internal wire structs.

``native.NativeWorker`` implements ``Worker``; adapters for other engines will. Knows nothing about HTTP or text.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import msgspec

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import Fingerprint, FinishReason, GenerateRequest, Role, TokenOutput
from kvbaton.workers.kv_events import KVEventLog


class PeerAddress(msgspec.Struct, frozen=True):
    """Where a prefill worker's hand-off server listens."""

    host: str
    port: int


class Admitted(msgspec.Struct, frozen=True):
    """The request is in a batch. First event of every request that is not refused."""

    num_prompt_tokens: int
    num_cached_tokens: int  # prefix-cache hit: the local one, or the prefill side's for a remote request
    num_remote_tokens: int = 0  # tokens whose KV was (or is being) pulled from a peer
    path: str = "local"  # or "remote"


class Finished(msgspec.Struct, frozen=True):
    """Last event of a request that ended well."""

    transfer_bytes: int = 0
    queue_s: float = 0.0  # 0: the engine does not tell, and so with those below
    prefill_s: float = 0.0
    transfer_s: float = 0.0  # from Start to the last byte
    exposed_s: float = 0.0  # last byte minus first token
    decode_queue_s: float = 0.0  # from everything in place to the first decode step; 0: it never decoded
    first_step_s: float = 0.0  # from there, or locally from the first token, to the second token
    num_cached_tokens: int | None = None  # of engines that say only now what the prefix cache had
    copying_s: float = 0.0  # of the transfer, while any copy was under way


WorkerEvent = Admitted | TokenOutput | Finished


class WorkerStats(msgspec.Struct, frozen=True):
    """Load and totals of one worker: gauges are now, totals since it started."""

    num_waiting: int = 0
    num_running: int = 0
    waiting_prompt_tokens: int = 0
    num_active: int = 0  # every request the engine knows, held and receiving ones too
    num_blocks: int = 0
    num_blocks_used: int = 0
    num_blocks_free: int = 0
    num_blocks_cached: int = 0
    num_blocks_pinned: int = 0
    num_leases: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0  # computed here
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_lease_expiries: int = 0
    num_failed_steps: int = 0
    prefill_busy_s: float = 0.0
    decode_busy_s: float = 0.0
    transfer_bytes_sent: int = 0
    transfer_bytes_received: int = 0
    num_transfers: int = 0
    num_transfer_failures: int = 0
    num_receiving: int = 0  # blocks reserved, KV still to come from a peer
    num_held: int = 0  # computed here, not yet read by a peer
    num_reservations_refused: int = 0  # no room for KV that a peer would have computed
    num_tier_hits: int = 0  # of the shared KV tier: see ``kv.tiering``
    num_tier_tokens: int = 0
    num_tier_fallbacks: int = 0
    num_tier_wrong_blocks: int = 0
    num_tier_dropped_blocks: int = 0
    num_tier_evicted_blocks: int = 0
    num_tier_errors: int = 0
    tier_written_bytes: int = 0
    tier_memory_bytes: int = 0
    tier_disk_bytes: int = 0
    num_tier_store_blocks: int = 0
    tier_store_written_bytes: int = 0
    tier_store_up: int = 0
    tier_wait_s: float = 0.0


class Worker(Protocol):
    """An engine and its side of the hand-off, in this process."""

    model_id: str
    max_context: int
    fingerprint: Fingerprint
    incarnation: str  # fresh for each life of the process
    kv_port: int  # of the hand-off server; 0 when this role has none
    tokenizer: Tokenizer
    kv_events: KVEventLog | None  # None: this engine does not say what its prefix cache holds
    serves_alone: bool  # whether it computes prompts and answers them too; some servers do only half of it

    @property
    def role(self) -> Role: ...

    @property
    def disconnected(self) -> bool: ...  # the engine is a server of its own, and refuses connections

    async def start(self) -> None: ...
    async def drain(self, deadline_s: float) -> bool: ...
    async def stop(self) -> None: ...
    async def switch_role(self, role: Role, deadline_s: float) -> bool:
        """Become ``role``; False, and nothing changed, when peers still read at the deadline, or when its engine only
        does what it was started for. No request is open."""
        ...

    def generate(
        self, request: GenerateRequest, prefill: PeerAddress | None = None, deadline_s: float = 600.0
    ) -> AsyncGenerator[WorkerEvent, bool | None]:
        """Admitted, then TokenOutput ..., then Finished. Closing the iterator aborts the request everywhere.

        A consumer that needs no more tokens sends True instead of asking for the next event: a worker that knows what
        the request took until then aborts it and answers with Finished. One that does not just goes on.

        Raises CapacityError (no room), LocalError with a field (bad input), RemoteError (the prefill peer failed).
        """
        ...

    def stats(self) -> WorkerStats: ...


INTERNAL_KEY_HEADER = b"x-kvbaton-key"
# Of ``/internal/*`` and the internal object. Neighbours understand each other: fields are only added, each with what
# its absence means, and what a worker may not know yet is not sent to one that says an older version.
CONTROL_VERSION = 2  # 1 did not say which one it was


class ResumedSequence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the client has of one choice already, from a worker that failed in the middle."""

    token_ids: tuple[int, ...] = ()  # sampled so far
    finish_reason: FinishReason | None = None  # set: this choice is complete, only its tokens count
    opened: bool = False  # the event that names the role was sent
    num_cached_tokens: int = 0  # of its prompt, as the first worker reported it


class InternalRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``kvbaton`` object that the router adds to a body. Honoured only together with the internal key."""

    request_id: str
    prompt_token_ids: tuple[Sequence[int], ...]  # one per prompt, tokenized by the router
    prefill: PeerAddress | None = None
    deadline_s: float = 600.0
    cache_salt: str = ""
    priority: int = 0
    journal: bool = False  # a stream says before each event which token ids are in it; see ``generation``
    created_s: int = 0  # of the answer; 0: the worker's own clock
    answer_id: str = ""  # of the answer, where it is not ``request_id``: a stream keeps its id when it is continued
    resume: tuple[ResumedSequence, ...] = ()  # one for each choice: go on behind these


class WorkerInfo(msgspec.Struct, frozen=True):
    """Answer of ``GET /internal/info``: who this worker is, and how busy."""

    state: str  # starting | serving | draining | switching | disconnected (from the engine's server)
    role: Role
    model_id: str
    incarnation: str
    fingerprint: Fingerprint
    max_context: int  # tokens of prompt and output together that this worker can hold
    block_size: int
    kv_host: str  # empty: the host of the HTTP address
    kv_port: int
    stats: WorkerStats
    chunk_tokens: int = 512  # of one engine step
    max_running: int = 64  # sequences in one batch
    role_changes: int = 0  # how often it was told another role since it started; above 0 its word on its role counts
    pid: int = 0  # of its process, on its own host
    kv_events: bool = False  # whether it answers ``/internal/kv-events``
    control_version: int = 1
    serves_alone: bool = True  # False: it is of use only in a pair of prefill and decode worker
    engine_bootstrap_port: int = 0  # where it looks for MooncakeConnector's bootstrap servers; 0: nowhere
    engine_url: str = ""  # of the server of another engine that it drives, as it reaches it itself
    time_s: float = 0.0  # of day, by its clock


class RequestReport(msgspec.Struct, frozen=True):
    """What the worker tells the router about one finished request (internal header or SSE comment)."""

    path: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_remote_tokens: int
    num_output_tokens: int
    transfer_bytes: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    decode_queue_s: float = 0.0
    first_step_s: float = 0.0
    copying_s: float = 0.0
