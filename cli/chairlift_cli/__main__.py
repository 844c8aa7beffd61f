"""The `chairlift` command: arguments in, one clear sentence and an exit code out.

Exit codes: 0 after an orderly end, 1 when something failed, 2 when the caller has to change
something, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from chairlift_cli.argument_types import count, duration, key, port, positive, secret_name
from chairlift_cli.errors import CliError

INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
DEFAULT_PORT = 8000


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths need not be UTF-8
    args = _parser().parse_args(argv)
    try:
        exit_code: int = args.run(args)
        return exit_code
    except CliError as error:
        print(f"chairlift: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        # Whoever read our output is gone; keep the interpreter from failing on its last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _local(args: argparse.Namespace) -> int:
    from chairlift_cli.local import run_local  # with it come rich and the operator's core

    return run_local(args)


def _model_get(args: argparse.Namespace) -> int:
    from chairlift_cli.model_command import run_model_get

    return run_model_get(args.name)


def _validate(args: argparse.Namespace) -> int:
    from chairlift_cli.pool_file import run_validate

    return run_validate([*args.files, *args.more_files])


def _explain(args: argparse.Namespace) -> int:
    from chairlift_cli.explain import run_explain

    return run_explain(args)


def _simulate(args: argparse.Namespace) -> int:
    from chairlift_cli.simulate import run_simulate  # with it come engine and gateway

    return run_simulate(args)


def _replay(args: argparse.Namespace) -> int:
    from chairlift_cli.replay import run_replay

    return run_replay(args)


def _key_create(args: argparse.Namespace) -> int:
    from chairlift_cli.key_command import run_key_create

    return run_key_create(args.tenant, args.request_class, args.file, args.secret)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chairlift",
        description="LLM serving that tunes itself to latency objectives while it runs.",
        epilog="example: chairlift model get smollm2-135m && chairlift local -f pool.yaml",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"chairlift {version('chairlift')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_local(commands)
    _add_validate(commands)
    _add_explain(commands)
    _add_simulate(commands)
    _add_replay(commands)
    _add_model(commands)
    _add_key(commands)
    return parser


def _add_model(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    model = commands.add_parser("model", help="models on this machine", allow_abbrev=False)
    model_commands = model.add_subparsers(title="commands", required=True, metavar="COMMAND")
    get = model_commands.add_parser(
        "get",
        help="put a model into the cache",
        description="Put a model into the cache, from where cache://NAME reads it.",
        epilog="example: chairlift model get smollm2-135m",
        allow_abbrev=False,
    )
    get.add_argument("name", help="the model's name, such as smollm2-135m")
    get.set_defaults(run=_model_get)


def _add_key(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    key = commands.add_parser("key", help="API keys of tenants", allow_abbrev=False)
    key_commands = key.add_subparsers(title="commands", required=True, metavar="COMMAND")
    create = key_commands.add_parser(
        "create",
        help="make an API key for a tenant",
        description="Make an API key, print it once, and put its hash into a file of tenants, "
        "which gateways take without a restart, or the key into a Secret for a cluster.",
        epilog="example: chairlift key create acme --secret acme-keys | kubectl apply -f -",
        allow_abbrev=False,
    )
    add = create.add_argument
    add("tenant", metavar="TENANT", help="whose key it is")
    add("--class", choices=("interactive", "batch"), default="interactive", dest="request_class",
        help="class of the requests that carry it; no restriction: any key's requests under "
        "/batch/v1 are batch (default: %(default)s)")  # fmt: skip
    where = create.add_mutually_exclusive_group()
    where.add_argument("-f", "--file", type=Path, metavar="FILE",
        help="the file of tenants, made if there is none (default: print the entry)")  # fmt: skip
    where.add_argument("--secret", type=secret_name, metavar="NAME",
        help="print a Secret of this name with the key, for a TenantQuota to name")  # fmt: skip
    create.set_defaults(run=_key_create)


def _add_local(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    local = commands.add_parser(
        "local",
        help="run a pool on this machine",
        description="Run a pool on this machine: engine, gateway and control loop, no cluster. "
        "Ctrl-C drains, a second one ends at once.",
        epilog="example: chairlift local -f pool.yaml --set interactive.batchSize.max=32",
        allow_abbrev=False,
    )
    add = local.add_argument
    add("-f", "--file", type=Path, required=True, metavar="POOL.YAML", help="the InferencePool")
    _add_settings(add, of="the pool's spec")
    add("--port", type=port, default=DEFAULT_PORT,
        help="port on 127.0.0.1 for /v1; 0: any free one (default: %(default)s)")  # fmt: skip
    add("--run-dir", type=Path, metavar="DIR",
        help="folder for logs and journal, kept afterwards (default: a temporary one)")  # fmt: skip
    add("--batch-key", type=key, metavar="KEY", help="API key whose requests are batch class")
    add("--no-live", action="store_true", help="plain lines instead of a live table")
    add("--journal", type=Path, metavar="FILE",
        help="where each tick is recorded as a JSON line (default: in the run folder)")  # fmt: skip
    _add_tenants(local)
    local.set_defaults(run=_local)


def _add_tenants(local: argparse.ArgumentParser) -> None:
    add = local.add_argument_group("tenants").add_argument
    add("--tenants-file", type=Path, metavar="FILE",
        help="API keys of tenants, as `chairlift key create` keeps them")  # fmt: skip
    add("--tenant-quotas", type=Path, metavar="FILE",
        help="TenantQuotas whose limits are kept in the pool's Redis; may change")  # fmt: skip
    add("--redis-password-file", type=Path, metavar="FILE", help="what passwordSecret holds")
    add("--redis-ca-file", type=Path, metavar="FILE", help="what caSecret holds")


def _add_validate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    validate = commands.add_parser(
        "validate",
        help="check pool files",
        description="Check InferencePool and TenantQuota files as the operator would, without a "
        "cluster.",
        epilog="example: chairlift validate pool.yaml quotas.yaml",
        allow_abbrev=False,
    )
    add = validate.add_argument
    add("files", nargs="*", type=Path, metavar="FILE", help="a pool, or TenantQuotas")
    add("-f", "--file", type=Path, action="append", default=[], metavar="FILE",
        dest="more_files", help="the same, as kubectl spells it; repeatable")  # fmt: skip
    validate.set_defaults(run=_validate)


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = commands.add_parser(
        "explain",
        help="why a pool is as it is",
        description="The last decisions on a pool and what was measured when they were made: from "
        "its status in the cluster (by kubectl), or from the journal of a local run.",
        epilog="example: chairlift explain chat -n team",
        allow_abbrev=False,
    )
    add = explain.add_argument
    add("pool", nargs="?", metavar="POOL", help="the InferencePool's name")
    add("-n", "--namespace", help="its namespace (default: kubectl's)")
    add("--journal", type=Path, metavar="FILE", help="read this journal instead of a cluster")
    explain.set_defaults(run=_explain)


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="play a pool under a recorded load, without hardware",
        description="Play a whole pool in virtual time: gateway, simulated engines, controller and "
        "the time replicas take to start. Prints what was met and what it cost, and draws it.",
        epilog="example: chairlift simulate -f pool.yaml --trace azure-conv --profile fast "
        "--rate 20 --duration 20m",
        allow_abbrev=False,
    )
    add = simulate.add_argument
    add("-f", "--file", type=Path, required=True, metavar="POOL.YAML", help="the InferencePool")
    _add_settings(add, of="the pool's spec")
    add("--trace", default="azure-conv", metavar="NAME|FILE",
        help="azure-conv, azure-code, mooncake-conversation, mooncake-synthetic, or a CSV file "
        "with arrival_s, prompt_tokens, output_tokens (default: %(default)s)")  # fmt: skip
    add("--profile", metavar="NAME|FILE",
        help="hardware: reference, fast, slow, a TOML file, or JSON of costs (default: the "
        "pool's, else reference)")  # fmt: skip
    add("--rate", type=positive, metavar="PER_S",
        help="mean requests a second (default: the trace's own)")  # fmt: skip
    add("--duration", type=duration, metavar="TIME",
        help="how long load is offered, such as 20m (default: the whole trace)")  # fmt: skip
    add("--warm-up", type=duration, default=60.0, metavar="TIME",
        help="from asking for a replica until it serves (default: 60s)")  # fmt: skip
    add("--kv-tokens", type=count, metavar="N",
        help="KV memory of a replica, in tokens (default: 1024 for each slot)")  # fmt: skip
    add("--batch-clients", type=count, default=0, metavar="N",
        help="clients with batch work, each sending its next request after an answer")  # fmt: skip
    add("--seed", type=count, default=0, metavar="N",
        help="where in the trace to begin, and noise (default: %(default)s)")  # fmt: skip
    add("--picture", type=Path, metavar="FILE",
        help="where the picture goes (default: NAME-simulated.png here)")  # fmt: skip
    add("--journal", type=Path, metavar="FILE",
        help="record each tick, for explain and replay")  # fmt: skip
    simulate.set_defaults(run=_simulate)


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = commands.add_parser(
        "replay",
        help="decide a journal's ticks again, under another spec",
        description="Plan every recorded tick again and print where decisions differ: - as "
        "recorded, + as planned now.",
        epilog="example: chairlift replay journal.jsonl "
        "--set interactive.slo.interTokenLatency.threshold=40ms",
        allow_abbrev=False,
    )
    add = replay.add_argument
    add("journal", type=Path, metavar="JOURNAL", help="a journal, as --journal writes it")
    _add_settings(add, of="the recorded specs")
    replay.set_defaults(run=_replay)


def _add_settings(add: Callable[..., argparse.Action], of: str) -> None:
    add("--set", action="append", default=[], metavar="PATH=VALUE", dest="settings",
        help=f"change a field of {of}; repeatable")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
