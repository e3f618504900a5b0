"""A server's figures, from whatever it answers."""

from __future__ import annotations

import pytest

from kvbaton.workers.vllm_metrics import EngineFigures, read_figures

LAST = EngineFigures(num_running=3, num_waiting=2, usage=0.5, num_blocks=10, block_size=16)


@pytest.mark.parametrize(
    ("text", "odd"),
    [
        ("vllm:num_requests_running NaN\n", ("num_running",)),
        ("vllm:num_requests_running +Inf\n", ("num_running",)),
        ("vllm:num_requests_running -1\n", ("num_running",)),
        ("vllm:num_requests_running 1e300\n", ("num_running",)),
        ("vllm:num_requests_running{ seven\n", ("num_running",)),
        ("vllm:kv_cache_usage_perc NaN\n", ("usage",)),
        ("vllm:kv_cache_usage_perc 7\n", ("usage",)),
        ('vllm:cache_config_info{num_gpu_blocks="²"} 1\n', ("num_blocks",)),
        ('vllm:cache_config_info{num_gpu_blocks="' + "9" * 5000 + '"} 1\n', ("num_blocks",)),
        ("<html>oops</html>\n", ("text",)),
        ("\x00\xff garbage{ \n", ("text",)),
    ],
)
def test_what_makes_no_sense_is_named_and_keeps_its_last_value(text: str, odd: tuple[str, ...]) -> None:
    figures = read_figures(text, LAST)
    assert figures.odd == odd
    for name in odd:
        if name != "text":
            assert getattr(figures, name) == getattr(LAST, name)
            assert name not in figures.missing
    assert read_figures(text).odd == odd


def test_one_broken_line_does_not_take_the_others_with_it() -> None:
    figures = read_figures('vllm:num_requests_running NaN\nvllm:num_requests_waiting{engine="0"} 4\nother 1 2 3 4 {\n')
    assert (figures.num_waiting, figures.odd) == (4, ("num_running",))


@pytest.mark.parametrize("text", ["", "# HELP x y\nprocess_open_fds 3.0\n", 'a:b{c="d e"} 1e5 1700000000\n'])
def test_a_server_without_these_figures_is_not_odd(text: str) -> None:
    figures = read_figures(text)
    assert figures.odd == () and "num_running" in figures.missing


def test_a_size_that_is_not_known_yet_is_not_odd() -> None:
    figures = read_figures('vllm:cache_config_info{num_gpu_blocks="None",block_size="16"} 1\n')
    assert (figures.num_blocks, figures.block_size, figures.odd) == (0, 16, ())


def test_a_line_that_would_take_the_parser_long_is_odd() -> None:
    labels = ",".join(f'label{number}="x"' for number in range(40_000))
    figures = read_figures(f"vllm:num_requests_running{{{labels}}} 3\nvllm:num_requests_waiting 2\n")
    assert "num_running" in figures.odd and figures.num_waiting == 2
