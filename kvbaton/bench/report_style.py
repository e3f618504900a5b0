"""The look of a report page, light and dark, from phone to desk. One string, so that the page needs no other file."""

from __future__ import annotations

STYLE = """
:root { --a: #c2571a; --b: #1f6fb2; --ink: #1c1f23; --soft: #5b6470; --line: #d9dde2; --paper: #ffffff; --wash: #f4f6f8;
  --good: #1a7f4b; --bad: #b3261e; --gate: #7a4fb5; }
@media (prefers-color-scheme: dark) { :root { --a: #f0955b; --b: #6cb2ec; --ink: #e8eaed; --soft: #a3acb8;
  --line: #3a414a; --paper: #15181c; --wash: #1e2329; --good: #5ecb93; --bad: #f28b82; --gate: #b99cf0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 20px 16px 60px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 12px; }
h2 { font-size: 1.15rem; margin: 36px 0 10px; }
h3 { font-size: 1rem; margin: 20px 0 8px; }
.kind { margin: 0; color: var(--soft); font-size: .85rem; }
.verdict { font-size: 1.15rem; margin: 0 0 12px; padding: 12px 16px; background: var(--wash);
  border-left: 5px solid var(--soft); }
.verdict.split { border-color: var(--b); }
.verdict.do-not-split { border-color: var(--a); }
.legend { display: flex; flex-wrap: wrap; gap: 6px 22px; margin: 0; color: var(--soft); }
.legend i { display: inline-block; width: 22px; height: 4px; margin-right: 8px; vertical-align: middle; }
.legend .a { background: var(--a); } .legend .b { background: var(--b); }
.note { color: var(--soft); font-size: .85rem; margin: 8px 0 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
b.better { color: var(--good); } b.worse { color: var(--bad); }
b.unclear, b.no-difference { color: var(--soft); font-weight: 500; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 18px; }
svg { width: 100%; height: auto; background: var(--wash); border-radius: 6px; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
svg .t { font-weight: 600; font-size: 13px; }
svg .n { fill: var(--soft); } svg .e { text-anchor: end; } svg .m { text-anchor: middle; }
svg .g { stroke: var(--line); stroke-width: 1; } svg .x { stroke: var(--soft); stroke-width: 1; }
svg .l { fill: none; stroke-width: 2; } svg .l.a { stroke: var(--a); } svg .l.b { stroke: var(--b); }
svg .d.a, svg .f.a { fill: var(--a); } svg .d.b, svg .f.b { fill: var(--b); }
svg .w { stroke: var(--ink); stroke-width: 1.5; }
svg .gate { stroke: var(--gate); stroke-width: 1.5; stroke-dasharray: 5 4; } svg .gt { fill: var(--gate); }
"""
