"""What SGLang's bootstrap server tells of the prefill server it belongs to, and whether a decode server fits to it.

Every prefill server of a pair runs one; decode servers ask it for addresses, and anybody may ask it for page size, KV
dtype and parallelism. A decode server finds out at its first request, with its prefill under way; this does before.
Pure.
"""

from __future__ import annotations

import msgspec

from kvbaton.kv.compat import FieldDifference
from kvbaton.types import UNREADABLE, RemoteError

# Asks for the server as a whole, instead of one of its ranks.
ROUTE_QUERY = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"

INFO_PATHS = ("/server_info", "/get_server_info")  # of a server itself, newest first


class BootstrapInfo(msgspec.Struct, frozen=True):
    """Versions add fields; those that are missing are not compared."""

    attn_tp_size: int | None = None
    attn_cp_size: int | None = None
    dp_size: int | None = None
    pp_size: int | None = None
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    follow_bootstrap_room: bool | None = None
    prefill_http_port: int | None = None


class DecodeServer(msgspec.Struct, frozen=True):
    """What a decode server says of itself in ``/server_info``."""

    page_size: int | None = None
    kv_cache_dtype: str | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    dp_size: int | None = None
    enable_dp_attention: bool | None = None


def decode_bootstrap(status: int, raw: bytes) -> BootstrapInfo:
    """RemoteError while its ranks are not all there, and for anything that is no such answer."""
    if status == 503:
        raise RemoteError(f"the bootstrap server waits for ranks: {raw[:200].decode(errors='replace')}")
    if status != 200:
        raise RemoteError(f"the bootstrap server answers {status}: {raw[:200].decode(errors='replace')}")
    try:
        return msgspec.json.decode(raw, type=BootstrapInfo)
    except UNREADABLE as error:
        raise RemoteError(f"the bootstrap server's answer cannot be read: {error}") from None


def differences(decode: DecodeServer, prefill: BootstrapInfo) -> list[FieldDifference]:
    """What keeps KV from moving, by the rules that a decode server applies to the first request of a pair.

    The dtype is compared as it was asked for: ``auto`` on one side only is a difference there too. Tensor parallelism
    may differ where one divides the other, pipeline parallelism where decode has none.
    """
    found = []
    if decode.page_size and prefill.page_size and decode.page_size != prefill.page_size:
        found.append(FieldDifference("page_size", str(decode.page_size), str(prefill.page_size)))
    ours, theirs = decode.kv_cache_dtype, prefill.kv_cache_dtype
    if ours and theirs and ours != theirs:
        found.append(FieldDifference("kv_cache_dtype", ours, theirs))
    if decode.pp_size and prefill.pp_size and decode.pp_size not in (1, prefill.pp_size):
        found.append(FieldDifference("pp_size", str(decode.pp_size), str(prefill.pp_size)))
    if decode.tp_size and prefill.attn_tp_size:
        num_groups = (decode.dp_size or 1) if decode.enable_dp_attention else 1
        attention_tp = max(1, decode.tp_size // num_groups)
        small, large = sorted((attention_tp, prefill.attn_tp_size))
        if large % small:
            found.append(FieldDifference("attn_tp_size", str(attention_tp), str(prefill.attn_tp_size)))
    return found
