"""What docs/ says is so: its blocks load, its links lead somewhere, and its reference is that of the code.

The blocks of the first project are run by `tests/integration/test_fresh_project.py`, the roles by `test_roles.py`.
"""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from dagster import Definitions
from dagster._core.instance.config import dagster_instance_config_schema
from dagster._core.test_utils import instance_for_test
from dagster.components.testing import create_defs_folder_sandbox

from outbox_plugin.cli import outbox
from outbox_plugin.dagster import OutboxComponent, RangeConfig
from tests import reference
from tests.documents import CHECKOUT, DOCS, PAGES, Block, blocks, blocks_of, dead_links, linked_pages, name_of

pytestmark = [  # Dagster's own calls.
    pytest.mark.filterwarnings("ignore:`parse_obj_as` is deprecated"),
    pytest.mark.filterwarnings("ignore:.* is currently in beta"),
]

DECLARES = re.compile(r"^definitions\b", re.MULTILINE)
DECLARATIONS = [block for block in blocks("how-to/declare-in-dagster.md", "python") if DECLARES.search(block.text)]
YAML = [block for page in PAGES for block in blocks_of(page, "yaml")]
SHELLS_OWN = {"&", "&&", "|", "||", ";", ">", ">>", "<", "2>"}
COMPONENTS = [block for block in YAML if block.text.startswith(("type: ", "# src/"))]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_DSN", "postgresql://app@db/shop")
    monkeypatch.setenv("OUTBOX_BOOTSTRAP_SERVERS", "kafka:9092")
    monkeypatch.setenv("KAFKA_PASSWORD", "secret")


@pytest.mark.parametrize("page", reference.pages(), ids=name_of)
def test_the_reference_is_that_of_the_code(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == reference.pages()[page], "run `python -m tests.reference`"


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
    assert len(DECLARATIONS) == 7
    assert len(COMPONENTS) == 8


@pytest.mark.parametrize("block", DECLARATIONS)
def test_declarations_load(block: Block) -> None:
    names: dict[str, Any] = {}
    exec(compile(block.text, "declare-in-dagster.md", "exec", dont_inherit=True), names)
    assert isinstance(names["definitions"], Definitions)
    Definitions.validate_loadable(names["definitions"])


@pytest.mark.parametrize("block", COMPONENTS)
def test_components_load(block: Block) -> None:
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(OutboxComponent, defs_yaml_contents=yaml.safe_load(block.text))
        with sandbox.load_component_and_build_defs(defs_path=path) as (_, definitions):
            Definitions.validate_loadable(definitions)


@pytest.mark.filterwarnings("ignore:.* is currently in preview")  # Dagster's own call.
def test_assets_of_the_pages_load_beside_the_component() -> None:
    """Without what the pages say to leave out there: it would define the component's resource a second time."""
    consuming = blocks("how-to/consume-in-dagster-and-spark.md")
    [component] = [block for block in consuming if block in COMPONENTS]
    [totals] = [block for block in consuming if block.file == "src/shop/defs/totals.py"]
    [orders] = [block for block in DECLARATIONS if "OutboxWrite" in block.text]
    [resources] = [block for block in DECLARATIONS if block.file == "src/shop/defs/resources.py"]
    with create_defs_folder_sandbox() as sandbox:
        sandbox.scaffold_component(OutboxComponent, defs_yaml_contents=yaml.safe_load(component.text))
        (sandbox.defs_folder_path / "totals.py").write_text(totals.text.partition("\ndefinitions = ")[0])
        (sandbox.defs_folder_path / "orders.py").write_text(orders.text.partition("\noutbox = ")[0])
        (sandbox.defs_folder_path / "resources.py").write_text(resources.text)
        with sandbox.build_all_defs() as definitions:
            Definitions.validate_loadable(definitions)
            assert {"outbox", "harvester", "spark"} == set(definitions.resources or ())


def test_the_instance_is_configured_as_dagster_has_it() -> None:
    [block] = [block for block in YAML if block.file == "dagster.yaml"]
    given = yaml.safe_load(block.text)
    assert given.keys() <= dagster_instance_config_schema().keys()
    with instance_for_test(overrides=given) as instance:
        assert instance.get_settings("freshness") == given["freshness"]


def test_the_range_of_a_backfill_is_a_configuration() -> None:
    [block] = [block for block in YAML if block.text.startswith("ops:")]
    [config] = [op["config"] for op in yaml.safe_load(block.text)["ops"].values()]
    assert RangeConfig(**config).range().backfill == config["backfill"]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_those_of_the_program(page: Path) -> None:
    """Lines of `outbox` in a shell's block can be parsed; options that prose names are there."""
    for line in shell_lines(page):
        words = shlex.split(line, comments=True)
        if words and Path(words[0]).name == "outbox":
            command, arguments = found_command(list(takewhile(lambda word: word not in SHELLS_OWN, words[1:])))
            command.make_context(command.name, arguments)
        if words[:2] == ["python", "-m"]:
            assert find_spec(words[2]), line
    for text in re.findall(r"`outbox ([^`]+)`", page.read_text(encoding="utf-8")):
        command, arguments = found_command(text.replace("…", "").split())
        known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
        assert set(re.findall(r"--[a-z-]+", " ".join(arguments))) <= known, text


def shell_lines(page: Path) -> list[str]:
    return [line for block in blocks_of(page, "sh") for line in block.text.splitlines()]


def found_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the first words name, and the words after them."""
    command: click.Command = outbox
    while isinstance(command, click.Group) and words:
        found = command.get_command(click.Context(command), words[0])
        assert found or words[0].startswith("-"), words
        if found is None:
            break
        command, words = found, words[1:]
    return command, words


def test_the_lines_that_stop_a_harvester_are_those_of_the_code() -> None:
    page = (DOCS / "how-to" / "troubleshoot.md").read_text(encoding="utf-8").split("## A harvester does not start")[1]
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    code = "".join(path.read_text(encoding="utf-8") for path in (CHECKOUT / "outbox_plugin").rglob("*.py"))
    said = re.sub(r"[`'\"]|f\"", "", re.sub(r'"\s*\n\s*f?"', "", code))
    quoted = [part for cell in cells for line in re.findall(r"`(.*?)`", cell) for part in line.split("…")]
    assert len(quoted) > 7
    assert [part for part in quoted if part.strip() not in said] == []
