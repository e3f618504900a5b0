"""AS-09: a worker that lost its address, or whose end nobody was told of, is no member for long."""

from __future__ import annotations

from router.test_discovery import ApiServer, following, pod


async def test_as_09_an_update_without_address_removes_the_worker() -> None:
    server = ApiServer()
    server.pods["a"], server.pods["b"] = pod("a", "both"), pod("b", "both", "10.0.0.2")
    async with following(server) as told:
        await told.until("a", "b")
        await server.watched()
        server.send("MODIFIED", pod("a", "both", None))
        await told.until("b")
        server.send("MODIFIED", pod("a", "both", "10.0.0.9"))  # it comes back elsewhere
        assert (await told.until("a", "b"))[0].url == "http://10.0.0.9:8101"


async def test_as_09_a_lost_or_overtaken_event_lasts_until_the_next_listing() -> None:
    server = ApiServer()
    server.pods["a"], server.pods["b"] = pod("a", "both"), pod("b", "both", "10.0.0.2")
    async with following(server) as told:
        await told.until("a", "b")
        await server.watched()
        del server.pods["a"]  # its deletion was lost
        server.send("DELETED", pod("b", "both", "10.0.0.2"))
        await told.until("a")
        server.send("MODIFIED", pod("b", "both", "10.0.0.2"))  # sent before the deletion, and overtaken by it
        await told.until("a", "b")
        del server.pods["b"]
        server.send_raw(None)  # the watch ends, as every one does after its time
        await told.until()
