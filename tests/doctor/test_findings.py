"""Each fault of a fleet is one finding with a fix, what is not known is none, and a good fleet has none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbaton.doctor.facts import Examination, PairFacts, ServerFacts, parse_target
from kvbaton.doctor.findings import SEVERITIES, Finding, diagnose
from kvbaton.doctor.report import report_text
from kvbaton.transfer.reach import is_own_machine
from kvbaton.types import Fingerprint, LocalError

FINGERPRINT = Fingerprint(1, "rev", 32, 8, 128, "bfloat16", "rope")
SAME: dict[str, Any] = {
    "engine": "kvbaton",
    "version": "0.1",
    "state": "serving",
    "model": "m",
    "fingerprint": FINGERPRINT,
    "block_size": 16,
    "kv_dtype": "bfloat16",
    "tp_size": 1,
    "max_context": 4096,
    "skew_s": 0.3,
}
PREFILL = ServerFacts(
    "p", "prefill", "http://10.0.0.1:8000", kv_host="10.0.0.1", kv_port=7000, says_role="prefill", **SAME
)
DECODE = ServerFacts("d", "decode", "http://10.0.0.2:8000", kv_host="10.0.0.2", says_role="decode", **SAME)


def codes(*servers: ServerFacts, pairs: tuple[PairFacts, ...] = (), min_gb_per_s: float = 0.0) -> list[str]:
    found = Examination(servers, pairs)
    findings = diagnose(found, min_gb_per_s)
    assert all(finding.what and finding.fix for finding in findings)
    text = report_text(found, findings)
    assert all(finding.fix in text for finding in findings)
    severities = [SEVERITIES.index(finding.severity) for finding in findings]
    assert severities == sorted(severities), "errors come first"
    return [f"{finding.severity}:{finding.code}" for finding in findings]


def changed(server: ServerFacts, **changes: Any) -> ServerFacts:
    return msgspec.structs.replace(server, **changes)


def test_a_good_fleet_has_no_findings() -> None:
    assert codes(PREFILL, DECODE) == []
    assert "nothing is wrong" in report_text(Examination((PREFILL, DECODE)), [])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"trouble": "no answer"}, ["error:unreadable"]),
        ({"says_role": "prefill"}, ["error:role"]),
        ({"state": "draining"}, ["warning:state"]),
        ({"connector": False}, ["error:no-connector"]),
        ({"untold": ("its dtype",)}, ["info:untold"]),
        ({"skew_s": 40.0}, ["warning:clock"]),
        ({"skew_s": -40.0}, ["warning:clock"]),
        ({"skew_s": None}, []),
        ({"unread": ("no key",)}, ["warning:unread"]),
        ({"engine": "sglang"}, ["error:engine"]),
        ({"version": "0.2"}, ["warning:version"]),
        ({"model": "other"}, ["error:model"]),
        ({"block_size": 32}, ["warning:block-size"]),
        ({"max_context": 8192}, ["warning:max-context"]),
        ({"max_context": 2048}, []),
        ({"fingerprint": None, "kv_dtype": "float32"}, ["error:kv-dtype"]),
    ],
)
def test_each_fault_of_a_decode_worker(changes: dict[str, Any], expected: list[str]) -> None:
    assert codes(PREFILL, changed(DECODE, **changes)) == expected


@pytest.mark.parametrize("field", list(Fingerprint.__struct_fields__))
def test_each_field_of_a_fingerprint_is_named_with_its_fix_but_for_ranks(field: str) -> None:
    value = getattr(FINGERPRINT, field)
    other = changed(DECODE, fingerprint=msgspec.structs.replace(FINGERPRINT, **{field: value * 2}))
    assert codes(PREFILL, other) == ([] if field == "tp_size" else [f"error:fingerprint-{field}"])


def test_where_peers_are_sent() -> None:
    assert codes(changed(PREFILL, kv_host="127.0.0.1"), DECODE) == ["error:localhost"]
    assert codes(changed(PREFILL, kv_host="localhost"), DECODE) == ["error:localhost"]
    assert codes(changed(PREFILL, kv_host="0.0.0.0"), DECODE) == ["error:localhost"]
    assert codes(changed(PREFILL, kv_host="::", kv_trouble="refused"), DECODE) == ["error:localhost"]
    assert codes(changed(PREFILL, kv_trouble="refused"), DECODE) == ["error:kv-port"]
    here = [changed(one, url="http://127.0.0.1:1", kv_host="127.0.0.1") for one in (PREFILL, DECODE)]
    assert codes(*here) == [], "on one machine that is right"
    told: dict[str, Any] = {"engine": "vllm", "fingerprint": None, "connector_name": "NixlConnector"}
    vllm = changed(PREFILL, kv_host="localhost", **told)
    (finding,) = diagnose(Examination((vllm, changed(DECODE, **told))))
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in finding.fix


def test_engines_that_tell_a_hash_only() -> None:
    told = {"engine": "vllm", "fingerprint": None, "compatibility_hash": "a", "connector_name": "NixlConnector"}
    prefill, decode = changed(PREFILL, **told), changed(DECODE, **told)
    assert codes(prefill, decode) == []
    other = changed(decode, compatibility_hash="b")
    assert codes(prefill, other) == ["error:compatibility-hash"]
    both = (changed(prefill, model_path="/a"), changed(other, model_path="/b"))
    assert codes(*both) == ["error:compatibility-hash", "error:model-path"]
    assert "/a against /b" in diagnose(Examination(both))[0].fix
    assert codes(prefill, changed(decode, block_size=128)) == ["error:block-size"]
    assert codes(prefill, changed(decode, kv_layout="NHD")) == [], "what one does not tell is no difference"
    assert codes(changed(prefill, kv_layout="HND"), changed(decode, kv_layout="NHD")) == ["warning:kv-layout"]
    assert codes(changed(prefill, tp_size=2), changed(decode, tp_size=4)) == []
    assert codes(changed(prefill, tp_size=2), changed(decode, tp_size=3)) == ["error:tp"]
    assert codes(prefill, changed(decode, version="9")) == ["error:version"]


def test_pools_and_routers() -> None:
    assert codes(PREFILL) == ["error:no-decode"]
    assert codes(DECODE) == ["warning:no-prefill"]
    assert codes(changed(PREFILL, role="both", says_role="both")) == []
    router = ServerFacts("r", "router", "http://10.0.0.3:8000", engine="kvbaton", version="0.1", model="m")
    assert codes(router, PREFILL, DECODE) == []
    assert codes(changed(router, members=("d is down: it went",)), PREFILL, DECODE) == ["error:member"]


def test_hand_offs_that_were_made() -> None:
    pair = PairFacts("p", "d", num_bytes=10**9, seconds=0.5, repeats=3)
    assert codes(PREFILL, DECODE, pairs=(pair,)) == []
    assert codes(PREFILL, DECODE, pairs=(pair,), min_gb_per_s=3.0) == ["error:slow"]
    untimed = changed_pair(pair, seconds=0.0)
    assert codes(PREFILL, DECODE, pairs=(untimed,)) == []
    assert codes(PREFILL, DECODE, pairs=(untimed,), min_gb_per_s=3.0) == ["warning:unmeasured"]
    assert "the rate is not measured" in report_text(Examination((), (untimed,)), [])
    assert "2.00 GB/s" in report_text(Examination((), (pair,)), [])
    assert codes(PREFILL, DECODE, pairs=(changed_pair(pair, trouble="refused"),)) == ["error:hand-off"]


def changed_pair(pair: PairFacts, **changes: Any) -> PairFacts:
    return msgspec.structs.replace(pair, **changes)


def test_engines_behind_our_workers_are_compared_among_themselves() -> None:
    told: dict[str, Any] = {"engine": "vllm", "connector_name": "NixlConnector"}
    behind = [changed(one, name=f"{one.name}'s", behind=one.name, **told) for one in (PREFILL, DECODE)]
    assert codes(PREFILL, DECODE, *behind) == []
    alone = changed(behind[0], role="both", says_role="both", connector_name="", connector=False)
    assert codes(PREFILL, DECODE, alone, behind[1]) == ["info:connector-unknown"], "who does both hands off nothing"


def test_targets() -> None:
    assert parse_target("prefill=http://h:1/", 3).name == "prefill-3"
    found = parse_target("p0:prefill=http://h:1", 0)
    assert (found.name, found.role, found.url) == ("p0", "prefill", "http://h:1")
    for text in ("http://h:1", "worker=http://h:1", "prefill=h:1", "prefill=http://h"):
        with pytest.raises(LocalError, match="no server to look at"):
            parse_target(text, 0)


def test_what_everybody_takes_for_their_own_machine() -> None:
    assert all(
        map(
            is_own_machine,
            (
                "localhost",
                "LOCALHOST.",
                "::ffff:127.0.0.1",
                "127.0.0.1",
                "127.9.9.9",
                "::1",
                "[::1]",
                "0.0.0.0",
                "::",
                "[::]",
            ),
        )
    )
    assert not any(map(is_own_machine, ("10.0.0.1", "host", "")))


def test_a_finding_is_data() -> None:
    finding = Finding("error", "c", "s", "w", "f")
    assert msgspec.json.decode(msgspec.json.encode(finding), type=Finding) == finding


def test_a_router_alone_is_no_fleet_that_was_looked_at() -> None:
    router = ServerFacts("r", "router", "http://h:1", engine="kvbaton")
    assert [finding.code for finding in diagnose(Examination((router,)))] == ["no-workers"]
    both = ServerFacts("b", "both", "http://h:2", engine="kvbaton")
    assert diagnose(Examination((router, both))) == []
