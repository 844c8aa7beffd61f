"""The processes that tests and benchmarks run beside a bare control plane, and end with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

END_S: Final = 20.0
CONTROLLERS: Final = (
    "deployment-controller",
    "replicaset-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "serviceaccount-controller",
)


@contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **environment}
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def controllers(*options: str) -> list[str]:
    """Kubernetes' own, those that Deployments and namespaces need; of the control plane that
    KUBECONFIG names."""
    pki = Path(os.environ["KUBECONFIG"]).parent
    return [
        "kube-controller-manager",
        f"--kubeconfig={pki}/kcm.conf",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        "--use-service-account-credentials",
        "--leader-elect=false",
        "--secure-port=0",
        f"--controllers={','.join(CONTROLLERS)}",
        *options,
    ]


@contextmanager
def operator(
    name: str, namespace: str, log: Path, metrics_port: int = 0
) -> Iterator[subprocess.Popen[bytes]]:
    """One operator process; metrics_port: 0 for any."""
    command = [sys.executable, "-m", "kopf", "run", "-A", "-m", "chairlift_operator.handlers"]
    environment = {
        "POD_NAME": name,
        "POD_NAMESPACE": namespace,
        "CHAIRLIFT_METRICS_PORT": str(metrics_port),
    }
    with running(command, log, **environment) as process:
        yield process
