"""One run from its specification: tokenizer, prompts, warm-up, load, scrapes, samples.

Knows nothing about tables or comparisons.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.bench.client import ClientConfig, LoadClient, Progress
from kvbaton.bench.http_stream import HttpPool
from kvbaton.bench.prompts import Codec, PromptBuilder
from kvbaton.bench.samples import Journal, RequestSample, Run, RunFooter, RunHeader, versions, write_run
from kvbaton.bench.samples_parquet import pyarrow
from kvbaton.bench.server_metrics import Scrape, moved_between, parse, transfer_between
from kvbaton.bench.workload import LoadSpec, RequestFactory, plan_work
from kvbaton.types import UNREADABLE, LocalError, RemoteError

# Only secrets in headers: they go with the requests, never into a file.
SECRET_HEADERS = frozenset(("authorization", "api-key", "x-api-key"))


class Tokenized(msgspec.Struct):
    """The tokenizer of a run and how a prompt's tokens are counted with it."""

    codec: Codec | None
    count: Callable[[str], int] | None
    name: str
    note: str = ""


def load_tokenizer(spec: LoadSpec, served_root: str = "") -> Tokenized:
    """The tokenizer in ``spec.tokenizer``, else the served model's own directory if it is here, else the default's."""
    if spec.tokenizer == "none":
        return Tokenized(None, None, "none", "no tokenizer: a word stands for a token, prompt lengths are not exact")
    from kvbaton.engine.tokenizer import Tokenizer

    if spec.tokenizer:
        path = Path(spec.tokenizer)
    elif served_root and (Path(served_root) / "tokenizer.json").is_file():
        path = Path(served_root)
    else:
        from kvbaton.engine.weights import default_model_dir

        path = default_model_dir()
    tokenizer = Tokenizer.load(path)
    # Reports are for sharing: whose home the tokenizer lies in is nobody's business.
    name = str(path).replace(str(Path.home()), "~")
    if spec.endpoint == "completions":
        return Tokenized(tokenizer, lambda text: len(tokenizer.encode(text)), name)
    if not tokenizer.has_chat_template:
        note = "the tokenizer has no chat template: prompts are longer at the server by its template"
        return Tokenized(tokenizer, lambda text: len(tokenizer.encode(text)), name, note)
    return Tokenized(tokenizer, lambda text: len(tokenizer.chat([{"role": "user", "content": text}])), name)


async def served_model(url: str, headers: dict[str, str]) -> tuple[str, str]:
    """(name, root) of the first model the endpoint lists; RemoteError when it lists none."""
    pool = HttpPool(origin_of(url), time.monotonic, headers)
    try:
        status, body = await pool.get("/v1/models")
    finally:
        pool.close()
    try:
        first = msgspec.json.decode(body)["data"][0]
        return str(first["id"]), str(first.get("root") or "")
    except (*UNREADABLE, KeyError, IndexError, TypeError) as error:
        raise RemoteError(
            f"{url}/v1/models answered {status} without a model", field="model", fix="give --model NAME"
        ) from error


def origin_of(url: str) -> str:
    """The address without a trailing /v1, which people rightly paste as well."""
    return url.rstrip("/").removesuffix("/v1")


async def scrape(urls: Sequence[str]) -> Scrape | None:
    """Metrics of all addresses summed; None when none of them has any."""
    text = []
    for url in urls:
        pool = HttpPool(origin_of(url).removesuffix("/metrics"), time.monotonic, connect_timeout_s=2)
        try:
            status, body = await pool.get("/metrics", deadline_s=5)
            if status == 200:
                text.append(body.decode("utf-8", "replace"))
        except RemoteError:
            continue
        finally:
            pool.close()
    if not text:
        return None
    parts = []
    for page in text:
        try:
            parts.append(parse(page))
        except ValueError:
            continue  # an endpoint of another kind answers 200 with something else
    merged = Scrape({}, {})
    for part in parts:
        for name, buckets in part.buckets.items():
            target = merged.buckets.setdefault(name, {})
            for edge, value in buckets.items():
                target[edge] = target.get(edge, 0.0) + value
        for name, value in part.values.items():
            merged.values[name] = merged.values.get(name, 0.0) + value
    return merged if parts else None


