"""One sentence on each field of the CRD, by path: what `kubectl explain` says. Used by `crd`."""

from __future__ import annotations

from typing import Final

PLACES: Final = {
    "": "A model served within latency objectives: engines for interactive and for batch work, a "
    "gateway in front, and a controller that tunes them while they run.",
    "apiVersion": "chairlift.dev/v1alpha1.",
    "kind": "InferencePool.",
}


def _bounds(path: str, what: str, least: str, most: str) -> dict[str, str]:
    return {path: what, f"{path}.min": least, f"{path}.max": most}


def _objective(path: str, what: str, threshold: str) -> dict[str, str]:
    share = "Percent of them that must not take longer; 1 to 99.99."
    return {path: what, f"{path}.threshold": threshold, f"{path}.objective": share}


def _knobs(path: str) -> dict[str, str]:
    return {
        **_bounds(
            f"{path}.batchSize",
            "Running sequences of a replica; the controller moves the live value inside.",
            "The live value never goes below.",
            "The live value never goes above; memory for so many is reserved when an engine "
            "starts, so a change replaces replicas one by one.",
        ),
        **_bounds(
            f"{path}.stepTokens",
            "Tokens one step may carry: a token of every running sequence first, prefill in what "
            "is left. The controller moves the live value inside.",
            "The live value never goes below; at least one KV block of 16 tokens.",
            "The live value never goes above; reserved when an engine starts, so a change replaces "
            "replicas one by one.",
        ),
    }


def _resources(path: str) -> dict[str, str]:
    return {
        path: "Resources of the container, as Kubernetes takes them.",
        f"{path}.requests": "What a node must have free, such as {cpu: 2, memory: 8Gi}.",
        f"{path}.limits": "What the container may use, such as {nvidia.com/gpu: 1}.",
    }


_TEMPLATE = (
    "Merged into the pod template that the operator renders: {metadata, spec} as in a Deployment. "
    "Lists of named things merge by name; the main container is called "
)

