"""What the benchmarks import is there: by day none of them runs."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BESIDE = ("benchmarks", "tests/support", "examples")
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


def is_there(module: str, name: str) -> bool:
    if module.split(".")[0] != "gemsc":
        paths = [ROOT / folder / f"{module}.py" for folder in BESIDE]
        texts = [path.read_text() for path in paths if path.is_file()]
        folders = [(ROOT / folder / module).is_dir() for folder in BESIDE]
        return any(name in text for text in texts) or any(folders)
    loaded = importlib.import_module(module)
    folder = ROOT / module.replace(".", "/")
    return hasattr(loaded, name) or any(folder.glob(f"{name}*"))


@pytest.mark.parametrize("script", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_what_a_benchmark_imports_is_there(script: Path):
    local = {path.stem for folder in BESIDE for path in (ROOT / folder).glob("*.py")}
    for node in ast.walk(ast.parse(script.read_text())):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if node.module.split(".")[0] == "gemsc" or node.module in local:
            for alias in node.names:
                assert is_there(node.module, alias.name), (node.lineno, alias.name)


def test_the_folders_that_benchmarks_look_into_have_what_they_import():
    for script in SCRIPTS:
        for line in script.read_text().splitlines():
            if "sys.path" in line and '"tests"' in line:
                assert '"tests" / "support"' in line, (script.name, line)


def test_what_make_bench_runs_needs_no_argument():
    makefile = (ROOT / "Makefile").read_text()
    left_out = re.findall(
        r"%/(\w+)\.py", makefile.split("\nbench:")[1].split("\n\n")[0]
    )
    assert len(left_out) == 2
    for script in SCRIPTS:
        text = script.read_text()
        if script.stem in left_out or "__main__" not in text:
            continue
        tree = ast.walk(ast.parse(text))
        for call in (node for node in tree if isinstance(node, ast.Call)):
            if ast.unparse(call.func).endswith(".add_argument"):
                named = ast.unparse(call.args[0]).strip("'").startswith("-")
                assert named or "nargs" in {word.arg for word in call.keywords}, script
