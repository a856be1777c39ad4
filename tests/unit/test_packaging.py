"""What is shipped, and what importing it costs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import outbox_plugin
import outbox_plugin.coordination
import outbox_plugin.dagster
import outbox_plugin.inbox

CHECKOUT = Path(__file__).resolve().parents[2]


def modules_after(statement: str) -> set[str]:
    """The top-level modules that are loaded in a fresh interpreter after `statement`."""
    script = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_a_spark_worker_loads_neither_dagster_nor_kafka() -> None:
    loaded = modules_after("import outbox_plugin.spark.staging")
    assert "pyspark" in loaded
    assert not loaded & {"dagster", "confluent_kafka"}


def test_a_harvester_loads_neither_dagster_nor_spark() -> None:
    loaded = modules_after("import outbox_plugin.cli, outbox_plugin.harvester, outbox_plugin.dagster.daemon")
    assert "confluent_kafka" in loaded
    assert not loaded & {"dagster", "pyspark", "pandas"}


@pytest.mark.parametrize(
    "module", [outbox_plugin, outbox_plugin.coordination, outbox_plugin.dagster, outbox_plugin.inbox]
)
def test_public_names_are_sorted_and_importable(module: object) -> None:
    names: list[str] = module.__all__  # type: ignore[attr-defined]
    assert names == sorted(names)
    for name in names:
        assert getattr(module, name).__doc__


def test_the_wheel_holds_the_package_alone_and_works_in_an_empty_venv(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(CHECKOUT)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"outbox_plugin"}
    for needed in ("py.typed", "schema/migrations/0001_pre_outbox.sql", "schema/queries/window.sql"):
        assert f"outbox_plugin/{needed}" in names
    assert any(name.startswith("outbox_plugin/embedded/kafka-") and name.endswith(".sha256") for name in names)

    venv = tmp_path / "an empty venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    install = [
        str(venv / "bin" / "python"),
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "install",
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    outbox = str(venv / "bin" / "outbox")
    said = subprocess.run([outbox, "--help"], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert all(command in said for command in ("migrate", "harvest", "status", "dev", "bench"))
    env = {
        "PATH": "/usr/bin:/bin",
        "OUTBOX_DSN": "postgresql://127.0.0.1:1/x",
        "OUTBOX_BOOTSTRAP_SERVERS": "127.0.0.1:1",
    }
    status = subprocess.run([outbox, "status"], capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert status.returncode == 1
    assert "backlog: unknown" in status.stdout
    dev = subprocess.run([outbox, "dev"], capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert (dev.returncode, dev.stderr.count("\n")) == (2, 1)
    assert "outbox-plugin[embedded]" in dev.stderr


def test_the_page_of_versions_says_what_the_package_needs_and_what_is_locked() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    needed = {
        (parsed.name, str(parsed.specifier), extra)
        for extra, requirements in groups.items()
        for parsed in map(Requirement, requirements)
        if extra != "all"
    }
    page = (CHECKOUT / "docs" / "reference" / "supported-versions.md").read_text(encoding="utf-8")
    lock = (CHECKOUT / "requirements.lock").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (.*?) ?\| `([^`]+)` \| ([\d.]+) \|$", page, re.MULTILINE)
    listed = {
        (name, str(SpecifierSet(range_)), extra)
        for name, extras, range_, _ in rows
        for extra in extras.replace("`", "").split(", ")
    }
    assert listed == needed
    for name, _, _, version in rows:
        assert re.search(rf"^{name}(\[[\w,]+\])?=={re.escape(version)}[ \\]", lock, re.MULTILINE), name
