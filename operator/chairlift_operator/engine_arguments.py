"""The command line that an engine of a pool starts with: what cannot change while it runs. Pure.

Where it listens and which files it reads is the caller's: `chairlift_cli.engine_process` for a
process, `kube.pods` for a pod.
"""

from __future__ import annotations

import json

from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_runtime import StepProfile
from chairlift_protocol.wire import RequestClass


def engine_arguments(pool: InferencePool, request_class: RequestClass) -> dict[str, str | int]:
    """Options and their values. The model's source is as the spec says it."""
    spec, aims = pool.spec, pool.spec.aims(request_class)
    simulated = spec.runtime.engine == "simulator"
    values: dict[str, str | int] = {
        "--runner": "simulator" if simulated else "torch",
        "--model-source": spec.model.source,
        "--model-name": spec.model.name,
        "--max-length": spec.model.max_length,
        "--dtype": spec.model.dtype,
        "--batch-size": aims.batch_size.max,
        "--step-tokens": aims.step_tokens.max,
    }
    if spec.runtime.share_prefixes:
        values["--share-prefixes"] = "yes"
    if simulated:
        values["--simulator-profile"] = _profile(pool)
    return values


def _profile(pool: InferencePool) -> str:
    """The profile as the engine spells it: a name, or JSON with milliseconds."""
    simulator = pool.spec.runtime.simulator
    profile = simulator.profile if simulator is not None else "reference"
    if not isinstance(profile, StepProfile):
        return profile.removeprefix("file://")
    return json.dumps(
        {
            "a_ms": profile.a_s * 1e3,
            "b_ms": profile.b_s * 1e3,
            "c_ms": profile.c_s * 1e3,
            "d_ms": profile.d_s * 1e3,
            "noise": profile.noise,
            "load_s": profile.load_s,
        }
    )
