"""Agreement of two endpoints beside the control: what is called a wrong hand-off and what is not."""

from __future__ import annotations

from typing import Any

import pytest

from kvbaton.bench.scripted import Script, ScriptedServer, chat_delta, sse, usage_chunk
from kvbaton.bench.verify import Answer, Asking, at_least_by_chance, fixed_prompts, judge, verify
from kvbaton.types import RemoteError


def answers(*texts: str) -> list[Answer]:
    return [Answer((text,), "stop", 1) for text in texts]


def test_equal_answers_agree() -> None:
    found = judge([answers("a", "b"), answers("a", "b")], answers("a", "b"))
    assert found.reading == "agrees" and found.agreement == found.control == 1.0


def test_one_difference_from_a_steady_a_is_not_explained_away() -> None:
    found = judge([answers("a", "b", "c")] * 3, answers("a", "b", "x"))
    assert found.reading == "differs"
    assert [row.prompt for row in found.differing] == [2] and found.differing[0].first_difference == 0


def test_a_that_wavers_explains_a_b_that_wavers_as_much() -> None:
    one = answers(*"abcdefghij")
    two = answers(*"abcdefghiX")
    three = answers(*"abcdefghYj")
    found = judge([one, two, three], answers(*"abcdefgZij"))
    assert found.reading == "as A with itself" and found.control < 1.0


def test_all_wrong_is_told_from_a_little_wavering() -> None:
    one, two = answers(*"abcdefghijklmnopqrst"), answers(*"abcdefghijklmnopqrsX")
    found = judge([one, two], answers(*"ABCDEFGHIJKLMNOPQRST"))
    assert found.reading == "differs" and found.chance < 1e-6 and "Suspect" in found.sentence


def test_b_equal_to_any_answer_of_a_is_no_difference() -> None:
    found = judge([answers("a"), answers("b")], answers("b"))
    assert found.reading == "agrees" and found.control == 0.0


def test_another_finish_is_a_difference() -> None:
    found = judge([answers("a"), answers("a")], [Answer(("a",), "length", 1)])
    assert found.reading == "differs"


def test_fisher_against_known_values() -> None:
    assert at_least_by_chance(3, 3, 0, 3) == pytest.approx(1 / 20)
    assert at_least_by_chance(0, 10, 0, 10) == 1.0


def test_prompts_grow_and_are_all_different() -> None:
    prompts = fixed_prompts(20)
    assert len(set(prompts)) == 20 and prompts == fixed_prompts(20)
    assert len(prompts[0].split()) < 20 and len(prompts[-1].split()) > 350


def echo(wrong_after: int | None = None) -> Any:
    def choose(number: int, body: dict[str, Any]) -> Script:
        words = str(body["messages"][0]["content"]).split()[-4:]
        if wrong_after is not None and len(str(body["messages"][0]["content"])) > wrong_after:
            words[-1] = "wrong"
        steps = [(0.0, chat_delta(content=f" {word}")) for word in words]
        return Script([*steps, (0.0, chat_delta(finish_reason="stop") + usage_chunk(4) + sse(b"[DONE]"))])

    return choose


async def test_two_endpoints() -> None:
    async with ScriptedServer(echo()) as a, ScriptedServer(echo()) as b, ScriptedServer(echo(800)) as broken:
        good = await verify(a.url, b.url, fixed_prompts(12), Asking(), {})
        bad = await verify(a.url, broken.url, fixed_prompts(12), Asking(), {})
    assert good.reading == "agrees"
    assert bad.reading == "differs" and 0 < len(bad.differing) < 12
    assert all(row.b_text.endswith("wrong") for row in bad.differing)


async def test_a_missing_answer_proves_nothing() -> None:
    refuse = Script([(0.0, b'{"error": "no"}')], status=503)
    async with ScriptedServer(echo()) as a, ScriptedServer(lambda number, body: refuse) as b:
        with pytest.raises(RemoteError, match="503"):
            await verify(a.url, b.url, fixed_prompts(3), Asking(), {})
