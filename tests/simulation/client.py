"""A client and what it is told, judged at every byte: one answer, of the right text, never repeated, skipped or lost.

What is right is known beforehand (``engine.answer``). A failure is right too if it is said: an HTTP error, an error
event, or a connection that breaks because the router died.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from .engine import EOS, FIRST_TOKEN, answer
from .story import Violation

if TYPE_CHECKING:
    from .world import World


class ClientRequest:
    def __init__(self, world: World, name: str, prompt: tuple[int, ...], max_tokens: int, stream: bool) -> None:
        self._world = world
        self.name, self.prompt, self.max_tokens, self.stream = name, prompt, max_tokens, stream
        tokens, self.reason = answer(prompt, max_tokens)
        self.text = "".join(chr(97 + token_id - FIRST_TOKEN) for token_id in tokens)
        self.status = 0
        self.got = ""
        self.finish: str | None = None
        self.outcome = ""  # ok, refused, failed, broken, gone, reset; empty while it is under way
        self.must_succeed = False
        self.gone = False
        self._raw = b""
        self._done = False
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    def send_to(self, router: Any) -> None:
        body = {"prompt": list(self.prompt), "max_tokens": self.max_tokens, "stream": self.stream}
        raw = json.dumps(body).encode()
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
                 "headers": [(b"content-length", b"%d" % len(raw))]}  # fmt: skip
        self._incoming.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        self._world.story.tell("{}: {} tokens, at most {} more{}", self.name, len(self.prompt), self.max_tokens,
                               ", as a stream" if self.stream else "")  # fmt: skip
        self.task = router.spawn(router.gateway(scope, self._incoming.get, self._take))
        self.task.add_done_callback(lambda task: self._ended(task, router))

    def leave(self) -> None:
        """Close the connection."""
        if not self.outcome:
            self.gone = True
            self._world.story.tell("{}: the client goes away", self.name)
            self._incoming.put_nowait({"type": "http.disconnect"})

    # -- what comes

    async def _take(self, message: dict[str, Any]) -> None:
        if self.gone or self.outcome == "reset":
            return
        if message["type"] == "http.response.start":
            self._need(not self.status, "a second answer begins")
            self.status = message["status"]
            self._need(self.status != 500, "the router itself failed")
            return
        self._need(self.status != 0, "a body without a head")
        self._need(not self.outcome, "something follows the end of the answer")
        self._raw += message.get("body", b"")
        if self.status == 200 and self.stream:
            self._read_events()
        if not message.get("more_body", False):
            self._finish()

    def _read_events(self) -> None:
        *blocks, self._raw = self._raw.split(b"\n\n")
        for block in blocks:
            self._need(block.startswith(b"data: "), f"a client must not see {block!r}")
            self._need(not self._done, "something follows the end mark")
            data = block.removeprefix(b"data: ")
            if data == b"[DONE]":
                self._done = True
                continue
            event = json.loads(data)
            if "error" in event:
                self._end("broken", event["error"]["message"])
                continue
            for choice in event["choices"]:
                self._say(choice["text"], choice["finish_reason"])

    def _say(self, text: str, finish_reason: str | None) -> None:
        self._need(self.finish is None, "text after the finish reason")
        self.got += text
        self._need(self.text.startswith(self.got), f"it says {self.got!r}, right is {self.text!r}")
        self.finish = finish_reason

    def _finish(self) -> None:
        if self.outcome:
            return
        if self.status != 200:
            error = json.loads(self._raw)["error"]
            self._need(bool(error["message"]), "an error without a message")
            self._end("refused" if self.status < 500 or self.status == 503 else "failed", f"{self.status} {error}")
            return
        if not self.stream:
            choice = json.loads(self._raw)["choices"][0]
            self._say(choice["text"], choice["finish_reason"])
        self._need(self._done or not self.stream, "a stream ends with neither end mark nor error")
        self._need(self.got == self.text, f"it ends at {self.got!r}, right is {self.text!r}")
        self._need(self.finish == self.reason, f"the finish reason is {self.finish}, right is {self.reason}")
        self._end("ok", "")

    def _ended(self, task: asyncio.Task[None], router: Any) -> None:
        if self.outcome or self._world.loop.ending:
            return
        if self.gone:
            self._end("gone", "")
        elif not router.alive:
            self._end("reset", "the router died")
        else:
            self._world.loop.fail(Violation(f"{self.name} was lost: no answer and no error ({task})"))

    def _end(self, outcome: str, why: str) -> None:
        self.outcome = outcome
        self._world.story.tell("{}: {}{}", self.name, outcome, f": {why}" if why else "")
        if self.must_succeed and outcome != "ok":
            self._world.loop.fail(Violation(f"{self.name} is {outcome} although all is well again: {why}"))

    def _need(self, holds: bool, what: str) -> None:
        if not holds:
            error = Violation(f"{self.name}: {what}")
            self._world.loop.fail(error)
            raise error


assert EOS > FIRST_TOKEN
