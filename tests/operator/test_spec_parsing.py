from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift_operator.spec_parsing import (
    SpecError,
    parse_pool,
    pool_hash,
    pool_to_mapping,
    with_overrides,
)
from chairlift_operator.spec_runtime import StepProfile
from chairlift_operator.spec_values import format_duration, parse_duration

MINIMAL = """
apiVersion: chairlift.dev/v1alpha1
kind: InferencePool
metadata: {name: chat}
spec:
  model: {name: m, source: "cache://m"}
"""


def _with(lines: str) -> str:
    return MINIMAL + lines


def _problems(text: str) -> tuple[str, ...]:
    with pytest.raises(SpecError) as caught:
        parse_pool(text)
    return caught.value.problems


def test_a_minimal_pool_gets_the_documented_defaults() -> None:
    pool = parse_pool(MINIMAL)
    interactive = pool.spec.interactive
    assert (pool.name, pool.namespace, pool.spec.mode) == ("chat", "default", "Enforce")
    assert pool.spec.model.max_length == 4096
    assert interactive.slo.time_to_first_token.threshold_s == 0.5
    assert interactive.slo.inter_token_latency.threshold_ms == 50
    assert (interactive.batch_size.min, interactive.batch_size.max) == (1, 256)
    assert (interactive.step_tokens.min, interactive.step_tokens.max) == (64, 2048)