async def run_load(
    spec: LoadSpec,
    headers: dict[str, str] | None = None,
    metrics_urls: Sequence[str] = (),
    samples_path: Path | None = None,
    watch: Callable[[Progress], None] = lambda progress: None,
) -> Run:
    """Runs the load and returns all samples; with ``samples_path`` they are also kept in that file, and each in the
    journal beside it as soon as it is there."""
    headers = headers or {}
    if samples_path is not None and samples_path.suffix == ".parquet":
        pyarrow()  # before anything runs
    root = ""
    if not spec.model:
        name, root = await served_model(spec.url, headers)
        spec = msgspec.structs.replace(spec, model=name)
    tokenized = load_tokenizer(spec, root)
    builder = PromptBuilder(tokenized.codec, spec.seed, tokenized.count) if tokenized.codec is not None else None
    work = plan_work(spec, tokenized.codec)
    if not work.items:
        raise LocalError("no request falls in the run", field="rate", fix="raise --rate or --duration")
    factory = RequestFactory(spec, builder)
    warm, timed = factory.warm_up(work), factory.timed(work)
    config = ClientConfig(
        url=origin_of(spec.url),
        path=spec.path,
        headers=headers,
        timeout_s=spec.timeout_s,
        max_concurrency=spec.max_concurrency,
        save_text=spec.save_text,
        max_lag_ms=spec.max_lag_ms,
    )
    codec = tokenized.codec
    client = LoadClient(config, (lambda text: codec.encode(text, False)) if codec is not None else None)
    watch(client.progress)
    notes = [*work.notes, *([tokenized.note] if tokenized.note else [])]
    header = _header(spec, tokenized, headers, notes)
    urls = metrics_urls or (spec.url,)
    before = await scrape(urls)
    journal = Journal(samples_path, header) if samples_path is not None else None
    if journal is not None:
        client.on_end = journal.append
    done = False
    try:
        warmed = await client.warm_up(warm, spec.warmup_concurrency) if warm else []
        if spec.arrivals == "closed":
            samples, report = await client.run_closed(timed, spec.concurrency, spec.phases.total_s)
            _phase_by_start(samples, spec)
        else:
            samples, report = await client.run_open(timed)
        client.pool.close()
        after = await scrape(urls)
        wall_s = max((sample.closed_s or sample.started_s for sample in samples), default=0.0)
        footer = RunFooter(report, wall_s, _server(before, after), client.zero_s)
        run = Run(header, [*warmed, *sorted(samples, key=lambda sample: sample.index)], footer)
        if samples_path is not None:
            write_run(samples_path, run)
        done = True
        return run
    finally:
        client.pool.close()
        if journal is not None:
            journal.close(done)


def _phase_by_start(samples: Sequence[RequestSample], spec: LoadSpec) -> None:
    """In a closed loop a request is due when its user is free, which is known only afterwards."""
    for sample in samples:
        sample.phase = spec.phases.phase_at(sample.intended_s)


def _header(spec: LoadSpec, tokenized: Tokenized, headers: dict[str, str], notes: Sequence[str]) -> RunHeader:
    config: dict[str, Any] = msgspec.to_builtins(spec)
    config["tokenizer"] = tokenized.name
    config["headers"] = {
        name: "(hidden)" if name.lower() in SECRET_HEADERS else value for name, value in headers.items()
    }
    config["notes"] = list(notes)
    return RunHeader(config, datetime.now(UTC).isoformat(timespec="seconds"), versions())


def _server(before: Scrape | None, after: Scrape | None) -> dict[str, Any]:
    if before is None or after is None:
        return {}
    found: dict[str, Any] = {}
    transfer = transfer_between(before, after)
    if transfer is not None:
        found["transfer"] = msgspec.to_builtins(transfer)
    moved = moved_between(before, after)
    if moved is not None:
        found["moved"] = msgspec.to_builtins(moved)
    return found
