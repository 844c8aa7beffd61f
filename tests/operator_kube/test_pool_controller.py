"""A pool's whole turn, against a cluster in a dictionary and engines on loopback."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift_e2e.fake_engine import FakeEngine

Json = dict[str, Any]
DEPLOYMENT = "/apis/apps/v1/namespaces/team/deployments/chat-interactive"
GATEWAY = "/apis/apps/v1/namespaces/team/deployments/chat-gateway"
TOKENS = "/api/v1/namespaces/team/secrets/chat-tokens"
POOL = "/apis/chairlift.dev/v1alpha1/namespaces/team/inferencepools/chat"
Turned = Any  # conftest's


def test_a_new_pool_is_made_tuned_and_told(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec()
        await pool.until(lambda: pool.status.get("interactive", {}).get("policyGeneration"))
        engine = next(iter(pool.kube.engines().values()))
        assert engine.policy.generation.term == 7
        assert pool.condition("Accepted")["status"] == "True"
        assert pool.condition("Ready")["status"] == "True"
        assert "cautious first policy" in pool.status["lastReason"]
        events = [o for p, o in pool.kube.objects.items() if "/events/" in p]
        assert {e["reason"] for e in events} == {"StepTokensSet"}

    run(body)


def test_a_pool_at_rest_writes_nothing_but_its_status(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec()
        await pool.turn(8)
        before = len(pool.kube.writes)
        await pool.turn(24)  # two minutes
        later = pool.kube.writes[before:]
        assert {path for _, path, _ in later} <= {POOL}
        assert len(later) <= 4

    run(body)


def test_no_manifest_ever_carries_a_count_and_one_manager_writes_it(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec(interactive={"replicas": {"min": 2, "max": 3}})
        await pool.until(lambda: len(pool.kube.engines("chat-interactive")) == 2)
        managers = {m for _, path, m in pool.kube.writes if path == DEPLOYMENT}
        assert managers == {"chairlift", "chairlift-rollout", "chairlift-scaler"}
        scalers = [v for v, p, m in pool.kube.writes if m == "chairlift-scaler"]
        assert scalers == ["PATCH"]

    run(body)


def test_twenty_turns_under_another_autoscaler_write_no_count(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec(interactive={"replicas": {"min": 1, "max": 4}})
        await pool.turn(4)
        pool.set_spec(
            interactive={"replicas": {"min": 1, "max": 4}}, autoscaling={"mode": "External"}
        )
        before = len(pool.kube.writes)
        for count in (3, 4, 2, 1, 4):
            await pool.kube.patch(f"{DEPLOYMENT}/scale", {"spec": {"replicas": count}}, "hpa")
            await pool.turn(4)
            assert pool.count == count
        assert not [w for w in pool.kube.writes[before:] if w[2] == "chairlift-scaler"]
        pool.set_spec(interactive={"replicas": {"min": 1, "max": 4}})
        await pool.turn(2)
        assert pool.count == 4

    run(body)


def test_a_pool_that_was_always_scaled_by_somebody_else_gets_no_count_from_us(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec(
            interactive={"replicas": {"min": 2, "max": 4}}, autoscaling={"mode": "External"}
        )
        await pool.turn(20)
        assert not [w for w in pool.kube.writes if w[2] == "chairlift-scaler"]
        assert pool.condition("Ready")["status"] == "True"

    run(body)


def test_a_class_taken_out_of_the_spec_is_drained_also_under_another_autoscaler(run: Any) -> None:
    async def body(pool: Turned) -> None:
        external = {"autoscaling": {"mode": "External"}}
        batch = "/apis/apps/v1/namespaces/team/deployments/chat-batch"
        pool.set_spec(batch={"replicas": {"min": 0, "max": 2}}, **external)
        await pool.turn(4)
        await pool.kube.patch(f"{batch}/scale", {"spec": {"replicas": 2}}, "keda")
        await pool.until(lambda: len(pool.kube.engines("chat-batch")) == 2)
        going = pool.kube.engines("chat-batch").values()
        pool.set_spec(**external)
        await pool.until(lambda: all(engine.is_draining for engine in going))
        await pool.until(lambda: batch not in pool.kube.objects)
        assert pool.count == 1

    run(body)


def test_a_look_at_an_old_spec_takes_no_count_back(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec(interactive={"replicas": {"min": 1, "max": 3}})
        await pool.turn(3)
        old = pool.body
        pool.set_spec(interactive={"replicas": {"min": 3, "max": 3}}, gateway={"replicas": 3})
        await pool.until(lambda: pool.count == 3)
        await pool.controller.reconcile(old)
        assert pool.count == 3

    run(body)


@pytest.mark.parametrize(("by_hand", "kept"), [(2, 2), (4, 3)])
def test_a_count_set_by_hand_is_taken_up_inside_the_bounds(
    run: Any, by_hand: int, kept: int
) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec(interactive={"replicas": {"min": 1, "max": 3}})
        await pool.turn(4)
        await pool.kube.patch(f"{DEPLOYMENT}/scale", {"spec": {"replicas": by_hand}}, "person")
        await pool.turn(8)
        assert pool.count == kept
        assert pool.status["interactive"]["desired"] == kept

    run(body)


def test_a_place_moves_to_the_other_class_only_when_the_pod_that_held_it_is_gone(
    run: Any,
) -> None:
    async def body(pool: Turned) -> None:
        def spec(interactive: int, batch: int) -> Json:
            return {
                "interactive": {"replicas": {"min": interactive, "max": 3}},
                "batch": {"replicas": {"min": batch, "max": 2}, "borrowing": {}},
                "capacity": {"replicas": 3},
            }

        def held() -> list[str]:
            return [p for p in pool.kube.objects if "/pods/chat-" in p and "gateway" not in p]

        pool.set_spec(**spec(1, 2))
        await pool.until(lambda: pool.status.get("batch", {}).get("ready") == 2)
        going = pool.kube.engines("chat-batch")
        pool.set_spec(**spec(3, 0))
        await pool.until(lambda: all(engine.is_draining for engine in going.values()))
        for engine in going.values():
            engine.num_in_flight = 1  # drained as far as was asked, and still ends slowly
        for name, engine in going.items():
            path = f"/api/v1/namespaces/team/pods/{name}"
            await pool.until(lambda path=path: _is_ending(pool, path), num_turns=200)
            for _ in range(4):
                await pool.turn()
                assert len(held()) <= 3
            assert path in held()
            engine.num_in_flight = 0
        await pool.until(lambda: len(pool.kube.engines("chat-interactive")) == 3)
        assert len(held()) == 3

    run(body)


async def _two_busy_one_draining(pool: Turned) -> dict[str, FakeEngine]:
    """Engines of two busy replicas, of which one is asked for."""
    pool.set_spec(interactive={"replicas": {"min": 2, "max": 2}})
    await pool.until(lambda: pool.status.get("interactive", {}).get("ready") == 2)
    engines = pool.kube.engines("chat-interactive")
    for engine in engines.values():
        engine.num_in_flight = 1
    pool.set_spec(interactive={"replicas": {"min": 1, "max": 1}})
    await pool.until(lambda: any(engine.is_draining for engine in engines.values()))
    return engines


def _is_ending(pool: Turned, path: str) -> bool:
    return "deletionTimestamp" in pool.kube.objects[path]["metadata"]


def test_a_stream_of_five_minutes_outlives_the_shrinking(run: Any) -> None:
    async def body(pool: Turned) -> None:
        engines = await _two_busy_one_draining(pool)
        await pool.turn(60)  # five minutes
        assert set(pool.kube.engines("chat-interactive")) == set(engines) and pool.count == 2
        for engine in engines.values():
            engine.num_in_flight = 0
        await pool.until(lambda: pool.count == 1, num_turns=3)

    run(body)


def test_a_drain_ends_with_its_time(run: Any) -> None:
    async def body(pool: Turned) -> None:
        def spec(count: int) -> Json:
            return {
                "interactive": {"replicas": {"min": count, "max": count}},
                "autoscaling": {"drainTimeout": "60s"},
            }

        pool.set_spec(**spec(2))
        await pool.until(lambda: pool.status.get("interactive", {}).get("ready") == 2)
        for engine in pool.kube.engines("chat-interactive").values():
            engine.num_in_flight = 1
        pool.set_spec(**spec(1))
        await pool.turn(10)
        assert pool.count == 2
        await pool.turn(5)
        assert pool.count == 1

    run(body)


def test_an_engine_that_is_slow_to_answer_once_keeps_its_place(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec(interactive={"replicas": {"min": 1, "max": 3}})
        await pool.until(lambda: pool.status.get("interactive", {}).get("ready") == 1)
        (name,) = pool.kube.engines("chat-interactive")
        pool.kube.holds.add(name)  # its probe fails
        await pool.turn(2)
        pool.kube.holds.discard(name)
        await pool.turn(4)
        assert list(pool.kube.engines("chat-interactive")) == [name] and pool.count == 1
        assert not pool.kube.engines("chat-interactive")[name].is_draining
        assert pool.status["interactive"]["ready"] == 1

    run(body)


def test_a_new_leader_shrinks_nothing_before_it_has_seen_a_whole_window(run: Any) -> None:
    async def body(pool: Turned) -> None:
        def spec(least: int) -> Json:
            scaling = {"scaleDownWindow": "60s"}
            return {"interactive": {"replicas": {"min": least, "max": 3}}, "autoscaling": scaling}

        pool.set_spec(**spec(3))
        await pool.until(lambda: pool.status.get("interactive", {}).get("ready") == 3)
        pool.set_spec(**spec(1))
        pool.next_leader()
        await pool.turn(12)  # 60 s
        assert pool.count == 3
        assert not any(e.is_draining for e in pool.kube.engines("chat-interactive").values())
        await pool.until(lambda: pool.count == 1, num_turns=60)

    run(body)


def test_a_victim_leaves_the_service_drains_and_is_the_one_that_goes(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec(interactive={"replicas": {"min": 3, "max": 3}})
        await pool.until(lambda: pool.status.get("interactive", {}).get("ready") == 3)
        engines = pool.kube.engines("chat-interactive")
        for engine in engines.values():
            engine.num_in_flight = 2
        pool.set_spec(interactive={"replicas": {"min": 2, "max": 2}})
        victims = await pool.until(lambda: [n for n, e in engines.items() if e.is_draining])
        await pool.turn(6)
        assert len(victims) == 1 and pool.count == 3
        pod = pool.kube.objects[f"/api/v1/namespaces/team/pods/{victims[0]}"]
        assert pod["metadata"]["labels"]["chairlift.dev/serving"] == "false"
        engines[victims[0]].num_in_flight = 0
        await pool.until(lambda: pool.count == 2)
        await pool.turn(2)
        assert set(pool.kube.engines("chat-interactive")) == set(engines) - set(victims)

    run(body)


def test_another_leader_goes_on_with_a_drain_and_a_policy(run: Any) -> None:
    async def body(pool: Turned) -> None:
        engines = await _two_busy_one_draining(pool)
        pool.next_leader()
        for engine in engines.values():
            engine.num_in_flight = 0
        await pool.until(lambda: pool.count == 1)
        await pool.turn(3)
        (left,) = pool.kube.engines("chat-interactive").values()
        assert not left.is_draining and left.policy.generation.term == 8
        assert "adopted from generation" in str(pool.status["decisions"])

    run(body)


@pytest.mark.parametrize(
    ("count", "capacity", "surge"), [(3, 3, 0), (3, 3, 1), (1, 1, 0), (1, 1, 1), (1, 2, 0)]
)
def test_new_start_up_values_replace_all_inside_the_capacity(
    run: Any, count: int, capacity: int, surge: int
) -> None:
    async def body(pool: Turned) -> None:
        def spec(largest: int) -> Json:
            return {
                "interactive": {
                    "replicas": {"min": count, "max": count},
                    "batchSize": {"max": largest},
                },
                "capacity": {"replicas": capacity, "surge": surge},
                "autoscaling": {"scaleDownWindow": "15s"},
            }

        pool.set_spec(**spec(64))
        await pool.until(lambda: pool.status.get("interactive", {}).get("ready") == count)
        old = set(pool.kube.engines("chat-interactive"))
        pool.set_spec(**spec(32))
        least = count
        for _ in range(80):
            await pool.turn()
            pods = [n for n in pool.kube.pods if n.startswith("chat-interactive")]
            assert len(pods) <= capacity + surge
            least = min(least, len(pool.kube.engines("chat-interactive")))
            engines = set(pool.kube.engines("chat-interactive"))
            if engines and not engines & old and not pool.status.get("progress"):
                break
        assert engines and not engines & old
        told = [o for o in pool.kube.objects.values() if o["kind"] == "Event"]
        assert least >= 1 or (capacity, surge) == (1, 0), told

    run(body)


def test_a_bad_revision_leaves_the_rest_serving_and_its_fix_passes(run: Any) -> None:
    async def body(pool: Turned) -> None:
        def spec(image: str) -> Json:
            return {
                "interactive": {"replicas": {"min": 2, "max": 2}},
                "capacity": {"replicas": 3},
                "runtime": {"engine": "simulator", "image": image},
            }

        pool.kube.bad_images.add("bad")
        pool.set_spec(**spec("good"))
        await pool.until(lambda: pool.status.get("interactive", {}).get("ready") == 2)
        old = set(pool.kube.engines("chat-interactive"))
        pool.set_spec(**spec("bad"))
        await pool.until(lambda: "no such model" in pool.status.get("progress", ""))
        await pool.turn(10)
        assert len(set(pool.kube.engines("chat-interactive")) & old) == 1
        pool.set_spec(**spec("better"))
        await pool.until(
            lambda: len(set(pool.kube.engines("chat-interactive")) - old) == 2, num_turns=60
        )

    run(body)


def test_recommend_touches_nothing_that_runs(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec(mode="Recommend")
        await pool.turn(4)
        (name,) = pool.kube.engines("chat-interactive")
        wanted = {"replicas": {"min": 2, "max": 2}, "batchSize": {"max": 64}}
        pool.set_spec(mode="Recommend", interactive=wanted)
        await pool.turn(6)
        assert list(pool.kube.engines("chat-interactive")) == [name] and pool.count == 1
        assert len(pool.kube.engines("chat-interactive")[name].policies) == 1
        assert not any(d["enforced"] for d in pool.status["decisions"])

    run(body)


def test_what_somebody_changed_is_set_again_once_and_said(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec()
        await pool.turn(4)
        path = "/api/v1/namespaces/team/services/chat-gateway"
        await pool.kube.patch(path, {"spec": {"type": "NodePort"}}, "person")
        await pool.turn(2)
        assert pool.kube.objects[path]["spec"]["type"] == "ClusterIP"
        reasons = [o["reason"] for o in pool.kube.objects.values() if o["kind"] == "Event"]
        assert reasons.count("DriftRepaired") == 1

    run(body)


def test_an_object_that_the_server_refuses_stops_nothing_else(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec()
        await pool.turn(4)
        pool.kube.refuses[GATEWAY] = "spec.template.spec.containers[0].image: Required value"
        more = {"min": 2, "max": 2}
        pool.set_spec(gateway={"podTemplate": {"x": 1}}, interactive={"replicas": more})
        await pool.until(lambda: pool.count == 2)
        assert "Required value" in pool.condition("Reconciled")["message"]
        assert pool.condition("Ready")["status"] == "True"
        pool.kube.refuses.clear()
        await pool.turn()
        assert pool.condition("Reconciled")["status"] == "True"

    run(body)


def test_a_pool_whose_engines_are_refused_says_so_until_they_are_not(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.kube.refuses[DEPLOYMENT] = "forbidden: exceeded quota"
        pool.set_spec()
        await pool.turn(2)
        assert "exceeded quota" in pool.condition("Reconciled")["message"]
        before = len(pool.kube.writes)
        await pool.turn(11)
        assert len(pool.kube.writes[before:]) <= 1  # tried again, and not told again
        pool.kube.refuses.clear()
        await pool.until(lambda: pool.status["interactive"]["ready"] == 1)

    run(body)


def test_a_spec_that_is_refused_changes_nothing(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec()
        await pool.turn(4)
        before = len(pool.kube.writes)
        pool.set_spec(runtime={"engine": "simulator", "simulator": {"profile": "warp"}})
        await pool.turn(3)
        assert pool.condition("Accepted")["status"] == "False"
        assert "spec.runtime.simulator.profile" in pool.condition("Accepted")["message"]
        assert {path for _, path, _ in pool.kube.writes[before:]} == {POOL}

    run(body)


def test_a_pool_of_another_operator_is_left_alone_entirely_and_the_log_says_whose_it_is(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec()
        await pool.turn(3)
        for path, item in pool.kube.objects.items():
            if path.endswith("/secrets/chat-tokens"):
                item["metadata"]["annotations"]["chairlift.dev/operator"] = "other/chairlift"
        pool.next_leader()
        before = len(pool.kube.writes)
        pool.set_spec(gateway={"replicas": 5})
        await pool.turn(5)
        assert pool.kube.writes[before:] == []
        assert caplog.text.count("looked after by the operator other/chairlift") == 1

    run(body)


def test_a_stranger_of_the_same_name_is_not_taken_over(run: Any) -> None:
    async def body(pool: Turned) -> None:
        path = "/api/v1/namespaces/team/services/chat-gateway"
        stranger = {"kind": "Service", "metadata": {"name": "chat-gateway", "namespace": "team"}}
        pool.kube.objects[path] = {**stranger, "spec": {}}
        pool.set_spec()
        await pool.turn(3)
        assert pool.condition("Accepted")["status"] == "False"
        assert "is not this pool's" in pool.condition("Accepted")["message"]
        assert pool.kube.objects[path]["spec"] == {}

    run(body)


def test_new_pods_start_from_the_policy_that_was_last_kept(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec(interactive={"batchSize": {"min": 4, "max": 128}})
        await pool.turn(4)
        path = "/api/v1/namespaces/team/configmaps/chat-policy"
        assert '"batch_size": 16' in pool.kube.objects[path]["data"]["interactive.json"]
        pool.set_spec(interactive={"batchSize": {"min": 1, "max": 8}})
        await pool.turn()
        # At once: an engine that reserved memory for 8 does not start with 16.
        assert '"batch_size": 8' in pool.kube.objects[path]["data"]["interactive.json"]

    run(body)


def test_a_deployment_whose_label_somebody_takes_keeps_its_count(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec(interactive={"replicas": {"min": 1, "max": 3}})
        await pool.turn(4)
        await pool.kube.patch(f"{DEPLOYMENT}/scale", {"spec": {"replicas": 3}}, "person")
        await pool.until(lambda: pool.status["interactive"]["ready"] == 3)
        before = set(pool.kube.engines("chat-interactive"))
        live = pool.kube.objects[DEPLOYMENT]
        pool.kube.stores.children["Deployment"].drop(live)  # what the watch then says
        del live["metadata"]["labels"]["chairlift.dev/pool"]
        await pool.turn(4)
        assert pool.kube.objects[DEPLOYMENT]["metadata"]["labels"]["chairlift.dev/pool"] == "chat"
        assert pool.count == 3 and set(pool.kube.engines("chat-interactive")) == before

    run(body)


def test_a_class_that_is_added_gets_no_more_replicas_than_there_is_room_for(run: Any) -> None:
    async def body(pool: Turned) -> None:
        interactive, capacity = {"replicas": {"min": 1, "max": 2}}, {"replicas": 2}
        pool.set_spec(interactive=interactive, capacity=capacity)
        await pool.turn(4)
        await pool.kube.patch(f"{DEPLOYMENT}/scale", {"spec": {"replicas": 2}}, "person")
        await pool.until(lambda: pool.status["interactive"]["ready"] == 2)
        for engine in pool.kube.engines().values():
            engine.num_in_flight = 1
        batch = {"replicas": {"min": 1, "max": 1}}
        pool.set_spec(interactive=interactive, capacity=capacity, batch=batch)
        for _ in range(8):
            await pool.turn()
            assert len(pool.kube.engines()) <= 2
        for engine in pool.kube.engines().values():
            engine.num_in_flight = 0
        await pool.until(lambda: pool.status.get("batch", {}).get("ready") == 1)
        assert pool.count == 1

    run(body)


def test_a_count_that_could_not_be_written_at_first_is_written_before_any_pod(run: Any) -> None:
    async def body(pool: Turned) -> None:
        path = DEPLOYMENT.replace("interactive", "batch")
        pool.kube.refuses[f"{path}/scale"] = "not now"
        pool.set_spec(batch={"replicas": {"min": 0, "max": 1}})
        await pool.turn(3)
        assert not pool.kube.engines("chat-batch")
        pool.kube.refuses.clear()
        await pool.turn(3)
        assert not pool.kube.engines("chat-batch")
        assert pool.kube.objects[path]["spec"]["replicas"] == 0

    run(body)


def test_tokens_that_somebody_deletes_are_made_again_as_engines_know_them(run: Any) -> None:
    async def body(pool: Turned) -> None:
        pool.set_spec()
        await pool.turn(4)
        before = pool.kube.objects.pop(TOKENS)["data"]
        (name,) = pool.kube.engines("chat-interactive")
        pod = pool.kube.objects[f"/api/v1/namespaces/team/pods/{name}"]
        waits = {"metadata": {**pod["metadata"], "resourceVersion": "999"}, "status": {}}
        pool.kube.stores.pods.put({**pod, **waits})  # as its successor would
        await pool.until(lambda: TOKENS in pool.kube.objects, num_turns=8)
        assert pool.kube.objects[TOKENS]["data"] == before

    run(body)


@pytest.mark.parametrize("refused", [TOKENS, "/api/v1/namespaces/team/configmaps/chat-policy"])
def test_whatever_the_server_refuses_is_said(run: Any, refused: str) -> None:
    async def body(pool: Turned) -> None:
        pool.kube.refuses[refused] = "exceeded quota"
        pool.set_spec()
        await pool.turn(2)
        assert pool.condition("Reconciled")["status"] == "False"
        assert "exceeded quota" in pool.condition("Reconciled")["message"]
        pool.kube.refuses.clear()
        await pool.until(lambda: pool.condition("Reconciled")["status"] == "True")

    run(body)


def test_shrinking_amid_a_rollout_takes_nobody_who_was_not_drained(run: Any) -> None:
    async def body(pool: Turned) -> None:
        def spec(count: int, batch_size: int) -> Json:
            replicas = {"min": count, "max": count}
            interactive = {"replicas": replicas, "batchSize": {"max": batch_size}}
            return {"interactive": interactive, "capacity": {"replicas": 5}}

        pool.set_spec(**spec(5, 64))
        await pool.until(lambda: pool.status.get("interactive", {}).get("ready") == 5)
        pool.set_spec(**spec(5, 32))
        await pool.until(lambda: any(e.is_draining for e in pool.kube.engines("chat-int").values()))
        going = {n for n, e in pool.kube.engines("chat-int").items() if e.is_draining}
        pool.set_spec(**spec(2, 32))
        for _ in range(16):
            for engine in pool.kube.engines("chat-int").values():
                engine.num_in_flight = int(not engine.is_draining)
            before = {n: e.is_draining for n, e in pool.kube.engines("chat-int").items()}
            await pool.turn()
            gone = before.keys() - pool.kube.engines("chat-int").keys()
            assert all(before[name] or name in going for name in gone), (gone, before)

    run(body)
