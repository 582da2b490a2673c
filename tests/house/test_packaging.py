"""What is installed is what lies in the tree, under one import name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = ("passes", "codegen")
SKIPPED = shutil.ignore_patterns("__pycache__", "*.pyc")


def missing_tools() -> str:
    """Return why no wheel can be built here without a network."""
    try:
        version("build")
        if int(version("setuptools").split(".")[0]) < 77:
            return "setuptools is older than 77"
    except PackageNotFoundError as error:
        return f"{error.name} is not installed"
    return ""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    if reason := missing_tools():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    shutil.copytree(ROOT / "gemsc", tree / "gemsc", ignore=SKIPPED)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in LINKS:
        (tree / name).symlink_to(f"gemsc/{name}")
    words = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    done = subprocess.run(
        [sys.executable, *words, str(tree)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_files_of_the_tree(wheel):
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    tree = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "gemsc").rglob("*")
        if path.suffix in (".py", ".toml", ".html") or path.name == "py.typed"
    }
    assert files == tree


def test_the_wheel_brings_the_command_and_the_license(wheel):
    texts = {
        name.split("/", 1)[1]: name for name in wheel.namelist() if "dist-" in name
    }
    commands = wheel.read(texts["entry_points.txt"]).decode()
    assert re.search(r"^gemsc = gemsc.cli:main$", commands, re.MULTILINE)
    assert "licenses/LICENSE" in texts


def test_the_folders_at_the_top_are_links():
    for name in LINKS:
        assert (ROOT / name).is_symlink()
        assert (ROOT / name).resolve() == ROOT / "gemsc" / name
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "--stage", *LINKS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["120000"] * len(LINKS)


@pytest.mark.parametrize("name", LINKS)
def test_the_links_cannot_be_imported(name):
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"ImportError: import gemsc.{name}; the folder" in done.stderr


def test_pinned_versions_are_those_of_direct_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = list(project["project"]["dependencies"])
    for extra in project["project"]["optional-dependencies"].values():  # as `make` does
        wanted += extra
    pins = (ROOT / "constraints-cpu.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in pins if not line.startswith("#")}
    assert pinned == {re.split(r"[><=]", name)[0] for name in wanted}


def test_the_oldest_torch_that_is_tested_is_the_oldest_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (wanted,) = (n for n in project["project"]["dependencies"] if "torch" in n)
    *_, pin = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    assert pin == wanted.replace(">=", "==") + ".0"
