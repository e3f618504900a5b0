"""What fewer bits cost: perplexity and agreement of bfloat16, int8 and int4 weights against float32, on real text.

    make bench-quality
    python -m benchmarks.quality --help

The text is the language reference of the standard library (benchmarks/peers/prompts.py). Each window is one prefill;
every position's logits are compared. Perplexity counts each token given those before it in its window. Agreement is how
often the most likely token is float32's; divergence is the mean Kullback-Leibler divergence from float32, in nats.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import numpy as np

from benchmarks.peers.prompts import TEXT, TEXT_SHA256, Windows
from kvbaton.engine.loader import LoadedModel, LoadOptions, load
from kvbaton.engine.model import StepInput

VARIANTS = {
    "float32": ("float32", "native"),
    "bfloat16": ("bfloat16", "native"),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}


@dataclass
class Tally:
    """Sums over all compared positions of one variant."""

    num_tokens: int = 0
    num_agree: int = 0
    loss_nats: float = 0.0
    divergence_nats: float = 0.0

    def add(self, log_probs: np.ndarray, reference: np.ndarray, next_ids: np.ndarray) -> None:
        rows = np.arange(len(next_ids))
        self.num_tokens += len(next_ids)
        self.num_agree += int((log_probs.argmax(axis=1) == reference.argmax(axis=1)).sum())
        self.loss_nats -= float(log_probs[rows, next_ids].sum(dtype=np.float64))
        self.divergence_nats += float((np.exp(reference) * (reference - log_probs)).sum(dtype=np.float64))


@dataclass(frozen=True)
class Row:
    weights: str
    perplexity: float
    perplexity_over_float32: float
    agreement: float
    divergence_nats: float
    num_tokens: int


def log_probs(loaded: LoadedModel, token_ids: list[int]) -> np.ndarray:
    """Float32 log-probabilities [tokens, vocabulary] of one window, computed as a single prefill."""
    num = len(token_ids)
    step = StepInput(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        positions=np.arange(num, dtype=np.int32),
        seq_starts=np.asarray([0, num], dtype=np.int32),
        context_lens=np.asarray([num], dtype=np.int32),
        block_table=np.arange(loaded.model.layout.blocks_for(num), dtype=np.int32)[None, :],
        sample_rows=np.arange(num, dtype=np.int32),
    )
    logits = np.array(loaded.model.forward(step, loaded.pool), dtype=np.float32)
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits


def compare(variants: list[str], num_windows: int, window_tokens: int, backend: str) -> list[Row]:
    models = {
        name: load(
            LoadOptions(
                dtype=VARIANTS[name][0],
                weights=VARIANTS[name][1],
                backend=backend,
                num_kv_blocks=window_tokens // 16 + 1,
            )
        )
        for name in dict.fromkeys(["float32", *variants])
    }
    token_ids = models["float32"].tokenizer.encode(TEXT)
    tallies = {name: Tally() for name in models}
    for window in Windows(token_ids).take(num_windows, window_tokens):
        next_ids = np.asarray(window[1:])
        reference = log_probs(models["float32"], window)[:-1]
        for name, loaded in models.items():
            own = reference if name == "float32" else log_probs(loaded, window)[:-1]
            tallies[name].add(own, reference, next_ids)
    for loaded in models.values():
        loaded.pool.close()
    perplexity = {name: float(np.exp(t.loss_nats / t.num_tokens)) for name, t in tallies.items()}
    return [
        Row(
            name,
            perplexity[name],
            perplexity[name] / perplexity["float32"],
            tally.num_agree / tally.num_tokens,
            tally.divergence_nats / tally.num_tokens,
            tally.num_tokens,
        )
        for name, tally in tallies.items()
    ]


@click.command()
@click.option("--weights", default="bfloat16,int8,int4", show_default=True, help="Compared with float32.")
@click.option("--windows", default=16, show_default=True, help="Windows of text.")
@click.option("--window-tokens", default=512, show_default=True, help="Tokens in each.")
@click.option("--backend", default="auto", show_default=True, type=click.Choice(["auto", "native", "torch"]))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the rows here.")
def main(weights: str, windows: int, window_tokens: int, backend: str, json_path: Path | None) -> None:
    """Measure, and print a table."""
    rows = compare(weights.split(","), windows, window_tokens, backend)
    if json_path is not None:
        json_path.write_text(json.dumps({"text_sha256": TEXT_SHA256, "rows": [asdict(row) for row in rows]}, indent=1))
    print("| weights | perplexity | over float32 | same top token | divergence (nats) |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(
            f"| {row.weights} | {row.perplexity:.3f} | {row.perplexity_over_float32:.4f} | {row.agreement:.2%} "
            f"| {row.divergence_nats:.5f} |"
        )


if __name__ == "__main__":
    main()
