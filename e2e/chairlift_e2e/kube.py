"""kubectl, bound to the one context that tests may touch, and waiting for what it shows."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

POLL_S: Final = 0.5
CALL_S: Final = 60.0

Object = dict[str, Any]
T = TypeVar("T")


class KubectlError(RuntimeError):
    """kubectl said no; the message is its own."""


@dataclass(frozen=True, slots=True)
class Kube:
    context: str

    def run(self, *arguments: str, stdin: str | None = None, timeout_s: float = CALL_S) -> str:
        command = self.command(*arguments)
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout_s
        )
        if done.returncode != 0:
            raise KubectlError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def command(self, *arguments: str) -> list[str]:
        return ["kubectl", f"--context={self.context}", *arguments]

    def apply(self, *objects: Mapping[str, Any]) -> None:
        self.run("apply", "-f", "-", stdin=json.dumps({
            "apiVersion": "v1", "kind": "List", "items": list(objects),
        }))  # fmt: skip

    def patch(self, kind: str, namespace: str, name: str, change: Mapping[str, Any]) -> None:
        self.run("patch", kind, name, f"--namespace={namespace}", "--type=merge",
                 f"--patch={json.dumps(change)}")  # fmt: skip

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """None when there is no such object."""
        found = self.run("get", kind, name, f"--namespace={namespace}", "--ignore-not-found",
                         "--output=json")  # fmt: skip
        return dict(json.loads(found)) if found.strip() else None

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        found = self.run("get", kind, f"--namespace={namespace}", f"--selector={selector}",
                         "--output=json")  # fmt: skip
        return list(json.loads(found)["items"])

    def logs(self, namespace: str, pod: str) -> str:
        return self.run("logs", pod, f"--namespace={namespace}", "--all-containers")


def eventually(
    what: str,
    probe: Callable[[], T | None],
    timeout_s: float,
    state: Callable[[], object] = lambda: "",
) -> T:
    """The first true answer of `probe`, or a failure that says what was waited for and the state
    that it ended in."""
    ends_s = time.monotonic() + timeout_s
    while True:
        try:
            seen, problem = probe(), ""
        except KubectlError as error:  # an API server under load may refuse once
            seen, problem = None, f"; last: {error}"
        if seen:
            return seen
        if time.monotonic() > ends_s:
            told = f"waited {timeout_s:.0f} s in vain until {what}{problem}; {state()}"
            raise AssertionError(told.rstrip("; "))
        time.sleep(POLL_S)


def condition(found: Object | None, kind: str) -> Object:
    """A condition of an object's status; an empty one when it is not there."""
    conditions = (found or {}).get("status", {}).get("conditions", ())
    return next((c for c in conditions if c["type"] == kind), {})


def is_true(found: Object | None, kind: str) -> bool:
    return condition(found, kind).get("status") == "True"
