"""What an engine is doing, for a person: what runs, what waits, and why it waits.

`state_of` reads the scheduler between two steps, on the engine's thread; `page` lays it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from chairlift_engine.explain import Explanation
from chairlift_engine.request import Phase
from chairlift_engine.scheduler import Scheduler

Json = dict[str, Any]

COLUMNS = ("id", "class", "tenant", "phase", "age_s", "prompt", "cached", "computed", "output")
COLUMNS_OF_RUNNING = (*COLUMNS, "max", "blocks", "preempted")
COLUMNS_OF_WAITING = (*COLUMNS, "waits_s", "why")


def state_of(scheduler: Scheduler, now_s: float) -> Json:
    explained = scheduler.explain()
    blocks = scheduler.residency.blocks
    return {
        "desired": scheduler.desired.to_json(),
        "policy": scheduler.policy.to_json(),
        "limited_by_memory": scheduler.limit is not None,
        "capacity": asdict(scheduler.capacity),
        "num_free_blocks": blocks.num_free,
        "num_cached_blocks": blocks.num_cached,
        "running": [_told(e, now_s) for e in explained if e.phase is not Phase.WAITING],
        "waiting": [_told(e, now_s) for e in explained if e.phase is Phase.WAITING],
    }


def page(state: Json) -> str:
    """The same as text."""
    policy, capacity = state["policy"], state["capacity"]
    limited = " (a step ran out of memory)" if state["limited_by_memory"] else ""
    lines = [
        f"{len(state['running'])} running in {policy['batch_size']} slots, "
        f"{len(state['waiting'])} waiting; {state['num_free_blocks']} of {capacity['num_blocks']} "
        f"KV blocks free, {state['num_cached_blocks']} of them cached",
        f"policy {policy['generation']}: {policy['scheduling']}, batch size "
        f"{policy['batch_size']} of {state['desired']['batch_size']}, step tokens "
        f"{policy['step_tokens']} of {state['desired']['step_tokens']}{limited}",
        f"last step {state['heartbeat_age_s']:.3f} s ago"
        + (f", draining: {state['num_in_flight']} left" if state["draining"] else ""),
    ]
    for name, columns in (("running", COLUMNS_OF_RUNNING), ("waiting", COLUMNS_OF_WAITING)):
        if state[name]:
            lines += ["", f"{name}:", *_table(columns, [_row(each) for each in state[name]])]
    return "\n".join(lines) + "\n"


def _told(explained: Explanation, now_s: float) -> Json:
    request = explained.request
    told: Json = {
        "id": request.id,
        "class": request.request_class,
        "tenant": request.tenant,
        "phase": explained.phase,
        "age_s": round(now_s - request.arrival_s, 3),
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_output_tokens": request.num_output_tokens,
        "max_tokens": request.sampling.max_tokens,
        "num_blocks": len(request.block_ids),
        "num_preemptions": request.num_preemptions,
    }
    if explained.phase is Phase.WAITING:
        told["waiting_s"] = round(now_s - request.waiting_since_s, 3)
        told["reason"] = explained.obstacle or "no step has looked at it yet"
    return told


def _row(told: Json) -> dict[str, str]:
    """By column; ids and tenants are shortened, and cannot break the line."""
    values = {
        "prompt": told["num_prompt_tokens"],
        "cached": told["num_cached_tokens"],
        "computed": told["num_computed_tokens"],
        "output": told["num_output_tokens"],
        "max": told["max_tokens"],
        "blocks": told["num_blocks"],
        "preempted": told["num_preemptions"],
        "waits_s": told.get("waiting_s"),
        "why": told.get("reason"),
        **told,
    }
    return {name: _printable(str(values[name])) for name in (*COLUMNS_OF_RUNNING, "waits_s", "why")}


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _table(columns: Sequence[str], rows: Sequence[dict[str, str]]) -> list[str]:
    cells = [columns, *([row[column] for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
