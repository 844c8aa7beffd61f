"""Clients' connections, from the first one that is taken to the last one that is let go.

`__main__` opens one on the gateway's port.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from chairlift_gateway.client_request import ClientRequest
from chairlift_gateway.front_door import FrontDoor, Serve

# Longer than clients keep idle connections: one that closes under a request is an error to them.
KEEPALIVE_S: Final = 75.0
BACKLOG: Final = 2048


class Server:
    """serve: what answers each request."""

    def __init__(self, serve: Serve, keepalive_s: float = KEEPALIVE_S) -> None:
        self._serve = serve
        self._keepalive_s = keepalive_s
        self._doors: set[FrontDoor] = set()
        self._num_serving = 0
        self._is_quiet = asyncio.Event()
        self._listening: asyncio.Server | None = None
        self._is_draining = False

    @property
    def num_connections(self) -> int:
        return len(self._doors)

    async def listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(self._door, sock=listener, backlog=BACKLOG)

    async def close(self, within_s: float) -> None:
        """Take no more, and return once everybody has been answered and everything settled; what
        is still there after that time is cut off."""
        if self._listening is not None:
            self._listening.close()
        self._is_draining = True
        for door in list(self._doors):
            door.drain()
        if not await self._is_quiet_within(within_s):
            self.cut_off()
            await self._is_quiet_within(within_s=1.0)

    def cut_off(self) -> None:
        for door in list(self._doors):
            door.cut_off()

    async def _is_quiet_within(self, within_s: float) -> bool:
        self._note()
        try:
            async with asyncio.timeout(within_s):
                await self._is_quiet.wait()
        except TimeoutError:
            return False
        return True

    def _door(self) -> FrontDoor:
        return FrontDoor(self._run, self._made, self._lost, self._keepalive_s)

    async def _run(self, request: ClientRequest) -> None:
        """Also beyond its connection: what it cost is settled when its client has left."""
        self._num_serving += 1
        try:
            await self._serve(request)
        finally:
            self._num_serving -= 1
            self._note()

    def _made(self, door: FrontDoor) -> None:
        self._doors.add(door)
        self._note()
        if self._is_draining:
            door.drain()

    def _lost(self, door: FrontDoor) -> None:
        self._doors.discard(door)
        self._note()

    def _note(self) -> None:
        if self._doors or self._num_serving:
            self._is_quiet.clear()
        else:
            self._is_quiet.set()
