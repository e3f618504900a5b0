"""One request as it was measured, and the file that keeps every chunk of every request.

A run that is under way appends each request to a second file beside it as soon as it ends (``Journal``), so that a
client that dies leaves what it saw; the whole file takes its place when the run is over.

Invariants: all times are seconds on one clock, zero at the start of the run; ``intended_s`` is when the request was
due, and every headline latency counts from it. A file is JSON lines: a header with the whole configuration, one line
per request, a footer with what the client knows of itself. So a file with no footer is a run that was cut short.

Knows nothing about percentiles or prices.
"""

from __future__ import annotations

import gzip
import hashlib
import platform
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec

from kvbaton import __version__
from kvbaton.bench.arrivals import Phase
from kvbaton.bench.sse import VISIBLE, Chunk, ChunkKind, StreamReader
from kvbaton.types import UNREADABLE, LocalError

FORMAT = 1
RunPhase = Phase  # warm-up requests carry phase "warmup"


class RequestSample(msgspec.Struct, omit_defaults=True):
    """What happened to one request. Chunk times are those of the socket reads."""

    index: int
    phase: Phase
    intended_s: float
    started_s: float  # when the client turned to it; later than intended is the client's lag or its concurrency limit
    max_tokens: int
    prompt_tokens: int  # as built
    permit_wait_s: float = 0.0  # waited for the concurrency limit the user set
    connected_s: float | None = None
    sent_s: float | None = None
    headers_s: float | None = None
    closed_s: float | None = None
    status: int = 0
    error: str | None = None
    finish_reason: str | None = None
    output_tokens: int = 0
    counted_by: str = "none"
    usage_prompt_tokens: int | None = None
    usage_output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    tokenizer_tokens: int | None = None
    text: str | None = None
    headers: dict[str, str] = {}
    # One row per event: [time_s, ChunkKind, tokens]; tokens are 0 for events that show the user nothing.
    chunks: list[tuple[float, int, float]] = []

    @property
    def ok(self) -> bool:
        return self.error is None

    def visible(self) -> list[tuple[float, float]]:
        """(time_s, tokens) of the chunks that a user saw arrive."""
        return [(time, tokens) for time, kind, tokens in self.chunks if kind in VISIBLE]


class CountedTokens(msgspec.Struct):
    """How many output tokens, in which chunk, and by whose word."""

    total: int
    per_chunk: list[float]  # one per event, 0 where nothing was visible
    counted_by: str
    tokenizer_tokens: int | None = None


def count_tokens(reader: StreamReader, encode: Callable[[str], Sequence[int]] | None) -> CountedTokens:
    """Counts output tokens: by the server's usage if it sends one, else by the tokenizer over the whole text without
    special tokens (never chunk by chunk: that adds tokens at every seam), else one per chunk, and says which.
    """
    chunks = reader.chunks
    seen = [number for number, chunk in enumerate(chunks) if chunk.kind in VISIBLE]
    text = "".join(chunks[number].text for number in seen)
    by_tokenizer = len(encode(text)) if encode is not None else None
    per_chunk = [0.0] * len(chunks)
    if not seen:
        total = reader.usage.completion_tokens if reader.usage is not None else 0
        return CountedTokens(total, per_chunk, "usage" if reader.usage is not None else "none", by_tokenizer)
    own = _running_usage(chunks, seen) or _own_counts(chunks, seen)
    if reader.usage is not None and reader.usage.completion_tokens > 0:
        total, counted_by = reader.usage.completion_tokens, "usage"
    elif own is not None:
        total, counted_by = round(sum(own)), "chunks' own counts"
    elif by_tokenizer is not None:
        total, counted_by = by_tokenizer, "tokenizer"
    else:
        total, counted_by = len(seen), "chunks"
    if own is None:
        own = _spread(total, len(seen))
    for number, tokens in zip(seen, own, strict=True):
        per_chunk[number] = float(tokens)
    return CountedTokens(total, per_chunk, counted_by, by_tokenizer)


