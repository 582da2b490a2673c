"""What is in packaging/ agrees with pyproject.toml."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LMOD = next(Path("/usr/share/lmod").glob("*/init/bash"), None)
CONDA = {"torch": "pytorch", "graphviz": "python-graphviz"}  # other names there


def needs(lines: list[str]) -> dict[str, str]:
    """Return the lowest version of each package; '' for any."""
    matches = (re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?", line) for line in lines)
    return {match[1]: match[2] or "" for match in matches if match}


EXTRAS = PROJECT["optional-dependencies"]
RUNTIME = needs(PROJECT["dependencies"]) | needs(EXTRAS["mpi"][:1])
OPTIONAL = needs(EXTRAS["onnx"]) | needs(EXTRAS["keras"])


def test_spack_installs_what_the_project_needs() -> None:
    text = (PACKAGING / "spack" / "package.py").read_text()
    compile(text, "package.py", "exec")
    given = re.findall(r'depends_on\("py-([\w-]+)(?:@([\d.]+):)?"', text)
    wanted = {**RUNTIME, **OPTIONAL, **needs(["setuptools>=77"])}
    assert {n: trimmed(v) for n, v in given} == {n: trimmed(wanted[n]) for n in wanted}
    assert f'version("{PROJECT["version"]}")' in text


def trimmed(version: str) -> str:
    """Return a version as others write it: 4.0 is 4."""
    return version.removesuffix(".0")


def test_conda_installs_what_the_project_needs() -> None:
    text = (PACKAGING / "conda" / "recipe.yaml").read_text()
    run = text.split("  run:\n")[1].split("  run_constraints:")[0]
    given = dict(re.findall(r"- ([\w-]+)(?: >=([\d.]+))?", run))
    wanted = {CONDA.get(name, name): version for name, version in RUNTIME.items()}
    more = {"graphviz": "", "python": PROJECT["requires-python"].removeprefix(">=")}
    assert given == wanted | more
    assert f'version: "{PROJECT["version"]}"' in text


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("packaging/lmod/gemsc/{}.lua", 'whatis("Version: {}")'),
        ("packaging/container/gemsc.def", "Version {}"),
        ("CITATION.cff", "version: {}"),
        ("docs/changelog.md", "## {},"),
    ],
)
def test_there_is_one_version(path: str, line: str) -> None:
    version = PROJECT["version"]
    text = (ROOT / path.format(version)).read_text()
    assert line.format(version) in text


def test_containers_copy_what_a_build_reads() -> None:
    """The build of the package needs these files, and no others."""
    kept = {"gemsc", "LICENSE", "README.md", "pyproject.toml"}
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {name.removeprefix("!") for name in ignored[1:]} == kept
    copied = re.findall(
        r"^    (\S+) /opt/gemsc/(\S+)$",
        (PACKAGING / "container" / "gemsc.def").read_text(),
        re.MULTILINE,
    )
    assert copied == [(name, name) for name in copied_names(copied)]
    assert set(copied_names(copied)) == kept


def copied_names(copied: list[tuple[str, str]]) -> list[str]:
    return [name for name, _ in copied]


@pytest.mark.skipif(LMOD is None, reason="Lmod is not installed")
def test_the_module_file_puts_gemsc_on_the_path(tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    shutil.copytree(PACKAGING / "lmod", modules)
    (modules / "openmpi.lua").write_text('setenv("HAS_MPI", "1")\n')
    script = (
        f"source {LMOD}; module use {modules}; module load gemsc; "
        "echo $HAS_MPI $GEMSC_ROOT $PATH"
    )
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True
    )
    root = f"/apps/gemsc/{PROJECT['version']}"
    assert done.stdout.startswith(f"1 {root} {root}/bin:"), done.stderr
