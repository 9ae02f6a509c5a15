"""The reference server as a program that can be told to fail."""

from __future__ import annotations

PROGRAM = """
import asyncio, json, sys
from streamer.receiver import server

class Faults:
    # Answers a path as it is told, the next so many times, and writes down every call.
    def __init__(self, app, reference):
        self.app, self.reference = app, reference
        self.faults, self.calls, self.kept = {}, [], []

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        path = scope["path"]
        if path == "/_faults":
            faults = json.loads((await receive())["body"])
            if not faults.pop("keep", False):
                self.faults, self.calls = {}, []
            self.faults.update(faults)
            return await self.answer(send, 200, "{}")
        if path == "/_calls":
            return await self.answer(send, 200, json.dumps(self.calls))
        self.calls.append(scope["method"] + " " + path)
        fault = self.faults.get(path)
        if not fault or not fault["times"]:
            return await self.app(scope, receive, send)
        fault["times"] -= 1
        if fault["inside"]:
            async def drop(message):
                pass
            self.kept.append(asyncio.ensure_future(self.app(scope, receive, drop)))
        await asyncio.sleep(fault["delay"])
        if fault["workers"]:
            await self.reference.call("checksum")
        if fault["status"] == 0:
            return await self.app(scope, receive, send)
        content = json.dumps({"error": {"message": fault["text"], "code": fault["status"]}})
        await self.answer(send, fault["status"], content)

    async def answer(self, send, status, content):
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content.encode()})

plain = server.ReferenceServer.app
server.ReferenceServer.app = lambda self: Faults(plain(self), self)
server.run(
    host="127.0.0.1", port=int(sys.argv[1]), workers=int(sys.argv[2]), device=sys.argv[3],
    discard=False,
    on_ready=lambda url: print("ready", url, flush=True),
)
"""
