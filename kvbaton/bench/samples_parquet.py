"""A samples file as Parquet, for those who load runs into data frames: one row a request, chunks as list columns.

Columns are the fields of ``RequestSample``; a request's chunks are three lists of equal length. Header and footer are
JSON in the file's own metadata, under ``kvbaton.header`` and ``kvbaton.footer``, so the file alone is the whole run.

Needs pyarrow, which the ``parquet`` extra installs. Knows nothing about how runs are made.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from kvbaton.bench.samples import RequestSample, Run, RunFooter, RunHeader
from kvbaton.types import UNREADABLE, LocalError

HEADER, FOOTER = b"kvbaton.header", b"kvbaton.footer"
CHUNKS = ("chunk_time_s", "chunk_kind", "chunk_tokens")


def pyarrow() -> tuple[ModuleType, ModuleType]:
    """(pyarrow, pyarrow.parquet); LocalError when they are not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise LocalError(
            "Parquet needs pyarrow", field="samples", fix="pip install 'kvbaton[parquet]', or name the file .jsonl.gz"
        ) from error
    return pyarrow, pyarrow.parquet


def write_parquet(path: Path, run: Run) -> None:
    arrow, parquet = pyarrow()
    rows = [_row(sample) for sample in run.samples]
    names = [name for name in RequestSample.__struct_fields__ if name != "chunks"]
    types = _types(arrow)
    schema = arrow.schema(
        [(name, types.get(name, arrow.float64())) for name in (*names, *CHUNKS)],
        metadata={HEADER: msgspec.json.encode(run.header), FOOTER: msgspec.json.encode(run.footer)},
    )
    table = arrow.Table.from_pylist(rows, schema=schema)
    parquet.write_table(table, path, compression="zstd")


def read_parquet(path: Path) -> Run:
    _, parquet = pyarrow()
    try:
        table = parquet.read_table(path)
        metadata = table.schema.metadata
        header = msgspec.json.decode(metadata[HEADER], type=RunHeader)
        footer = msgspec.json.decode(metadata[FOOTER], type=RunFooter)
        samples = [_sample(row) for row in table.to_pylist()]
    except (OSError, KeyError, TypeError, ValueError, *UNREADABLE) as error:
        raise LocalError(f"{path} is not a samples file: {error}", field="samples") from error
    return Run(header, samples, footer)


def _types(arrow: ModuleType) -> dict[str, Any]:
    whole = dict.fromkeys(
        ("index", "max_tokens", "prompt_tokens", "status", "output_tokens", "usage_prompt_tokens",
         "usage_output_tokens", "cached_tokens", "reasoning_tokens", "tokenizer_tokens"),
        arrow.int64(),
    )  # fmt: skip
    words = dict.fromkeys(("phase", "error", "finish_reason", "counted_by", "text"), arrow.string())
    lists = {"chunk_kind": arrow.list_(arrow.int8())}
    lists |= dict.fromkeys(("chunk_time_s", "chunk_tokens"), arrow.list_(arrow.float64()))
    return {**whole, **words, **lists, "headers": arrow.map_(arrow.string(), arrow.string())}


def _row(sample: RequestSample) -> dict[str, Any]:
    row = {name: getattr(sample, name) for name in RequestSample.__struct_fields__ if name != "chunks"}
    row["headers"] = list(sample.headers.items())
    for place, name in enumerate(CHUNKS):
        row[name] = [chunk[place] for chunk in sample.chunks]
    return row


def _sample(row: dict[str, Any]) -> RequestSample:
    chunks = zip(*(row.pop(name) for name in CHUNKS), strict=True)
    headers = dict(row.pop("headers"))
    return msgspec.convert({**row, "headers": headers, "chunks": list(chunks)}, RequestSample)