@pytest.mark.parametrize(
    ("name", "threshold_s", "num_replicas"), [("chat.yaml", 0.3, 1), ("fleet.yaml", 0.05, 4)]
)
def test_the_example_pools_are_accepted(name: str, threshold_s: float, num_replicas: int) -> None:
    example = Path(__file__).parents[2] / "examples" / name
    pool = parse_pool(example.read_text(encoding="utf-8"))
    assert pool.spec.interactive.slo.inter_token_latency.threshold_s == threshold_s
    assert pool.spec.num_replicas == num_replicas


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (_with("  batchsize: 3\n"), "spec.batchsize: is not a field here"),
        (_with("  interactive: {batch_size: {min: 2}}\n"), "did you mean batchSize?"),
        (
            _with("  interactive: {slo: {interTokenLatency: {treshold: 1s, threshold: 1s}}}\n"),
            "spec.interactive.slo.interTokenLatency.treshold: is not a field here; did you mean "
            "threshold?",
        ),
        (
            _with("  tenancy: {}\n"),
            "spec.tenancy: is not a field here: remove it; known here: model",
        ),
        (
            _with("  batch: {}\n"),
            "spec.batch: batch work would have nowhere to run: set replicas.max",
        ),
        (
            _with("  batch: {borrowing: {maxShare: 101}}\n"),
            "spec.batch.borrowing.maxShare: must be less than or equal to 100, not 101.",
        ),
        (
            _with("  batch: {borrowing: {returnWithin: 5s}}\n"),
            "spec.batch.borrowing: returnWithin 5s is below 10s, two of the controller's ticks",
        ),
        (
            _with(
                "  batch: {borrowing: {}, batchSize: {max: 64}, stepTokens: {max: 32, min: 32}}\n"
            ),
            "spec.batch: batchSize.max 64 is above stepTokens.max 32",
        ),
        (
            _with(
                "  capacity: {replicas: 2}\n"
                "  interactive: {replicas: {min: 2, max: 4}}\n"
                "  batch: {replicas: {min: 1, max: 1}}\n"
            ),
            "spec: interactive.replicas.min 2 and batch.replicas.min 1 make 3, above "
            "capacity.replicas 2: lower a min or raise capacity.replicas.",
        ),
        (
            _with("  interactive: {replicas: {min: 0}}\n"),
            "spec.interactive.replicas.min: must be greater than or equal to 1, not 0.",
        ),
        (
            _with("  interactive: {scheduling: static}\n"),
            "spec.interactive.scheduling: must be 'Continuous' or 'Static', not 'static'.",
        ),
        (
            _with("  interactive: {batchSize: {min: 9, max: 4}}\n"),
            "spec.interactive.batchSize: min 9 is above max 4: lower min or raise max.",
        ),
        (
            _with("  interactive: {batchSize: {max: 128}, stepTokens: {max: 100}}\n"),
            "spec.interactive: batchSize.max 128 is above stepTokens.max 100",
        ),
        (
            _with("  interactive: {stepTokens: {min: 8}}\n"),
            "spec.interactive.stepTokens.min: must be greater than or equal to 16, not 8.",
        ),
        (
            _with("  interactive: {batchSize: {min: '4'}}\n"),
            "spec.interactive.batchSize.min: must be an integer, not '4'.",
        ),
        (
            _with("  interactive: {slo: {interTokenLatency: {threshold: 300}}}\n"),
            "threshold: must be a duration with its unit, such as 500ms, 2s or 10m, not 300.",
        ),
        (
            _with("  interactive: {slo: {interTokenLatency: {threshold: 0s}}}\n"),
            "threshold: must be at least 0.001ms, not '0s'.",
        ),
        (
            _with("  interactive: {slo: {interTokenLatency: {threshold: 1s, objective: 100}}}\n"),
            "objective: must be less than or equal to 99.99, not 100.",
        ),
        (_with("  mode: enforce\n"), "spec.mode: must be 'Enforce' or 'Recommend', not 'enforce'."),
        (
            _with("  metrics: {source: Thanos}\n"),
            "spec.metrics.source: must be 'Direct' or 'Prometheus'",
        ),
        (
            _with("  metrics: {url: 'http://prometheus:9090'}\n"),
            "spec.metrics: url only works with 'source: Prometheus': set that, or remove url",
        ),
        (
            _with("  metrics: {source: Prometheus, url: 'prometheus:9090'}\n"),
            "spec.metrics.url: must look like http://prometheus.monitoring:9090",
        ),
        (
            _with("  metrics: {source: Prometheus, url: 'http://me:secret@prometheus'}\n"),
            "spec.metrics.url: must look like http://prometheus.monitoring:9090",
        ),
        (_with("  interactive: 3\n"), "spec.interactive: must be an object with fields, not 3."),
        (_with("  runtime: {sharePrefixes: 1}\n"), "spec.runtime.sharePrefixes: "),
        (
            _with("  runtime: {simulator: {profile: fast}}\n"),
            "spec.runtime: simulator only works with 'engine: simulator'",
        ),
        (
            _with("  runtime: {engine: simulator, simulator: {profile: quick}}\n"),
            "spec.runtime.simulator.profile: must be 'reference', 'fast' or 'slow', not 'quick'.",
        ),
        (
            _with(
                "  runtime: {engine: simulator, simulator: {profile: {a: 1ms, b: 1ms, c: 1ms}}}\n"
            ),
            "spec.runtime.simulator.profile.d: is missing: add it.",
        ),
        (MINIMAL.replace("cache://m", "s3://m"), "spec.model.source: must look like hf://"),
        (MINIMAL.replace("v1alpha1", "v2"), "apiVersion: is 'chairlift.dev/v2': this version take"),
        (MINIMAL.replace("kind: InferencePool\n", ""), "kind: is missing: add 'kind: Inference"),
        (MINIMAL.replace("chat", "Chat"), "metadata.name: must be 1 to 40 lower-case letters"),
        (MINIMAL + "---" + MINIMAL, "holds 2 documents: give exactly one InferencePool."),
        ("", "holds 0 documents"),
        ("image: x\nreplicas: 2\n", "is no InferencePool: it has none of apiVersion, kind, metad"),
        ("- a\n", "holds a list: give an object"),
        ("a: [1,\n", "line 2, column 1: not valid YAML"),
        (_with("  mode: Enforce\n  mode: Recommend\n"), "line 8, column 3: not valid YAML: 'mode'"),
    ],
)
def test_a_wrong_pool_is_refused_with_a_sentence_on_what_to_change(
    text: str, sentence: str
) -> None:
    problems = _problems(text)
    assert any(sentence in problem for problem in problems), problems
    assert all(problem.endswith((".", "?")) for problem in problems)


