"""How a timeline looks: its rules, and the head of its arrows."""

from __future__ import annotations

__all__ = ["HEAD", "STYLE"]

HEAD = (
    '<defs><marker id="{id}" markerWidth="6" markerHeight="6" refX="5" refY="3" '
    'orient="auto" markerUnits="userSpaceOnUse"><path d="M0,0.8 L5,3 L0,5.2" '
    'fill="#3a4653" fill-opacity="0.7"/></marker></defs>'
)
STYLE = """
text { font: 11px Helvetica, Arial, sans-serif; fill: #1d2733 }
.title { font-size: 16px; font-weight: bold }
.name { font-size: 12px; font-weight: bold }
.note { font-size: 10px; fill: #66707c }
.rank { font-weight: bold; text-anchor: end }
.lanes { font-size: 9px; fill: #66707c; text-anchor: end }
.tick { font-size: 10px; fill: #66707c; text-anchor: middle }
.idle { fill: #eef0f3 }
.line { stroke: #d5dae0; stroke-width: 0.6 }
.box { stroke: #ffffff }
.dark { text-anchor: middle }
.light { text-anchor: middle; fill: #ffffff }
.resident { fill: #dfe4ea }
.memory { fill: #a9cdb4 }
.arrow { stroke: #3a4653; stroke-width: 0.8; stroke-opacity: 0.5; fill: none }
.skip { stroke: #b3382c; stroke-dasharray: 3 2; stroke-opacity: 0.4 }
"""
