"""``kvbaton up --autoscale`` on a real fleet: from chat to long documents, prefill grows, decode drains, none fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from cli.up_process import START_S, Up, up

from kvbaton.cli import autoscale_options
from kvbaton.cli.main import kvbaton
from kvbaton.observe.ratio import Band

FLAGS = (
    "--autoscale", "--prefill", "1", "--decode", "2", "--prefill-max", "2", "--decode-max", "2",
    "--threshold-tokens", "0", "--scale-interval-s", "0.5", "--scale-queue-delay-s", "0.02",
    "--scale-shrink-after-s", "8", "--scale-start-s", "4", "--scale-sequences", "8",
)  # fmt: skip


async def clients(fleet: Up, number: int, prompt: str, max_tokens: int, stop: asyncio.Event) -> Counter[int]:
    """So many at once, each with prompts that no cache has; what the answers' statuses were."""
    ends: Counter[int] = Counter()

    async def one(client: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            text = f"{client} {turn} {number} " + prompt
            status, _, _ = await fleet.post(prompt=text, max_tokens=max_tokens, ignore_eos=True)
            ends[status] += 1

    async with asyncio.TaskGroup() as group:
        for client in range(number):
            group.create_task(one(client))
    return ends


@pytest.mark.slow  # its shape in time is the machine's: a minute of traffic that a busy one stretches
async def test_long_documents_after_chat_add_a_prefill_worker_and_drain_a_decode_one(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    async with up(tiny_model_dir, tmp_path, *FLAGS) as fleet:
        chat_over, documents_over = asyncio.Event(), asyncio.Event()
        chat = asyncio.create_task(clients(fleet, 10, "hello", 40, chat_over))
        async with asyncio.timeout(START_S):
            await fleet.until(lambda members: members["decode-0"]["dispatched"] > 20)
        assert {"decode-0", "decode-1"} <= set(await fleet.members()), "chat needs both"
        chat_over.set()
        documents = asyncio.create_task(clients(fleet, 6, "a long document " * 12, 1, documents_over))

        def shifted(members: dict[str, dict[str, object]]) -> bool:
            roles = Counter(member["role"] for member in members.values() if member["state"] == "up")
            return roles["prefill"] == 2 and roles["decode"] == 1

        await fleet.until(shifted)
        documents_over.set()
        assert set(await chat) == {200} and set(await documents) == {200}


def test_flags_become_a_policy_of_each_pool() -> None:
    given = {
        "autoscale": True, "prefill_max": 3, "decode_max": None, "scale_interval_s": 2.0, "scale_queue_delay_s": 0.3,
        "scale_sequences": 16, "scale_shrink_after_s": 60.0, "scale_start_s": 9.0,
        "scale_ratio": "0.5,2",
    }  # fmt: skip
    options = autoscale_options.read(["prefill", "decode", "decode"], given, "2,8")
    assert options is not None and options.band == Band(2.0, 8.0) and options.policy.start_s == 9.0
    assert options.policy.ratio_band == (0.5, 2.0)
    assert options.policy.pools["prefill"].maximum == 3
    assert options.policy.pools["decode"].maximum == autoscale_options.LEAST_MAXIMUM
    assert options.policy.pools["decode"].sequences_per_worker == 16
    assert autoscale_options.read(["both"], {**given, "autoscale": False, "prefill_max": None}) is None


def test_every_flag_of_scaling_is_documented_with_its_help() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()
    command = kvbaton.get_command(None, "up")  # type: ignore[arg-type]
    assert command is not None
    ours = [flag for flag in command.params if flag.opts[0].startswith(("--scale", "--autoscale", "--prefill-max"))]
    assert len(ours) >= 7
    for flag in ours:
        assert f"| `{flag.opts[0]}` | {str(flag.help).split('  [')[0]}" in text, flag.opts[0]  # type: ignore[attr-defined]
