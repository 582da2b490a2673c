"""How pictures look: readable in light, dark and print, and for colour-blind people."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from plan_support import made_up_plan
from test_report import look, needs_browser

import gemsc
from gemsc.viz.curves import RunLog, curves
from gemsc.viz.design import (
    COLOURS,
    DASHES,
    HATCHED,
    NUM_SERIES,
    colour,
    css,
    shade,
    width_of,
)
from gemsc.viz.panel import panels_of
from gemsc.viz.timeline import draw_timeline

Vector = npt.NDArray[np.float64]
TEXT, SHAPE = 4.5, 3.0  # contrast that WCAG 2.2 asks for, of text and of shapes
# What people see who lack cones, on linear RGB: Machado, Oliveira and Fernandes, 2009
SIGHT = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
# from linear RGB to cones, and from their cube roots to OKLab: Ottosson, 2020
CONES = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
OKLAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)
ACTIONS = ("forward", "weight", "backward")
GROUNDS = [f"{kind}{i}" for kind in ("tint", "fill") for i in range(NUM_SERIES)]
both = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


def linear(text: str) -> Vector:
    """Return linear red, green and blue, 0 to 1, of `#rrggbb`."""
    part = np.array([int(text[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def luminance(text: str) -> float:
    return float(linear(text) @ [0.2126, 0.7152, 0.0722])


def contrast(first: str, second: str) -> float:
    """Return WCAG's ratio, 1 to 21."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def difference(first: str, second: str) -> float:
    """Return the least distance in OKLab, in hundredths, for anyone's sight."""

    def seen(text: str, sight: Vector) -> Vector:
        cones = CONES @ np.clip(sight @ linear(text), 0, 1)
        return np.asarray(100 * OKLAB @ np.cbrt(cones))

    return min(
        float(np.linalg.norm(seen(first, sight) - seen(second, sight)))
        for sight in SIGHT.values()
    )


def named(names: list[str], *, dark: bool) -> dict[str, str]:
    return {name: colour(name)[dark] for name in names}


def shades(kind: str, replica: int) -> list[str]:
    return [shade(kind, replica, share) for share in (0.0, 0.5, 1.0)]


def test_colours_stand_in_one_file() -> None:
    literal = re.compile(
        r"""(?<!&)\#(?:[0-9a-fA-F]{3}){1,2}\b|\brgba?\(|\bhsla?\(|["'] on \w+["']"""
        r"""|(?:fill|stroke|color|background)[a-z_-]*\s*[=:]\s*f?["']?"""
        r"""(?:white|black|gr[ae]y|red|green|blue|orange|yellow)\b"""
    )
    root = Path(gemsc.__file__).parent
    drawn = [*root.glob("viz/*"), *root.glob("simulate/*.py"), *root.rglob("*.html")]
    paths = {path for path in drawn if path.suffix in (".py", ".html")}
    assert root / "simulate" / "show.py" in paths
    wrong = [
        f"{path.name}: {match[0]}"
        for path in sorted(paths)
        if path.name != "design.py"
        for match in literal.finditer(path.read_text("utf-8"))
    ]
    assert not wrong
    assert literal.search((root / "viz" / "design.py").read_text())


@both
def test_text_can_be_read(dark: bool) -> None:
    on = {
        "ink": ["page", "sheet", *GROUNDS],
        "soft": ["page", "sheet"],
        "link": ["page", "sheet"],
        "warn": ["page", "sheet"],
        "skip": ["sheet"],
        "on-light": [s for k in ACTIONS[:2] for r in (0, 1) for s in shades(k, r)],
        "on-dark": [s for r in (0, 1) for s in shades("backward", r)],
    }
    pairs = [(text, ground) for text, grounds in on.items() for ground in grounds]
    low = [p for p in pairs if contrast(*named([*p], dark=dark).values()) < TEXT]
    assert not low


@both
def test_lines_stand_out(dark: bool) -> None:
    names = ["axis", *(f"series{index}" for index in range(NUM_SERIES))]
    lines = named(names, dark=dark)
    sheet, idle = colour("sheet")[dark], colour("idle")[dark]
    assert all(contrast(line, sheet) >= SHAPE for line in lines.values())
    assert all(contrast(colour(name)[dark], idle) >= 2 for name in HATCHED)


SIDE_BY_SIDE = {  # how far apart at least any two of them are, for anyone
    "series": ([f"series{index}" for index in range(NUM_SERIES)], 8),
    "parts of a step": (["backward0", "imbalance", "idle", "messages"], 15),
    "memory": (["saved", "resident", "sheet"], 10),
}


@both
@pytest.mark.parametrize("case", SIDE_BY_SIDE)
def test_neighbours_differ_for_everyone(case: str, dark: bool) -> None:
    names, bound = SIDE_BY_SIDE[case]
    colours = named(names, dark=dark)
    near = {
        pair: round(difference(colours[pair[0]], colours[pair[1]]), 1)
        for pair in combinations(names, 2)
    }
    assert not {pair: gap for pair, gap in near.items() if gap < bound}
    assert len(set(DASHES)) == NUM_SERIES  # and without any colour


