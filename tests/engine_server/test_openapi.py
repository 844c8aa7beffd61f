"""The server against its own description: what it allows never breaks it, what it forbids fails."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from chairlift_engine.server.bodies import HARMLESS, ChatBody, CompletionBody


@pytest.fixture(scope="module")
def description(shared_engine):
    return schemathesis.openapi.from_url(f"{shared_engine.url}/openapi.json")


api = schemathesis.pytest.from_fixture("description")


@api.parametrize()
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_the_server_keeps_to_its_own_description(case) -> None:
    case.call_and_validate(excluded_checks=[positive_data_acceptance])


def test_every_field_is_described(shared_engine) -> None:
    described = shared_engine.client.get("/openapi.json").json()
    for body in (CompletionBody, ChatBody):
        schema = described["components"]["schemas"][body.__name__]
        names = {*body.model_fields, *body.not_built, *HARMLESS}
        assert names == schema["properties"].keys()
        assert schema["properties"]["model"]["enum"] == ["echo"]


def test_the_description_can_be_read_as_a_page(shared_engine) -> None:
    page = shared_engine.client.get("/docs")
    assert page.status_code == 200 and "/openapi.json" in page.text
