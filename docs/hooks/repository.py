"""Pages that stand elsewhere in the repository, and links that lead there.

`<!-- readme: From a model to a program -->` becomes that section of README.md, and
`examples.md` is examples/README.md. A link to a file that is no page keeps its text
only: the site does not know where the repository can be seen.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "docs/histology.ipynb": "histology.md",
}
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r'(?<=<img src=")docs/')
FENCE = re.compile(r"(^ *```.*?^ *```\n)", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^<!-- readme: (.+?) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose text stands outside of docs/."""
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    text = with_links(text, "examples", "", files)
    files.append(File.generated(config, "examples.md", content=text))
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Fill in sections of the README, and turn links that leave docs/."""
    folder = posixpath.dirname(page.file.src_uri)

    def section(match: re.Match[str]) -> str:
        return with_links(readme_section(match[1]), "", folder, files)

    if page.file.src_uri != "examples.md":
        markdown = with_links(markdown, posixpath.join("docs", folder), folder, files)
    return SECTION.sub(section, markdown)


def readme_section(title: str) -> str:
    """Return the text below a heading or title of the README, up to the next."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(rf"^##? {re.escape(title)}\n", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"README.md has no section '{title}'")
    after = PICTURE.sub("", text[match.end() :])
    return re.split(r"^## ", after, maxsplit=1, flags=re.MULTILINE)[0]


def with_links(text: str, source: str, folder: str, files: Files) -> str:
    """Return text of a folder of the repository, its links as in a folder of docs/.

    What stands in fenced blocks is left alone.
    """

    def turned(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(source, target))
        if not (ROOT / path).exists():
            return match[0]  # mkdocs says so
        page = PAGES.get(path, path.removeprefix("docs/"))
        if path not in PAGES and not path.startswith("docs/"):
            return label
        return f"[{label}]({posixpath.relpath(page, folder or '.')}{anchor})"

    parts = FENCE.split(text)
    return "".join(
        part if FENCE.match(part) else LINK.sub(turned, part) for part in parts
    )