DESCRIPTIONS: Final = {
    "spec": "What the pool shall be. Live values follow without a restart; start-up values (model, "
    "runtime, largest sizes) replace replicas one at a time, each drained first.",
    "spec.model": "The model and how clients know it.",
    "spec.model.name": "What clients send as `model`. It cannot change.",
    "spec.model.source": "Where its files come from: hf://owner/name[@revision], pvc://claim/path, "
    "file:///path in the image, or cache://name.",
    "spec.model.maxLength": "Longest prompt plus answer, in tokens.",
    "spec.model.dtype": "Type of the weights in memory; auto takes what the hardware does best.",
    "spec.model.huggingFace": "How an hf:// source is fetched.",
    "spec.model.huggingFace.cacheClaim": "A PersistentVolumeClaim that keeps the files; without it "
    "every new pod downloads them.",
    "spec.model.huggingFace.tokenSecret": "A Secret whose key `token` is sent to the hub, for "
    "gated models.",
    "spec.model.huggingFace.endpoint": "The hub's address, when it is not huggingface.co.",
    "spec.runtime": "The engine that runs the model.",
    "spec.runtime.engine": "chairlift, or simulator: the same server and scheduler without a "
    "model, at modelled step times.",
    "spec.runtime.sharePrefixes": "Let tenants find each other's prompts in the prefix cache: "
    "faster, and one can tell by its time to first token what others have asked.",
    "spec.runtime.simulator": "How the simulated engine behaves; only with `engine: simulator`.",
    "spec.runtime.simulator.profile": "reference, fast, slow, or costs of a step: {a: 8ms, b: "
    "0.06ms, c: 0.045ms, d: 0.00005ms, noise: 0.04, load: 60s}; or file:///path.toml in the pod, "
    "which is read again when it changes.",
    "spec.runtime.image": "The engine's image; without it, that of the operator's release.",
    **_resources("spec.runtime.resources"),
    "spec.runtime.podTemplate": _TEMPLATE + "`engine`.",
    "spec.capacity": "What both classes together may hold.",
    "spec.capacity.replicas": "Engine pods of both classes together, those that still end "
    "included.",
    "spec.capacity.surge": "How many more there may be while replicas are replaced. A replacement "
    "without errors needs two replicas or a surge of 1.",
    "spec.interactive": "Requests that somebody waits for: objectives and bounds.",
    "spec.interactive.slo": "Objectives that come before throughput.",
    **_objective(
        "spec.interactive.slo.timeToFirstToken",
        "From a request's arrival to its first token, waiting included.",
        "Longest good time, such as 500ms.",
    ),
    **_objective(
        "spec.interactive.slo.interTokenLatency",
        "Between two tokens of one stream; step tokens and batch size are tuned to hold it.",
        "Longest good gap, such as 50ms.",
    ),
    **_bounds(
        "spec.interactive.replicas",
        "How many engines; between the bounds they follow arrivals, queue and KV memory.",
        "At least so many.",
        "At most so many.",
    ),
    **_knobs("spec.interactive"),
    "spec.interactive.scheduling": "Continuous, or Static: the baseline for comparisons, under "
    "which nothing is tuned.",
    "spec.batch": "Work that nobody waits for. Without it, batch requests still run on what "
    "interactive ones leave.",
    "spec.batch.slo": "What batch work is promised.",
    "spec.batch.slo.maximumWait": "How long a request may wait for its first token.",
    **_bounds(
        "spec.batch.replicas",
        "Engines of its own; they come for waiting work and go when it is done.",
        "At least so many.",
        "At most so many; 0 with borrowing: batch work only borrows.",
    ),
    **_knobs("spec.batch"),
    "spec.batch.borrowing": "Batch work on interactive replicas, while they meet their objectives.",
    "spec.batch.borrowing.maxShare": "Percent of an interactive replica's slots and step tokens "
    "that batch work may hold.",
    "spec.batch.borrowing.returnWithin": "How soon they are interactive only, when an objective is "
    "missed.",
    "spec.autoscaling": "Who sets the numbers of replicas, and how they shrink.",
    "spec.autoscaling.mode": "Managed: this controller. External: an HPA, KEDA or a person scales "
    "the Deployments; the controller never writes their replicas. Off: they stay.",
    "spec.autoscaling.scaleDownWindow": "Demand of so long a time must fit fewer replicas.",
    "spec.autoscaling.drainTimeout": "Requests of a replica that goes may still run so long.",
    "spec.gateway": "The pool's one address.",
    "spec.gateway.replicas": "How many gateway pods share the traffic.",
    "spec.gateway.image": "The gateway's image; without it, that of the operator's release.",
    **_resources("spec.gateway.resources"),
    "spec.gateway.podTemplate": _TEMPLATE + "`gateway`.",
    "spec.gateway.service": "How the gateway is reached.",
    "spec.gateway.service.type": "ClusterIP, NodePort or LoadBalancer.",
    "spec.gateway.anonymous": "Serve or Refuse requests that give no known key; left out: Refuse "
    "where there are quotas or a trusted header, else Serve.",
    "spec.gateway.trustedTenantHeader": "Header in which a gateway in front of this one names the "
    "tenant; clients must not be able to go past that.",
    "spec.gateway.replicaConcurrency": "Requests that a gateway sends at the same time to an "
    "engine that never states its load (Chairlift's do); left out: 256.",
    "spec.gateway.batchMaxBodyBytes": "Longest body taken of a batch request; left out: 10 MiB, as "
    "for interactive ones.",
    "spec.quotas": "Tenants and their limits, by TenantQuota objects of this namespace; left out: "
    "nobody is limited.",
    "spec.quotas.redis": "Where limits and counts are kept: Redis 6.2 or newer, with "
    "maxmemory-policy noeviction.",
    "spec.quotas.redis.url": "redis://host:port/database, or rediss:// for TLS.",
    "spec.quotas.redis.user": "ACL user of operator and gateways.",
    "spec.quotas.redis.passwordSecret": "A Secret whose key `password` Redis asks for.",
    "spec.quotas.redis.caSecret": "A Secret whose key `ca.crt` signed Redis' certificate; left "
    "out: an authority that the system knows did.",
    "spec.quotas.onRedisFailure": "While Redis is away: Local: each gateway goes by its share of "
    "the limits; Allow: everybody, charged afterwards; Deny: nobody.",
    "spec.metrics": "Where the controller reads measurements.",
    "spec.metrics.source": "Direct: the engines' and gateways' own /metrics. Prometheus: beside "
    "them, for what happened over minutes and hours, and for pods that the operator cannot reach. "
    "Without it, Prometheus where the operator was given one, else Direct.",
    "spec.metrics.url": "Where Prometheus is, such as http://prometheus.monitoring:9090; without "
    "it, the operator's own. It must scrape engines and gateways at least every 60 s and keep "
    "their namespace and pod as labels.",
    "spec.mode": "Enforce, or Recommend: decide and say, but change no policy, no number of "
    "replicas and no running pod.",
    "status": "How the pool stands, written by the operator.",
    "status.observedGeneration": "The spec's generation that this status is about.",
    "status.operator": "Which operator looks after the pool: namespace/instance.",
    "status.slo": "Met, Missed or Unknown.",
    "status.progress": "What is under way: replicas that load, drain or are replaced.",
    "status.lastReason": "Why something last changed.",
    **{
        f"status.{part}{field}": text
        for part, whose in (("interactive", "interactive"), ("batch", "batch"))
        for field, text in {
            "": f"The {whose} replicas.",
            ".desired": "How many there shall be.",
            ".ready": "How many serve.",
            ".starting": "How many are on their way.",
            ".draining": "How many finish their last requests.",
            ".replicas": "Ready of desired, as `kubectl get` shows it.",
            ".batchSize": "Running sequences of a replica now; of the replica with the fewest.",
            ".stepTokens": "Tokens of a step now; of the replica with the fewest.",
            ".batchSharePercent": "What batch work may hold of a replica now.",
            ".policyGeneration": "Newest policy that an engine confirmed, term.counter.",
        }.items()
    },
    "status.gateway": "The gateway's pods.",
    "status.gateway.desired": "How many there shall be.",
    "status.gateway.ready": "How many serve.",
    "status.gateway.url": "Where clients in the cluster find it.",
    "status.conditions": "Accepted, Reconciled, Ready, MetricsAvailable, WithinSLO, "
    "CapacityLimited, Tuned, QuotasEnforced, and the mistakes BatchSizeBeyondObjective, "
    "StepTokensBeyondObjective, SlotsHeldByOneTenant; each message says what to check.",
    "status.conditions[]": "One statement on the pool.",
    "status.conditions[].type": "What it is about.",
    "status.conditions[].status": "True, False or Unknown.",
    "status.conditions[].reason": "Why, in one word.",
    "status.conditions[].message": "Why, in a sentence, and what to check.",
    "status.conditions[].lastTransitionTime": "Since when it says so.",
    "status.conditions[].observedGeneration": "The spec's generation that it is about.",
    "status.signals": "What the controller measured and what it did because of it.",
    "status.signals[]": "One measurement.",
    "status.signals[].name": "Replica and quantity.",
    "status.signals[].state": "Value; Idle: fresh, but nothing happened; Unknown: not known, which "
    "is never taken for zero.",
    "status.signals[].observedAt": "When it was measured.",
    "status.signals[].source": "Where it was read.",
    "status.signals[].effect": "Whether it was used, or why things were held.",
    "status.signals[].value": "The value, when there is one; else why not.",
    "status.decisions": "The last 10 decisions, newest last.",
    "status.decisions[]": "One change, or one advice in Recommend mode.",
    "status.decisions[].at": "When.",
    "status.decisions[].target": "The replica or the class that it is about.",
    "status.decisions[].field": "What changes, spelled as in the spec.",
    "status.decisions[].before": "Its value before.",
    "status.decisions[].after": "Its value after.",
    "status.decisions[].reason": "Why, with figures.",
    "status.decisions[].sentence": "Change and reason in one sentence.",
    "status.decisions[].enforced": "False in Recommend mode: said, not done.",
    "status.decisions[].inputs": "What was measured then.",
}
