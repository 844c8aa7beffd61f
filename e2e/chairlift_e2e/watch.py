"""What happened between two looks: every pod that ever was, and every decision that was said."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from chairlift_e2e.kube import Kube, Object

ENGINES: Final = ("interactive", "batch")


class Watch:
    """Feeds `take(event type, object)` from `kubectl get --watch`, in a thread, until closed."""

    def __init__(
        self, kube: Kube, kind: str, namespace: str, take: Callable[[str, Object], None]
    ) -> None:
        command = kube.command("get", kind, f"--namespace={namespace}", "--watch",
                               "--output-watch-events", "--output=json")  # fmt: skip
        self._take = take
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._thread = threading.Thread(target=self._read, name=f"watch-{kind}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            self._take(event["type"], event["object"])


class PodLedger:
    """Counts what a budget and an uptime are about: engine pods bound at once; restarts, ever."""

    def __init__(self, component: Callable[[Object], str | None]) -> None:
        self._component = component
        self._lock = threading.Lock()
        self._bound: set[str] = set()
        self._engines: set[str] = set()
        self._restarts: dict[str, int] = {}
        self._most_engines = 0

    def take(self, event: str, pod: Object) -> None:
        component = self._component(pod)
        if component is None:
            return
        uid = pod["metadata"]["uid"]
        statuses = pod.get("status", {}).get("containerStatuses", ())
        num_restarts = sum(status["restartCount"] for status in statuses)
        with self._lock:
            self._restarts[uid] = max(num_restarts, self._restarts.get(uid, 0))
            if component not in ENGINES:
                return
            self._engines.add(uid)
            # A pod that terminates is bound to its node until it is gone.
            if event == "DELETED" or not pod["spec"].get("nodeName"):
                self._bound.discard(uid)
            else:
                self._bound.add(uid)
            self._most_engines = max(len(self._bound), self._most_engines)

    @property
    def num_restarts(self) -> int:
        with self._lock:
            return sum(self._restarts.values())

    @property
    def most_engines(self) -> int:
        """Engine pods bound to a node at one time, at most."""
        with self._lock:
            return self._most_engines

    @property
    def num_engines_ever(self) -> int:
        with self._lock:
            return len(self._engines)


class DecisionLog:
    """All decisions that a pool's status ever showed: it keeps only the last ten itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._decisions: list[Object] = []

    def take(self, event: str, pool: Object) -> None:
        with self._lock:
            for decision in pool.get("status", {}).get("decisions", ()):
                if decision not in self._decisions:
                    self._decisions.append(decision)

    def __len__(self) -> int:
        with self._lock:
            return len(self._decisions)

    def since(self, position: int) -> list[Object]:
        with self._lock:
            return self._decisions[position:]
