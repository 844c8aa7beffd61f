"""`chairlift local`: checks what the user gave before any process starts, then hands over.

Knows files and terminals; `supervisor` knows processes.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

from rich.console import Console

from chairlift_cli.errors import CliError
from chairlift_cli.pool_file import read_pool
from chairlift_cli.supervisor import LocalOptions, serve
from chairlift_cli.tenants import TenantFiles, check_tenants, gateway_fields_for_clusters
from chairlift_cli.view import LineView, LiveView, View
from chairlift_engine import model_source
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_pods import Resources


def run_local(args: argparse.Namespace) -> int:
    pool = read_pool(args.file, args.settings)
    check_model(pool)
    tenants = TenantFiles(
        args.tenants_file, args.tenant_quotas, args.redis_password_file, args.redis_ca_file
    )
    warnings = check_tenants(pool, tenants)
    console = Console()
    live = console.is_terminal and not args.no_live
    view: View = LiveView(pool, console) if live else LineView()
    if unused := fields_for_clusters(pool):
        view.say(f"only for clusters, not used here: {', '.join(unused)}")
    for warning in warnings:
        view.say(f"warning: {warning}")
    options = LocalOptions(
        port=args.port,
        batch_key=args.batch_key,
        run_dir=args.run_dir,
        journal_file=args.journal,
        tenants=tenants,
    )
    asked_by = asyncio.run(serve(pool, options, view))
    return 128 + signal.SIGINT if asked_by == signal.SIGINT else 0


def check_model(pool: InferencePool) -> None:
    """Say at once that a model is not here; an engine would say so only after loading torch."""
    source = pool.spec.model.source
    if source.startswith("pvc://"):
        raise CliError("model.source: pvc:// is for clusters; here, name a folder by file:///path")
    if pool.spec.runtime.engine == "simulator" or source.startswith("hf://"):
        return
    try:
        model_source.resolve(source)
    except model_source.ModelSourceError as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"model.source: cannot read {source}: {error.strerror}") from error


def fields_for_clusters(pool: InferencePool) -> list[str]:
    """What the spec says of pods, of which there are none here."""
    spec, runtime = pool.spec, pool.spec.runtime
    said = {
        "model.huggingFace": spec.model.hugging_face is not None,
        "runtime.image": runtime.image is not None,
        "runtime.resources": runtime.resources != Resources(),
        "runtime.podTemplate": bool(runtime.pod_template),
        "capacity.surge": spec.capacity is not None and spec.capacity.surge > 0,
        "gateway": gateway_fields_for_clusters(spec.gateway),
        "metrics.source: Prometheus": spec.metrics.source == "Prometheus",
    }
    return [name for name, is_said in said.items() if is_said]
