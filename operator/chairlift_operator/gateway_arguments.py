"""The part of a gateway's command line that the spec says whole: who is served, and bounds. Pure.

What else it is told is the caller's: `chairlift_cli.tenants` for a process, `kube.gateway_children`
for a pod.
"""

from __future__ import annotations

from chairlift_operator.spec_pods import Gateway


def gateway_arguments(gateway: Gateway) -> dict[str, str | int]:
    """Options and their values; the gateway's own defaults for what is left out."""
    values: dict[str, str | int | None] = {
        "--anonymous": gateway.anonymous and gateway.anonymous.lower(),
        "--trusted-tenant-header": gateway.trusted_tenant_header,
        "--replica-concurrency": gateway.replica_concurrency,
        "--batch-max-body-bytes": gateway.batch_max_body_bytes,
    }
    return {option: value for option, value in values.items() if value is not None}
