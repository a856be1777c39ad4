"""What docs/ says is so: its blocks load, its links lead somewhere, and its reference is that of the code.

The blocks of the quick start are run by `tests/integration/test_fresh_project.py`, its SQL by `test_roles.py`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from dagster import Definitions
from dagster._core.instance.config import dagster_instance_config_schema
from dagster._core.test_utils import instance_for_test
from dagster.components.testing import create_defs_folder_sandbox

from outbox_plugin.dagster import OutboxComponent
from tests.documents import DOCS, Block, blocks, reference

pytestmark = [  # Dagster's own calls.
    pytest.mark.filterwarnings("ignore:`parse_obj_as` is deprecated"),
    pytest.mark.filterwarnings("ignore:.* is currently in beta"),
]

PAGES = ["quick-start.md", "concepts.md", "production.md"]
DECLARATIONS = [block for block in blocks("concepts.md", "python") if "definitions = " in block.text]
YAML = [block for page in PAGES for block in blocks(page, "yaml")]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DSN", "postgresql://app@db/shop")
    monkeypatch.setenv("OUTBOX_BOOTSTRAP_SERVERS", "kafka:9092")
    monkeypatch.setenv("KAFKA_PASSWORD", "secret")


def test_the_reference_is_that_of_the_code() -> None:
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == reference(), "run `python -m tests.documents`"


@pytest.mark.parametrize("page", [path.name for path in DOCS.glob("*.md")])
def test_links_and_images_lead_somewhere(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (DOCS / link).exists(), link


def test_declarations_are_there() -> None:
    assert len(DECLARATIONS) == 2
    assert len(YAML) == 5


@pytest.mark.parametrize("block", DECLARATIONS)
def test_declarations_load(block: Block) -> None:
    names: dict[str, Any] = {}
    exec(compile(block.text, "concepts.md", "exec"), names)
    assert isinstance(names["definitions"], Definitions)
    Definitions.validate_loadable(names["definitions"])


@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_compile(page: str) -> None:
    for block in blocks(page, "python"):
        compile(block.text, page, "exec")


@pytest.mark.parametrize("block", [block for block in YAML if block.file != "dagster.yaml"])
def test_components_load(block: Block) -> None:
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(OutboxComponent, defs_yaml_contents=yaml.safe_load(block.text))
        with sandbox.load_component_and_build_defs(defs_path=path) as (_, definitions):
            Definitions.validate_loadable(definitions)


def test_the_instance_is_configured_as_dagster_has_it() -> None:
    [block] = [block for block in YAML if block.file == "dagster.yaml"]
    given = yaml.safe_load(block.text)
    assert given.keys() <= dagster_instance_config_schema().keys()
    with instance_for_test(overrides=given) as instance:
        assert instance.get_settings("freshness") == given["freshness"]
