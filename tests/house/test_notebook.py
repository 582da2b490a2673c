"""The tutorial is a notebook that runs, and holds what it printed when it ran."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import GEMSC, Gemsc

nbformat = pytest.importorskip("nbformat")
NOTEBOOK = Path(__file__).parents[2] / "docs" / "histology.ipynb"


def read() -> Any:
    return nbformat.read(NOTEBOOK, 4)


def cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: Any, start: str) -> str:
    """Return what the first cell printed that holds this text."""
    cell = next(cell for cell in cells(notebook) if start in cell.source)
    return "".join(output.get("text", "") for output in cell.outputs)


def scores(notebook: Any) -> tuple[float, float]:
    """Return the score of the network, and that of the best simple rule."""
    match = re.search(r"U-Net (.*), dark pixels (.*)", printed(notebook, "U-Net {"))
    assert match is not None
    return float(match[1]), float(match[2])


def tidy(notebook: Any) -> None:
    """Leave out what no page shows: colours, progress, pictures twice, where it ran."""
    for cell in cells(notebook):
        cell.metadata = {}
        cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
        for output in cell.outputs:
            if "text" in output:
                output.text = re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", output.text)
            if "image/jpeg" in output.get("data", {}):
                output.data.pop("image/png", None)
    for name in [*notebook.metadata]:
        if name != "kernelspec":
            del notebook.metadata[name]


def test_the_notebook_holds_a_whole_run():
    notebook = read()
    counts = [cell.execution_count for cell in cells(notebook)]
    assert counts == [*range(1, len(counts) + 1)]
    kinds = {output.output_type for c in cells(notebook) for output in c.outputs}
    assert kinds <= {"stream", "display_data"}
    assert NOTEBOOK.stat().st_size < 1.5e6
    network, rule = scores(notebook)
    assert network > rule


@pytest.mark.slow
def test_its_model_is_still_split_as_it_says(command: Gemsc):
    notebook = read()
    sources = [cell.source for cell in cells(notebook)]
    model = next(text for text in sources if text.startswith("%%writefile model.py"))
    Path("model.py").write_text(model.partition("\n")[2])
    words = re.search(r"^gemsc (compile model.py .*)$", "\n".join(sources), re.M)
    assert words is not None
    done = command(*words[1].split())
    assert done.out.splitlines()[0] in printed(notebook, words[0])


@pytest.mark.mpi
@pytest.mark.nightly
def test_the_notebook_runs_and_the_network_learns(tmp_path, monkeypatch, request):
    client = pytest.importorskip("nbclient")
    if shutil.which("dot") is None:
        pytest.skip("there is no dot to draw with")
    monkeypatch.setenv("PATH", f"{GEMSC.parent}{os.pathsep}{os.environ['PATH']}")
    notebook = read()
    place = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(
        notebook,
        timeout=500,
        resources=place,
        record_timing=False,
        coalesce_streams=True,
    ).execute()
    network, rule = scores(notebook)
    assert network > rule
    tidy(notebook)
    for program in ("unet", "tiles"):
        assert ": exact" in printed(notebook, f"gemsc verify build/{program}")
    if request.config.getoption("--update-golden"):
        nbformat.write(notebook, NOTEBOOK)
