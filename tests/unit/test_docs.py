"""What docs/ says is so: its blocks load, its links lead somewhere, and its reference is that of the code.

The blocks of the first project are run by `tests/integration/test_fresh_project.py`, the roles by `test_roles.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import Definitions
from dagster._core.instance.config import dagster_instance_config_schema
from dagster._core.test_utils import instance_for_test
from dagster.components.testing import create_defs_folder_sandbox

from outbox_plugin.dagster import OutboxComponent
from tests.documents import PAGES, REFERENCE, Block, blocks, blocks_of, dead_links, linked_pages, name_of, reference

pytestmark = [  # Dagster's own calls.
    pytest.mark.filterwarnings("ignore:`parse_obj_as` is deprecated"),
    pytest.mark.filterwarnings("ignore:.* is currently in beta"),
]

DECLARATIONS = [block for block in blocks("how-to/declare-in-dagster.md", "python") if "definitions = " in block.text]
YAML = [block for page in PAGES for block in blocks_of(page, "yaml")]
COMPONENTS = [block for block in YAML if block.text.startswith(("type: ", "# src/"))]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DSN", "postgresql://app@db/shop")
    monkeypatch.setenv("OUTBOX_BOOTSTRAP_SERVERS", "kafka:9092")
    monkeypatch.setenv("KAFKA_PASSWORD", "secret")


def test_the_reference_is_that_of_the_code() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == reference(), "run `python -m tests.documents`"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_images_lead_somewhere(page: Path) -> None:
    """To a file of the checkout, and to a heading that is there."""
    assert dead_links(page) == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, ahead = set(), [PAGES[0].parent / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in seen:
            seen.add(page)
            ahead += linked_pages(page)
    assert {name_of(page) for page in PAGES} - {name_of(page) for page in seen} == set()


def test_declarations_are_there() -> None:
    assert len(DECLARATIONS) == 3
    assert len(COMPONENTS) == 6


@pytest.mark.parametrize("block", DECLARATIONS)
def test_declarations_load(block: Block) -> None:
    names: dict[str, Any] = {}
    exec(compile(block.text, "declare-in-dagster.md", "exec"), names)
    assert isinstance(names["definitions"], Definitions)
    Definitions.validate_loadable(names["definitions"])


@pytest.mark.parametrize("block", COMPONENTS)
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
