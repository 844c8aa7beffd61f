"""Server-sent events on the hot path: whole events out, and which of them carry a token.

No event is decoded as JSON. It knows no HTTP; `relay` feeds it.
"""

from __future__ import annotations

import re

# An event larger than this is relayed in pieces rather than held back.
LONGEST_HELD_BYTES = 1024 * 1024

_DATA = b"data:"
# What opens with one of these is an end: of a good stream, of a broken one.
_ENDS = (b"data: [DONE]", b'data: {"error"')
# The role that opens a chat, the end that carries only a finish reason, the usage at the end, a
# delta whose text is empty: none of them is a token. Starting with a literal keeps the search fast.
_NO_TOKEN = re.compile(
    rb'"(?:(?:content|text)"\s*:\s*""'
    rb'|delta"\s*:\s*\{\s*(?:"role"\s*:\s*"assistant"\s*)?\}'
    rb'|choices"\s*:\s*\[\s*\])'
)
# A tool call comes beside an empty content.
_TOOL_CALL = b'"tool_calls"'


class EventSplitter:
    """Cuts a byte stream at the ends of events, so that a broken stream never ends inside one."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, chunk: bytes) -> bytes:
        """The whole events so far, unchanged; what follows them waits for the next chunk."""
        data = self._tail + chunk if self._tail else chunk
        end = max(_end_of_last(b"\n\n", data), _end_of_last(b"\n\r\n", data))
        if len(data) - end > LONGEST_HELD_BYTES:
            end = len(data)
        self._tail = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What a stream that ended in good order left after its last event."""
        return self._tail


def _end_of_last(mark: bytes, data: bytes) -> int:
    start = data.rfind(mark)
    return start + len(mark) if start >= 0 else 0


def num_token_events(events: bytes) -> int:
    """How many of these whole events carry a token."""
    if b"\r" in events:
        events = events.replace(b"\r\n", b"\n")
    return sum(map(_carries_token, events.split(b"\n\n")))


def _carries_token(event: bytes) -> bool:
    if not event.startswith(_DATA) or event.startswith(_ENDS):
        return False
    return _NO_TOKEN.search(event) is None or _TOOL_CALL in event