def test_another_kind_of_file_is_said_once_and_not_field_by_field() -> None:
    assert len(_problems("image: x\nreplicas: 2\n")) == 1


def test_every_problem_is_listed_at_once() -> None:
    text = MINIMAL.replace("cache://m", "m").replace("v1alpha1", "v1") + "  mode: on\n  x: 1\n"
    assert len(_problems(text)) == 4


def test_a_custom_simulator_profile_is_read_in_seconds() -> None:
    profile = "{a: 8ms, b: 0.06ms, c: 0.045ms, d: 0.00005ms, noise: 0.04, load: 1m}"
    runtime = f"{{engine: simulator, simulator: {{profile: {profile}}}}}"
    pool = parse_pool(_with(f"  runtime: {runtime}\n"))
    assert pool.spec.runtime.simulator is not None
    wanted = StepProfile(8e-3, 6e-5, 4.5e-5, 5e-8, noise=0.04, load_s=60)
    assert pool.spec.runtime.simulator.profile == wanted
    assert parse_pool(pool_to_mapping(pool)) == pool


def test_overrides_replace_single_fields_and_are_validated() -> None:
    pool = parse_pool(MINIMAL)
    slower = with_overrides(
        pool, ["interactive.slo.interTokenLatency.threshold=40ms", "mode=Recommend"]
    )
    assert slower.spec.interactive.slo.inter_token_latency.threshold_ms == 40
    assert slower.spec.mode == "Recommend"
    assert pool_hash(slower) != pool_hash(pool) == pool_hash(parse_pool(pool_to_mapping(pool)))


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("mode", "write path.to.field=value"),
        ("mode.x=1", "spec.mode.x: cannot be set, because spec.mode is 'Enforce', not an object."),
        ("interactive.batchSize.maxx=1", "did you mean max?"),
        ("interactive.batchSize.max=0", "must be greater than or equal to 1, not 0."),
        ("mode=[", "is not a YAML value"),
        ("mode=" + "[" * 5000, "is not a YAML value: it is nested too deeply."),
        ("interactive.batchSize.max=" + "9" * 5000, "cannot be read as int."),
        ("interactive.batchSize.max=0x" + "9" * 5000, "not a number of thousands of digits."),
        ("interactive.batchSize={min: 1, min: 2}", "'min' is given twice."),
        ("mode=a\n---\nb", "is not a YAML value but 2 documents."),
        ("interactive..max=1", "write path.to.field=value"),
        (".mode=Enforce", "write path.to.field=value"),
    ],
)
def test_a_wrong_override_is_refused_by_path(setting: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        with_overrides(parse_pool(MINIMAL), [setting])
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("? [a, b]\n: c\n", "line 7, column 3: not valid YAML: a key must be a name"),
        ("? {a: b}\n: c\n", "line 7, column 3: not valid YAML: a key must be a name"),
        ("x: 2001-99-99\n", "line 7, column 4: not valid YAML: '2001-99-99' cannot be read"),
        ("x: !!int abc\n", "line 7, column 4: not valid YAML: 'abc' cannot be read as int."),
        ("x: !!int ''\n", "line 7, column 4: not valid YAML: '' cannot be read as int."),
        ("x: " + "9" * 5000, "line 7, column 4: not valid YAML: '9999"),
        ("x: \x01\n", "line 7, column 4: not valid YAML: the character '\\x01' is not allowed."),
        ("x: " + "[" * 5000, "not valid YAML: it is nested too deeply."),
        ("1: 2\n", "1: is not a field here: the name of a field is text."),
        ("'': 2\n", "'': is not a field here"),
    ],
)
def test_text_that_yaml_cannot_construct_is_refused_with_its_place(
    line: str, sentence: str
) -> None:
    assert any(p.startswith(sentence) for p in _problems(MINIMAL + line)), _problems(MINIMAL + line)