def _running_usage(chunks: Sequence[Chunk], seen: Sequence[int]) -> list[float] | None:
    """Differences of a usage that runs along with the text; None when usage came only once, at the end."""
    if sum(chunks[number].total_tokens is not None for number in seen) < max(2, len(seen) // 2):
        return None
    tokens: list[float] = []
    before = 0
    for number in seen:
        total = chunks[number].total_tokens
        tokens.append(max(0, total - before) if total is not None else 0)
        before = max(before, total or 0)
    return tokens


def _own_counts(chunks: Sequence[Chunk], seen: Sequence[int]) -> list[float] | None:
    if any(chunks[number].num_tokens is None for number in seen):
        return None
    return [float(chunks[number].num_tokens or 0) for number in seen]


def _spread(total: int, num_chunks: int) -> list[float]:
    """One token a chunk when that is what the total says (a final stop token shows no chunk), else even shares."""
    if num_chunks <= total <= num_chunks + 1:
        return [1.0] * num_chunks
    return [total / num_chunks] * num_chunks


def fill_from_stream(
    sample: RequestSample, reader: StreamReader, zero_s: float, encode: Callable[[str], Sequence[int]] | None
) -> None:
    """Moves what the stream said into the sample."""
    counted = count_tokens(reader, encode)
    sample.output_tokens, sample.counted_by = counted.total, counted.counted_by
    sample.tokenizer_tokens = counted.tokenizer_tokens
    sample.finish_reason = reader.finish_reason
    if reader.error is not None and sample.error is None:
        sample.error = reader.error
    usage = reader.usage
    if usage is not None:
        sample.usage_prompt_tokens = usage.prompt_tokens
        sample.usage_output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            sample.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens_details is not None:
            sample.reasoning_tokens = usage.completion_tokens_details.reasoning_tokens
    sample.chunks = [
        (round(chunk.time_s - zero_s, 6), int(chunk.kind), tokens)
        for chunk, tokens in zip(reader.chunks, counted.per_chunk, strict=True)
    ]
    if sample.error is None and not any(kind in VISIBLE for _, kind, _ in sample.chunks):
        # A stop token as the very first token is a whole answer with nothing to see.
        if sample.finish_reason is None:
            sample.error = "no output"
        sample.chunks = sample.chunks or [(round((sample.closed_s or 0.0), 6), int(ChunkKind.FINISH), 0.0)]


class ClientReport(msgspec.Struct):
    """What the client knows of itself; decides whether the run may be trusted."""

    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    cpu_share: float  # of one core, over the timed run
    chunks_per_s: float
    max_in_flight: int
    valid: bool
    reasons: list[str]


class RunHeader(msgspec.Struct):
    """Everything needed to repeat the run."""

    config: dict[str, Any]
    started_at: str
    versions: dict[str, str]
    format: int = FORMAT


class RunFooter(msgspec.Struct):
    client: ClientReport
    wall_s: float
    server_metrics: dict[str, Any] = {}
    zero_monotonic_s: float = 0.0  # the run's zero on the machine's own clock, to set it beside other records there


class Run(msgspec.Struct):
    """A finished run, from memory or from its file."""

    header: RunHeader
    samples: list[RequestSample]
    footer: RunFooter

    def measured(self, keep_warmup: bool = False) -> list[RequestSample]:
        """The cohort of the steady window: those that were due in it."""
        phases = ("steady", "warmup") if keep_warmup else ("steady",)
        return [sample for sample in self.samples if sample.phase in phases]


def versions() -> dict[str, str]:
    return {"kvbaton": __version__, "python": platform.python_version(), "system": platform.platform()}


class SampleWriter:
    """Writes a samples file line by line; gzipped when its name ends in .gz."""

    def __init__(self, path: Path, header: RunHeader) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # mtime 0 keeps equal content equal, byte for byte.
        raw = path.open("wb")
        self._file: IO[bytes] = gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) if path.suffix == ".gz" else raw  # type: ignore[assignment]
        self._raw = raw
        self._line({"kind": "header", **msgspec.to_builtins(header)})

    def write(self, sample: RequestSample) -> None:
        self._line({"kind": "request", **msgspec.to_builtins(sample)})

    def finish(self, footer: RunFooter) -> None:
        self._line({"kind": "footer", **msgspec.to_builtins(footer)})

    def _line(self, record: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._raw.close()


def write_run(path: Path, run: Run) -> None:
    """The whole file at once: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.half{path.suffix}")
    if path.suffix == ".parquet":
        from kvbaton.bench.samples_parquet import write_parquet

        write_parquet(half, run)
    else:
        with SampleWriter(half, run.header) as writer:
            for sample in run.samples:
                writer.write(sample)
            writer.finish(run.footer)
    half.replace(path)


class Journal:
    """Samples as they come, one line each and no buffer of ours: what the client saw outlives it.

    Output tokens are not counted yet (chunks stand for tokens), for counting may wait until the load is over.
    """

    def __init__(self, path: Path, header: RunHeader) -> None:
        self.path = path.with_name(f"{path.name}.part")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb", buffering=0)
        self._line({"kind": "header", **msgspec.to_builtins(header)})

    def append(self, sample: RequestSample, reader: StreamReader, zero_s: float) -> None:
        seen = msgspec.structs.replace(sample)
        fill_from_stream(seen, reader, zero_s, None)
        self._line({"kind": "request", **msgspec.to_builtins(seen)})

    def _line(self, record: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")

    def close(self, done: bool) -> None:
        """``done``: the whole file is there, and this one is not needed any more."""
        self._file.close()
        if done:
            self.path.unlink()


def recover(path: Path) -> Run:
    """What a run that was cut short left in its ``.part`` file; marked as not valid. A torn last line is left out."""
    header: RunHeader | None = None
    samples: list[RequestSample] = []
    for line in _lines(path):
        try:
            record = msgspec.json.decode(line, type=dict[str, Any])
            kind = record.pop("kind")
            if kind == "header":
                header = msgspec.convert(record, RunHeader)
            elif kind == "request":
                samples.append(msgspec.convert(record, RequestSample))
        except (*UNREADABLE, AttributeError, KeyError):
            break
    if header is None:
        raise LocalError(f"{path} does not begin as a samples file", field="samples")
    report = ClientReport(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, False, ["the run was cut short"])
    wall_s = max((sample.closed_s or sample.started_s for sample in samples), default=0.0)
    return Run(header, samples, RunFooter(report, wall_s))


def read_run(path: Path) -> Run:
    """Reads a samples file; LocalError with the line when it is not one or was cut short."""
    if path.suffix == ".parquet":
        from kvbaton.bench.samples_parquet import read_parquet

        return read_parquet(path)
    header: RunHeader | None = None
    footer: RunFooter | None = None
    samples: list[RequestSample] = []
    for number, line in enumerate(_lines(path), start=1):
        try:
            record = msgspec.json.decode(line, type=dict[str, Any])
            match record.pop("kind"):
                case "header":
                    header = msgspec.convert(record, RunHeader)
                case "request":
                    samples.append(msgspec.convert(record, RequestSample))
                case "footer":
                    footer = msgspec.convert(record, RunFooter)
        except (*UNREADABLE, AttributeError, KeyError) as error:
            raise LocalError(f"{path}:{number} is not a line of a samples file: {error}", field="samples") from error
    if header is None or footer is None:
        raise LocalError(
            f"{path} has no {'header' if header is None else 'footer'}: the run was cut short", field="samples"
        )
    return Run(header, samples, footer)


def _lines(path: Path) -> Iterable[bytes]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise LocalError(f"{path} cannot be read: {error}", field="samples") from error


def file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