@both
def test_what_ranks_do_differs_for_everyone_and_without_colour(dark: bool) -> None:
    kinds = {f"{k}{r}": shades(k, r) for k in ACTIONS for r in (0, 1)}
    kinds |= {"idle": ["idle"], "send": ["send"]}
    near = {
        (one, other): difference(colour(one)[dark], colour(other)[dark])
        for first, second in combinations(kinds, 2)
        for one in kinds[first]
        for other in kinds[second]
    }
    assert not {pair: gap for pair, gap in near.items() if gap < 8}

    def lightness(name: str) -> float:  # CIE 1976, 0 to 100
        return float(116 * np.cbrt(luminance(colour(name)[dark])) - 16)

    for replica in (0, 1):
        steps = [[lightness(s) for s in shades(kind, replica)] for kind in ACTIONS]
        for lighter, darker in pairwise(steps):
            assert min(lighter) - max(darker) >= 9


def test_the_measures_are_right() -> None:
    """Known figures: else the tests above could hold for any colours."""
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert difference("#000000", "#ffffff") == pytest.approx(100, abs=0.5)
    red, green = "#c04000", "#608000"  # one colour, if one cannot see red or green
    usual = 100 * np.linalg.norm(
        OKLAB @ (np.cbrt(CONES @ linear(red)) - np.cbrt(CONES @ linear(green)))
    )
    assert difference(red, green) < 8 < 15 < usual


def test_dark_colours_are_for_dark_screens_alone() -> None:
    text = css("a", ".x { fill: $ink }\n.y { r: 1 }")
    light, dark = text.split("@media screen and (prefers-color-scheme: dark) {")
    assert f"svg.a .x {{ fill: {COLOURS['ink'].light} }}" in light
    assert f"svg.a .x {{ fill: {COLOURS['ink'].dark} }}" in dark
    assert ".y" in light
    assert ".y" not in dark
    with pytest.raises(KeyError):
        css("a", ".x { fill: $nothing }")


# in a browser

CHECK = """
<script>
const said = [];
for (const svg of document.querySelectorAll("svg")) {
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].filter(t => t.textContent);
  const boxes = texts.map(t => t.getBoundingClientRect());
  texts.forEach((t, i) => {
    const a = boxes[i];
    if (a.left < frame.left || a.right > frame.right
        || a.top < frame.top || a.bottom > frame.bottom)
      said.push(`cut off: ${t.textContent}`);
    for (let j = i + 1; j < texts.length; j++) {
      const b = boxes[j];
      if (a.left < b.right - 1 && b.left < a.right - 1
          && a.top < b.bottom - 4 && b.top < a.bottom - 4)
        said.push(`one over the other: ${t.textContent} | ${texts[j].textContent}`);
    }
    if (parseFloat(getComputedStyle(t).fontSize) < 9)
      said.push(`too small: ${t.textContent}`);
  });
  said.push(`${texts.length} texts on ${getComputedStyle(
    svg.querySelector(".sheet")).fill}`);
}
document.body.insertAdjacentHTML("beforeend", "<pre id=said></pre>");
document.getElementById("said").textContent = said.join("\\n");
</script>
"""


@pytest.mark.slow(1)
@needs_browser
@both
def test_no_text_is_cut_off_or_lies_over_another(
    pictures: list[str], tmp_path: Path, dark: bool
) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><body>" + "\n".join(pictures) + CHECK, "utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    (said,) = re.findall(
        r'<pre id="said">(.*?)</pre>',
        look(page, "--dump-dom", scheme).stdout,
        re.DOTALL,
    )
    sheet = COLOURS["sheet"][dark]
    red, green, blue = (int(sheet[at : at + 2], 16) for at in (1, 3, 5))
    lines = said.split("\n")
    assert len(lines) == len(pictures), said
    for line in lines:
        assert re.fullmatch(rf"\d+ texts on rgb\({red}, {green}, {blue}\)", line), said


@pytest.fixture
def pictures() -> list[str]:
    """Return pictures of several kinds with much text."""
    steps = [(step, 2.0 / step) for step in range(1, 4000)]
    held = {"loss": [(100, 1.0), (3999, 0.5)], "dice": [(100, 0.3), (3999, 0.9)]}
    memory = [[(100, 2.0**30), (3999, 1.1 * 2**30)] for _ in range(9)]
    name = "a-folder/of-runs/" * 8
    one = RunLog(name, steps, held, steps, memory)
    other = RunLog("b", steps[:9], {}, steps[:9], memory[:2])
    return [
        curves([one]),
        curves([one, other]),
        curves([RunLog("none yet")]),
        *(
            draw_timeline(f"{plan.ranks} ranks", panels_of(plan))
            for plan in (made_up_plan(3, 40), made_up_plan(40, 3))
        ),
    ]


def test_text_is_as_wide_as_it_is_taken_to_be() -> None:
    assert width_of("Hi", 1000) == 722 + 222  # Helvetica's own figures
