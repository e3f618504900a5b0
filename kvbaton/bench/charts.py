"""Plots as SVG text: cumulative distributions, lines with intervals, bars, a timeline of dots.

Every chart is 420 units wide with 11-unit text, so that one fills a phone and two or three stand beside each other on
a desk, all readable. Colours are CSS variables of the page. Knows nothing about what the numbers mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 34, 40
MAX_POINTS = 240


@dataclass(frozen=True)
class Series:
    """``points`` are (x, y); ``low`` and ``high`` are optional bounds of y at each point."""

    name: str
    style: str  # "a" or "b": which arm's colour
    points: Sequence[tuple[float, float]]
    bounds: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """Position in 0..1, kept inside."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = (math.log10(max(number, 1e-12)) for number in (value, low, high))
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 2 else (1,)
            found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            return [tick for tick in found if self.low <= tick <= self.high]
        step = nice_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def nice_step(rough: float) -> float:
    if rough <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9))


def number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def cdf(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points of the empirical distribution, thinned for drawing but with both ends and the tail kept."""
    ordered = sorted(values)
    total = len(ordered)
    if total <= MAX_POINTS:
        kept = list(range(total))
    else:
        body = {round(i * (total - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)}
        tail = {total - 1 - round(total * share) for share in (0.0, 0.001, 0.005, 0.01, 0.02, 0.05)}
        kept = sorted(index for index in body | tail if 0 <= index < total)
    return [(ordered[index], (index + 1) / total) for index in kept]


class _Canvas:
    def __init__(self, title: str, x: Axis, y: Axis, x_label: str, y_label: str, has_y_axis: bool = True) -> None:
        self.x, self.y = x, y
        self.parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
            f'<text class="t" x="{LEFT - 40}" y="16">{escape(title)}</text>',
        ]
        self._frame(x_label, y_label, has_y_axis)

    def px(self, value: float) -> float:
        return LEFT + self.x.at(value) * (WIDTH - LEFT - RIGHT)

    def py(self, value: float) -> float:
        return HEIGHT - BOTTOM - self.y.at(value) * (HEIGHT - TOP - BOTTOM)

    def _frame(self, x_label: str, y_label: str, has_y_axis: bool) -> None:
        for tick in self.y.ticks() if has_y_axis else ():
            y = self.py(tick)
            self.parts.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.parts.append(f'<text class="n e" x="{LEFT - 5}" y="{y + 4:.1f}">{number(tick)}</text>')
        for tick in self.x.ticks():
            x = self.px(tick)
            self.parts.append(f'<text class="n m" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}">{number(tick)}</text>')
        base = HEIGHT - BOTTOM
        self.parts.append(f'<line class="x" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
        self.parts.append(
            f'<text class="n m" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}">{escape(x_label)}</text>'
        )
        if y_label:
            self.parts.append(f'<text class="n" x="{LEFT - 40}" y="{TOP - 4}">{escape(y_label)}</text>')

    def gate(self, value: float, vertical: bool, text: str) -> None:
        axis = self.x if vertical else self.y
        if not axis.low <= value <= axis.high:
            return
        if vertical:
            x = self.px(value)
            self.parts.append(f'<line class="gate" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
            self.parts.append(f'<text class="n e gt" x="{x - 4:.1f}" y="{TOP + 10}">{escape(text)}</text>')
        else:
            y = self.py(value)
            self.parts.append(f'<line class="gate" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.parts.append(f'<text class="n e gt" x="{WIDTH - RIGHT - 2}" y="{y - 4:.1f}">{escape(text)}</text>')

    def done(self) -> str:
        return "".join([*self.parts, "</svg>"])


def lines(
    title: str,
    series: Sequence[Series],
    labels: tuple[str, str],
    gates: Sequence[tuple[float, bool, str]] = (),
    log_x: bool = False,
) -> str:
    """Lines through points, with bars for bounds; gates are (value, vertical, text)."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points] + [y for one in series for pair in one.bounds for y in pair]
    if not xs:
        return empty(title)
    xs += [value for value, vertical, _ in gates if vertical and math.isfinite(value)]
    ys += [value for value, vertical, _ in gates if not vertical and math.isfinite(value)]
    canvas = _Canvas(title, _axis(xs, log_x), _axis([0.0, *ys], False), *labels)
    for value, vertical, text in gates:
        if math.isfinite(value):
            canvas.gate(value, vertical, text)
    for one in series:
        path = " ".join(f"{canvas.px(x):.1f},{canvas.py(y):.1f}" for x, y in one.points)
        canvas.parts.append(f'<polyline class="l {one.style}" points="{path}"/>')
        for (x, y), (low, high) in zip(one.points, one.bounds, strict=False):
            px = canvas.px(x)
            canvas.parts.append(
                f'<line class="l {one.style}" x1="{px:.1f}" x2="{px:.1f}" '
                f'y1="{canvas.py(low):.1f}" y2="{canvas.py(high):.1f}"/>'
                f'<circle class="d {one.style}" cx="{px:.1f}" cy="{canvas.py(y):.1f}" r="3.5">'
                f"<title>{escape(one.name)}: {number(y)} ({number(low)} .. {number(high)})</title></circle>"
            )
    return canvas.done()


def bars(title: str, rows: Sequence[tuple[str, str, float, float, float]], label: str) -> str:
    """Horizontal bars: (name, style, value, low, high)."""
    if not rows:
        return empty(title)
    top = max(max(value, high) for _, _, value, _, high in rows) or 1.0
    axis = Axis(0.0, top * 1.15)
    canvas = _Canvas(title, axis, Axis(0, 1), label, "", has_y_axis=False)
    room = (HEIGHT - TOP - BOTTOM) / len(rows)
    for place, (name, style, value, low, high) in enumerate(rows):
        y = TOP + room * place + room * 0.34
        thick = min(34.0, room * 0.5)
        x = canvas.px(value)
        middle = y + thick / 2
        canvas.parts.append(
            f'<text class="n" x="{LEFT}" y="{y - 4:.1f}">{escape(name)}: {number(value)}</text>'
            f'<rect class="f {style}" x="{LEFT}" y="{y:.1f}" rx="2" '
            f'width="{max(0.0, x - LEFT):.1f}" height="{thick:.1f}"/>'
        )
        if high > low:
            left, right = canvas.px(low), canvas.px(high)
            canvas.parts.append(
                f'<line class="w" x1="{left:.1f}" x2="{right:.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>'
            )
    return canvas.done()


def timeline(
    title: str,
    rows: Sequence[tuple[str, str, Sequence[tuple[float, float]]]],
    span_s: float,
    y_label: str,
    bound: float,
) -> str:
    """One strip for each row (name, style, [(start, size)]): a stem where each thing happened, as tall as its size."""
    largest = max((size for _, _, things in rows for _, size in things), default=bound)
    axis = Axis(0.0, max(span_s, 1e-3))
    canvas = _Canvas(title, axis, Axis(0, 1), "seconds into the run", y_label, has_y_axis=False)
    room = (HEIGHT - TOP - BOTTOM) / max(1, len(rows))
    for place, (name, style, things) in enumerate(rows):
        base = TOP + room * (place + 1) - 2
        tall = room - 18
        canvas.parts.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base:.1f}" y2="{base:.1f}"/>')
        longest = max((size for _, size in things), default=0.0)
        text = f"{name}: {len(things)} stalls" + (f", longest {number(longest * 1e3)} ms" if things else "")
        canvas.parts.append(f'<text class="n" x="{LEFT}" y="{base - tall - 4:.1f}">{escape(text)}</text>')
        for start, size in sorted(things, key=lambda thing: -thing[1])[:600]:
            x, top = canvas.px(start), base - tall * size / largest
            canvas.parts.append(
                f'<line class="l {style}" x1="{x:.1f}" x2="{x:.1f}" y1="{base:.1f}" y2="{top:.1f}">'
                f"<title>{number(size * 1e3)} ms at {number(start)} s</title></line>"
            )
    return canvas.done()


def empty(title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text class="t" x="12" y="16">{escape(title)}</text>'
        '<text class="n" x="12" y="60">nothing to show</text></svg>'
    )


def _axis(values: Sequence[float], log: bool) -> Axis:
    low, high = min(values), max(values)
    if log:
        # Chunks read together are microseconds apart: three decades and a half are all that a reader wants to see.
        low, high = max(low, high / 3000, 1e-4), max(high, 2e-4)
        return Axis(low / 1.1, high * 1.1, True)
    if high <= low:
        high = low + 1.0
    return Axis(low, low + (high - low) * 1.06)
