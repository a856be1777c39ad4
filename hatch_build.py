"""The long description for a package index: the README, of which an index shows no file beside it.

Links to pages and images of the checkout lead into the repository that `pyproject.toml` names (`repository` under
`[tool.hatch.metadata.hooks.custom]`). While it names none, a link becomes its text, images are left out, and a sentence
says where the pages are.
"""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_HEADING = "## Documentation\n"
_RELATIVE = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?!https?://|mailto:|#)(?P<path>[^)\s]+)\)")


def on_an_index(readme: str, repository: str) -> str:
    """The README with links that work where no file is beside it.

    Args:
        readme: in Markdown.
        repository: the repository's URL, without a slash at its end; empty if it has none.
    """

    def link(found: re.Match[str]) -> str:
        image, text, path = found.group("image", "text", "path")
        if not repository:
            return "" if image else text
        return f"{image}[{text}]({repository}/{'raw' if image else 'blob'}/main/{path})"

    text = re.sub(r"\n{3,}", "\n\n", _RELATIVE.sub(link, readme))
    if repository:
        return text
    return text.replace(_HEADING, f"{_HEADING}\nThe pages are in the source distribution.\n")


class LongDescription(MetadataHookInterface):
    """Gives the package its long description, and its links if the repository has an address."""

    def update(self, metadata: dict[str, object]) -> None:
        """Sets the fields that `pyproject.toml` calls dynamic."""
        repository = str(self.config.get("repository", "")).rstrip("/")
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": on_an_index(readme, repository)}
        if repository:
            metadata["urls"] = {
                "Documentation": f"{repository}/blob/main/docs/README.md",
                "Changelog": f"{repository}/blob/main/CHANGELOG.md",
                "Issues": f"{repository}/issues",
                "Source": repository,
            }