def test_a_value_that_refers_to_itself_many_times_is_not_spelled_out() -> None:
    levels = [f"x{i}: &x{i} [{f'*x{i - 1}, ' * 9 if i else 1}]" for i in range(30)]
    problems = _problems("\n".join(levels) + "\nspec: *x29\n")
    assert all(len(problem) < 300 for problem in problems)


SLO = "  interactive: {slo: {interTokenLatency: {threshold: %s, objective: %s}}}\n"
PROFILE = "  runtime: {engine: simulator, simulator: {profile: {%s}}}\n"
COSTS = "b: 0s, c: 0s, d: 0s"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        *[
            (_with(SLO % ("50ms", objective)), sentence)
            for objective, sentence in [
                ("1.0e-20", "objective: must be greater than or equal to 1, not 1e-20: it is a"),
                ("0.95", "not 0.95: it is a percentage, such as 95."),
                ("99.999999", "objective: must be less than or equal to 99.99, not 99.999999."),
                (".nan", "not nan."),
                ("true", "objective: must be a number, not true."),
                ("'95'", "objective: must be a number, not '95': write 95."),
                ("95%", "objective: must be a number, not '95%': write 95."),
                ("99.5 %", "objective: must be a number, not '99.5 %': write 99.5."),
                ("most", "objective: must be a number, not 'most'."),
            ]
        ],
        (_with(SLO % ("0.0000001ms", 95)), "threshold: must be at least 0.001ms, not '0.00"),
        (_with(SLO % ("25h", 95)), "threshold: must be at most 24h, not '25h'."),
        (_with(SLO % ("9" * 400 + "s", 95)), "threshold: must be at most 24h, not '999"),
        (_with(SLO % ("٣s", 95)), "threshold: must be a duration with its unit"),
        (_with(PROFILE % f"a: 0s, {COSTS}"), "profile.a: must be at least 0.001ms, not '0s'."),
        (
            _with(PROFILE % f"a: 1s, {COSTS}, noise: '0'"),
            "profile.noise: must be a number, not '0'.",
        ),
        (_with(PROFILE % f"a: 1s, {COSTS}, named: 1"), "profile.named: is not a field here"),
        (
            _with("  batch: {borrowing: {maxShare: true}}\n"),
            "maxShare: must be a number, not true.",
        ),
        (_with("  interactive: {batchSize: {max: 1000001}}\n"), "less than or equal to 1000000"),
        (_with("  batch: {stepTokens: {min: 1000001}}\n"), "less than or equal to 1000000"),
        *[
            (MINIMAL.replace("name: m,", f"name: {name},"), f"spec.model.name: {sentence}")
            for name, sentence in [
                ("'-m'", "must not begin with '-', nor begin or end with a blank, not '-m'."),
                ("'  '", "must not begin with '-', nor begin or end with a blank, not '  '."),
                ('"a\\0b"', "must be 1 to 200 printable characters, not 'a\\x00b'."),
                ('"a\\nb"', "must be 1 to 200 printable characters, not 'a\\nb'."),
                ("''", "must be 1 to 200 printable characters, not ''."),
                ("m" * 201, "must be 1 to 200 printable characters, not 'mmm"),
            ]
        ],
        (MINIMAL.replace("cache://m", "cache://a\\0b"), "source: must be 1 to 1000 printable"),
    ],
)
def test_a_value_that_would_fail_later_is_refused_now(text: str, sentence: str) -> None:
    problems = _problems(text)
    assert any(sentence in problem for problem in problems), problems


@given(st.floats(min_value=1e-9, max_value=86_400))
def test_a_duration_is_spelled_so_that_it_parses_back_exactly(duration_s: float) -> None:
    assert parse_duration(format_duration(duration_s)) == duration_s


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["spec", "model", "name", "interactive"]), inner, max_size=3
            )
        ),
    )
)
def test_any_other_document_is_refused_and_never_crashes(document: object) -> None:
    with pytest.raises(SpecError):
        parse_pool({"spec": document, "metadata": document})
