"""Makes pages that are written for a code host into pages of a site, for MkDocs.

On a code host, a page links to any file of the checkout, and the pages of public names are made in advance. On the site
- the README, the changelog and other pages at the checkout's top are pages as well;
- a link to a file that is no page leads into the repository that `pyproject.toml` names, or becomes its text;
- mkdocstrings describes each public name, under the heading that it has on a code host. Models keep their
  tables of fields.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parent
DOCS = CHECKOUT / "docs"
TOP_PAGES = {
    "README.md": "introduction.md",  # MkDocs makes the site's first page of docs/README.md.
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
}
_LINK = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?://|mailto:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
)
_MADE_FROM_DOCSTRINGS = "Made from docstrings, by `python -m tests.reference`."
_MODULE = re.compile(r"^## `([\w.]+)`$", re.MULTILINE)
_NAME = re.compile(r"^### (\w+)$\n(.*?)(?=^### |\Z)", re.MULTILINE | re.DOTALL)
_SIGNATURE = re.compile(r"\s*```text\n.*?^```\n", re.MULTILINE | re.DOTALL)


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the pages that lie at the checkout's top."""
    from mkdocs.structure.files import File

    for name, on_site in TOP_PAGES.items():
        files.append(File.generated(config, on_site, content=(CHECKOUT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrites a page before MkDocs renders it."""
    source = {on_site: name for name, on_site in TOP_PAGES.items()}.get(page.file.src_uri)
    origin = CHECKOUT / source if source else DOCS / page.file.src_uri
    return with_site_links(with_docstrings(markdown), origin, page.file.src_uri, _repository())


def with_site_links(markdown: str, origin: Path, on_site: str, repository: str) -> str:
    """The page with links that work on the site.

    Args:
        markdown: the page.
        origin: the file that it is written in; its links are relative to this file's folder.
        on_site: its path in the site's folder of sources.
        repository: the repository's URL, without a slash at its end; empty if it has none.
    """

    def link(found: re.Match[str]) -> str:
        image, text, path, anchor = found.group("image", "text", "path", "anchor")
        target = Path(os.path.normpath(origin.parent / path))
        if target.is_relative_to(DOCS):
            uri = target.relative_to(DOCS).as_posix()
        elif not target.exists() or not target.is_relative_to(CHECKOUT):
            return found[0]  # MkDocs warns of a link that leads nowhere.
        else:
            name = target.relative_to(CHECKOUT).as_posix()
            if name not in TOP_PAGES:
                return f"{image}[{text}]({repository}/blob/main/{name}{anchor or ''})" if repository else text
            uri = TOP_PAGES[name]
        return f"{image}[{text}]({os.path.relpath(uri, Path(on_site).parent)}{anchor or ''})"

    return _LINK.sub(link, markdown)


def with_docstrings(markdown: str) -> str:
    """The page with directives of mkdocstrings in place of the descriptions of public names, if it is made of these."""
    if _MADE_FROM_DOCSTRINGS not in markdown:
        return markdown
    head, *parts = _MODULE.split(markdown.replace(f"{_MADE_FROM_DOCSTRINGS}\n", ""))
    text = head
    for module, body in zip(parts[::2], parts[1::2], strict=True):
        text += f"## `{module}`" + _NAME.sub(lambda found, module=module: _directive(module, found), body)
    return text


def _directive(module: str, found: re.Match[str]) -> str:
    name, description = found.groups()
    if "| field | default | |" in description:
        return found[0]
    signature = _SIGNATURE.match(description)  # mkdocstrings shows one only in a heading, and the heading is ours.
    return f"### {name}\n\n{signature[0].lstrip() if signature else ''}\n::: {module}.{name}\n\n"


def _repository() -> str:
    pyproject = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(pyproject["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]).rstrip("/")
