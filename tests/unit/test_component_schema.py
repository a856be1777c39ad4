"""The JSON schema of the component, which `dg check yaml`, `dg docs` and editors read: it describes each attribute."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from outbox_plugin.dagster import OutboxComponent
from outbox_plugin.dagster.component import ConsumerModel, TopicModel
from tests.components import component_schema

pytestmark = [  # Dagster's own calls.
    pytest.mark.filterwarnings("ignore:`parse_obj_as` is deprecated"),
    pytest.mark.filterwarnings("ignore:.* is currently in beta"),
]

MODELS: dict[str, type[BaseModel]] = {
    "OutboxComponent": OutboxComponent,
    "TopicModel": TopicModel,
    "ConsumerModel": ConsumerModel,
}


def attributes(model: str) -> dict[str, dict[str, Any]]:
    schema = component_schema()
    found: dict[str, dict[str, Any]] = (schema if model == "OutboxComponent" else schema["$defs"][f"{model}Model"])[
        "properties"
    ]
    return found


@pytest.mark.parametrize("model", MODELS)
def test_each_attribute_has_our_description(model: str) -> None:
    ours = {name: field.description for name, field in MODELS[model].model_fields.items()}
    assert all(ours.values())
    assert {name: attribute.get("description") for name, attribute in attributes(model).items()} == ours


@pytest.mark.parametrize("model", MODELS)
def test_examples_arrive_and_are_valid(model: str) -> None:
    ours = {name: field.examples for name, field in MODELS[model].model_fields.items() if field.examples}
    found = {name: each["examples"] for name, each in attributes(model).items() if "examples" in each}
    assert found == ours
    for name, examples in found.items():
        one = {"$defs": component_schema()["$defs"], **attributes(model)[name]}
        for example in examples:
            assert [error.message for error in Draft202012Validator(one).iter_errors(example)] == []


def test_a_component_shows_no_secret() -> None:
    component = OutboxComponent(topics=[], dsn="postgresql://app:hush@db/shop", kafka={"sasl.password": "hush"})
    assert "hush" not in repr(component)
