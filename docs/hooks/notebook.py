"""A notebook becomes a page: its text, its cells, and the outputs that it holds."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

Pictures = dict[str, bytes]
KINDS = {"image/svg+xml": "svg", "image/jpeg": "jpg", "image/png": "png"}
MAGIC = {"%%sh": "sh", "%%writefile": "python"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put a page, and files with its pictures, in the place of each notebook."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        name = file.src_uri.removesuffix(".ipynb")
        pictures: Pictures = {}
        text = "\n\n".join(parts(json.loads(file.content_string), name, pictures))
        files.remove(file)
        files.append(File.generated(config, f"{name}.md", content=text))
        for path, content in pictures.items():
            files.append(File.generated(config, path, content=content))
    return files


def parts(notebook: Any, name: str, pictures: Pictures) -> Iterator[str]:
    """Give the Markdown of each cell and output; add to the pictures."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield code(source)
        for output in cell["outputs"]:
            yield shown(output, name, pictures)


def code(source: str) -> str:
    """Return a cell as a fenced block, in the language that its first line says."""
    first, _, body = source.partition("\n")
    magic, _, file = first.partition(" ")
    if magic not in MAGIC:
        return f"```python\n{source}\n```"
    title = f' title="{file}"' if file else ""
    return f"```{MAGIC[magic]}{title}\n{body}\n```"


def shown(output: Any, name: str, pictures: Pictures) -> str:
    """Return an output: a picture, or text below a line."""
    data = output.get("data", {})
    for kind, suffix in KINDS.items():
        if kind in data:
            content = "".join(data[kind])
            path = f"{name}/{len(pictures)}.{suffix}"
            binary = base64.b64decode(content) if suffix != "svg" else content.encode()
            pictures[path] = binary
            return f"![output]({path})"
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip("\n")
    return f'<div class="output" markdown>\n\n```text\n{text}\n```\n\n</div>'
