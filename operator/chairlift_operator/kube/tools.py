"""What the pools of one operator share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from chairlift_operator.kube.api import Api
from chairlift_operator.kube.keeping import KnownHardware
from chairlift_operator.kube.listening import Listening
from chairlift_operator.kube.objects import Stores
from chairlift_operator.kube.polling import Polling
from chairlift_operator.kube.settings import Settings
from chairlift_operator.kube.tenancy import Tenancy
from chairlift_operator.plan import Plan
from chairlift_operator.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Tools:
    """api: writes only while this operator leads. polling: None where no
    Prometheus may be asked. tenancy: None where no quotas are looked after.
    """

    api: Api
    session: aiohttp.ClientSession
    stores: Stores
    settings: Settings
    now_s: Callable[[], float]
    listening: Listening
    on_plan: Callable[[Plan], None] = lambda made: None
    polling: Polling | None = None
    hardware: KnownHardware = field(default_factory=KnownHardware)
    on_snapshot: Callable[[Snapshot], None] = lambda snapshot: None
    tenancy: Tenancy | None = None
