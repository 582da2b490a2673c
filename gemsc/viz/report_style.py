"""How report.html looks, light and dark, on screen and on paper; and what it does."""

from __future__ import annotations

__all__ = ["SCRIPT", "STYLE"]

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f5f7f9; --sheet: #ffffff; --ink: #1d2733; --soft: #5b6672;
  --line: #dde3e9; --idle: #e8ecf0; --link: #1f66a8;
  --work: #2f6ea8; --imbalance: #d98324; --fill: #b9c4cf; --messages: #a05fb0;
  --forward: #8fbfe6; --backward: #2f6ea8; --resident: #9aa7b4; --memory: #5fa877;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181d; --sheet: #1c2229; --ink: #e3e8ee; --soft: #9aa6b3;
    --line: #323b45; --idle: #2a323b; --link: #79b8f0;
    --work: #5b9bd5; --imbalance: #e0994a; --fill: #4c5864; --messages: #b987c7;
    --forward: #6fa8d6; --backward: #3f7fba; --resident: #6a7684; --memory: #5fa877;
  }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 60px }
h1 { font-size: 26px; margin: 0 0 4px }
h2 { font-size: 17px; margin: 0 0 12px }
h3 { font-size: 14px; margin: 18px 0 6px }
p { margin: 0 0 10px }
a { color: var(--link) }
code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
header code { color: var(--soft); overflow-wrap: anywhere }
nav { margin: 14px 0 22px; display: flex; flex-wrap: wrap; gap: 4px 16px;
  font-size: 14px }
section { background: var(--sheet); border: 1px solid var(--line);
  border-radius: 10px; padding: 18px 20px; margin: 0 0 18px }
.cards { display: grid; gap: 12px; margin: 18px 0;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)) }
.card { background: var(--sheet); border: 1px solid var(--line);
  border-radius: 10px; padding: 12px 16px }
.card span, .card small { display: block; color: var(--soft); font-size: 13px }
.card strong { font-size: 22px; font-weight: 600 }
.note { color: var(--soft); font-size: 13px; margin: 8px 0 0 }
.scroll { overflow: auto; max-height: 560px }
table { border-collapse: collapse; width: 100%; font-size: 13.5px }
th { position: sticky; top: 0; background: var(--sheet); text-align: left;
  font-weight: 600; cursor: pointer; white-space: nowrap }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line);
  vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap }
th.number { text-align: right }
.bar { display: flex; height: 18px; border-radius: 4px; overflow: hidden;
  background: var(--idle); min-width: 120px }
.bar span { display: block; height: 100% }
td .bar { height: 12px; margin-top: 4px; min-width: 160px }
.work { background: var(--work) } .imbalance { background: var(--imbalance) }
.fill { background: var(--fill) } .messages { background: var(--messages) }
.forward { background: var(--forward) } .backward { background: var(--backward) }
.resident { background: var(--resident) } .memory { background: var(--memory) }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px;
  color: var(--soft); margin: 8px 0 0; padding: 0; list-style: none }
.legend i { display: inline-block; width: 12px; height: 12px; margin-right: 6px;
  border-radius: 2px; vertical-align: -1px }
.picture { overflow: auto; padding: 4px 0 }
.paper { background: #ffffff; border-radius: 8px; padding: 10px; overflow: auto;
  max-height: 1000px }
.paper svg { max-width: 100%; height: auto; display: block; margin: 0 auto }
.stages { display: grid; gap: 10px; margin: 0 0 16px;
  grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)) }
.stage { border: 1px solid var(--line); border-left: 5px solid var(--work);
  border-radius: 8px; padding: 8px 12px; font-size: 13px }
.stage b { display: block } .stage span { display: block; color: var(--soft);
  overflow-wrap: anywhere }
main svg.timeline text, svg.plot text { fill: var(--ink);
  font: 11px system-ui, Helvetica, Arial, sans-serif }
main svg.timeline text.note, main svg.timeline text.tick, main svg.timeline text.lanes,
svg.plot text.note { fill: var(--soft) }
main svg.timeline text.light { fill: #ffffff }
main svg.timeline text.dark { fill: #10202f }
main svg.timeline .idle { fill: var(--idle) }
main svg.timeline .memory { fill: var(--memory); fill-opacity: 0.7 }
main svg.timeline .resident { fill: var(--resident) }
main svg.timeline .line, svg.plot .line { stroke: var(--line) }
main svg.timeline .arrow { stroke: var(--soft) }
svg.plot .held { fill: var(--memory); fill-opacity: 0.75 }
svg.plot .base { fill: var(--resident) }
svg.plot .wide { fill: var(--memory); fill-opacity: 0.2 }
svg.plot .narrow { fill: var(--memory); fill-opacity: 0.35 }
svg.plot .median { stroke: var(--memory); stroke-width: 1.6; fill: none }
svg.plot .cap { stroke: #c0392b; stroke-dasharray: 4 3; fill: none }
svg.plot .forward-heat { fill: var(--forward) }
svg.plot .backward-heat { fill: var(--backward) }
svg.plot .back { fill: var(--idle) }
footer { color: var(--soft); font-size: 13px }
@media print {
  :root { color-scheme: light }
  body { background: #ffffff; font-size: 11px }
  main { max-width: none; padding: 0 }
  nav { display: none }
  section { break-inside: avoid-page; border: none; padding: 8px 0 }
  .scroll, .picture, .paper { max-height: none; overflow: visible }
  .picture svg { max-width: 100%; height: auto }
}
"""

# Tables sort when a title is clicked.
SCRIPT = """
for (const head of document.querySelectorAll("th")) {
  const column = [...head.parentNode.children].indexOf(head);
  const body = head.closest("table").tBodies[0];
  const value = row => {
    const cell = row.cells[column];
    const number = cell.dataset.value;
    return number === undefined ? cell.textContent : Number(number);
  };
  const first = body.rows[0];
  if (first && first.cells[column].classList.contains("number"))
    head.classList.add("number");
  let up = false;
  head.addEventListener("click", () => {
    up = !up;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      const order = typeof x === "number" && typeof y === "number"
        ? x - y : String(x).localeCompare(String(y), undefined, {numeric: true});
      return up ? order : -order;
    });
    body.append(...rows);
  });
}
"""
