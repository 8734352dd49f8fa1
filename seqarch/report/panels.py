"""The common parts of a report's figures: style, panels, axes, legends, files."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from seqarch.errors import SeqarchWarning
from seqarch.report.findings import Findings
from seqarch.report.runs import Group
from seqarch.runs.tags import MEAN
from seqarch.tables import readable

WIDTH = 9.0
"""Inches. A README shows a figure about 850 pixels wide, where 9 points then are 12 pixels."""
DPI = 200
DIRECT = 5
"""The most lines whose names stand next to a panel, not counting the reference's line at zero."""
POINTS = 1200
"""The most points of a figure that say something on the page."""
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "figure.labelsize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e8e8e8",
    "grid.linewidth": 0.7,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "lines.linewidth": 1.4,
    "lines.markersize": 4.2,
    "legend.frameon": False,
    "text.parse_math": False,  # a run may be called a$b
    "svg.fonttype": "path",
    "svg.hashsalt": "seqarch",
}
ROW = 0.27
"""Inches of a row of `row_panels`, unless its name takes several lines."""
LABEL = 0.6
"""Inches between two numbers on a logarithmic axis, at least."""
BESIDE = 40
"""The longest line of a legend of many models, which is next to a panel."""
STRIP = 0.12
"""Height of the strip for the note of `frame`, as a share of the height of the points."""
BLANK = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
IDENTITY = {"color": "#777777", "linestyle": (0, (2, 2)), "linewidth": 1.1}


class Plotted(NamedTuple):
    """A line in one of the panels, and what each of its points says."""

    axes: Axes
    group: str
    x: np.ndarray
    y: np.ndarray
    notes: Sequence[str]


class Picture(Figure):
    """A figure that knows its lines: which names to write, and what their points say on the page."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.plotted: list[Plotted] = []

    def _repr_png_(self) -> bytes:
        picture = BytesIO()  # a notebook shows it without pyplot
        FigureCanvasAgg(self).print_png(picture)
        return picture.getvalue()

    def plot(self, axes: Axes, group: str, x: Any, y: Any, notes: Sequence[str] = (), **style: Any) -> None:
        """Draws a line; `notes` has a text for each point, or none at all."""
        axes.plot(x, y, **style)
        self.plotted.append(Plotted(axes, group, np.asarray(x, float), np.asarray(y, float), notes))

    def points(self) -> list[tuple[float, float, str]]:
        """The points in view that have a text, at most `POINTS`: place and text. Each line's begin at its right end.

        A place is in thousandths of the figure's width, from the left and from the top.
        """
        points = []
        every = -(-sum(len(line.notes) for line in self.plotted) // POINTS)
        for axes, _, x, y, notes in self.plotted:
            if not notes:
                continue
            places = axes.transData.transform(np.stack([x, y], axis=1))
            for index in np.argsort(-places[:, 0])[::every]:
                left, bottom = places[index]
                if axes.bbox.padded(1).contains(left, bottom):
                    right = round(1000 * left / self.bbox.width, 1)
                    down = round(1000 * ((self.bbox.height - bottom) / self.bbox.width), 1)
                    points.append((right, down, notes[int(index)]))
        return points


class ReportFigure(NamedTuple):
    """A figure of a report: its file's name, what draws it, and its words, in which `{loss}` is a word of the role."""

    name: str
    draw: Callable[[Findings], Picture | None]
    title: str
    caption: str


def report_figure(title: str, caption: str) -> Callable[[Callable[[Findings], Picture | None]], ReportFigure]:
    """Decorator for a function that draws a figure. The figure has the function's name."""
    return lambda draw: ReportFigure(draw.__name__, draw, title, caption)


def own_style() -> AbstractContextManager[None]:
    """Draw with matplotlib's defaults and `STYLE`, whatever the user's matplotlibrc says."""
    defaults: dict[Any, Any] = {key: each for key, each in matplotlib.rcParamsDefault.items() if key[:7] != "backend"}
    return matplotlib.rc_context(defaults | STYLE)


def panels(count: int, *, sharey: bool = False, columns: int | None = None) -> tuple[Picture, list[Axes]]:
    """A figure of README width with `count` panels in rows of at most three, or of `columns`."""
    columns = columns or {1: 1, 2: 2, 4: 2}.get(count, 3)
    rows = -(-count // columns)
    width = WIDTH if columns > 1 else 0.8 * WIDTH
    height = 2.9 if columns < 4 else 2.1
    figure = Picture(figsize=(width, height * rows + 0.7 + 0.9 * (columns == 1)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=sharey)
    shown = first(grid, count)
    for axes in shown:
        axes.tick_params(labelbottom=True, length=3)
        _ticks(axes)
    return figure, shown


def overview(count: int, groups: Sequence[Group]) -> tuple[Picture, list[Axes]]:
    """A large panel, which comes last, above `count - 1` small ones, for figures of many models.

    The large one is high enough for a legend of these models next to it.
    """
    lines = sum(wrap(label(group, "reference"), BESIDE).count("\n") + 1 for group in groups)
    small = count - 1
    columns = min(small, 4)
    rows = -(-small // columns) if small else 0
    heights = [max(4.1, 0.5 + 0.19 * lines), *([2.2 * rows] if small else [])]
    figure = Picture(figsize=(WIDTH, sum(heights) + 0.3), layout="constrained")
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    large = parts[0].subplots()
    shown = first(parts[1].subplots(rows, columns, squeeze=False, sharex=True), small) if small else []
    for axes in shown:
        axes.tick_params(labelbottom=True)
    for axes in (large, *shown):
        axes.tick_params(length=3)
        _ticks(axes, 6 if axes is large or columns < 3 else 4)
    return figure, [*shown, large]


def row_panels(count: int, names: Sequence[str]) -> tuple[Picture, list[Axes]]:
    """Panels that share their axes, a row per name; one line of panels has a wider first one."""
    columns = min(count, 4)
    row = max(ROW, 0.04 + 0.15 * (1 + max(name.count("\n") for name in names)))
    lines = -(-count // columns)
    widths = [1.7 if lines == 1 else 1.0, *[1.0] * (columns - 1)]
    height = lines * (row * (len(names) + 1) + 0.65) + 0.25
    figure = Picture(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.06))
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True, gridspec_kw={"width_ratios": widths})
    shown = first(grid, count)
    for i, axes in enumerate(shown):
        axes.tick_params(length=0)
        axes.xaxis.set_major_locator(MaxNLocator(5 if i == 0 and lines == 1 else 3, steps=[1, 2, 2.5, 5, 10]))
        axes.xaxis.set_major_formatter(signed)
    shown[0].set_yticks(range(len(names)), names)
    shown[0].set_ylim(len(names) - 0.4, -0.6)
    return figure, shown


def name_panels(figure: Picture, shown: Sequence[Axes], names: Iterable[str]) -> None:
    """Gives panels their titles, in lines that fit. The figure grows with them, so that panels keep their height."""
    titles = [wrap(name, int(10 * axes.bbox.width / figure.dpi)) for axes, name in zip(shown, names, strict=True)]
    for axes, each in zip(shown, titles, strict=True):
        axes.set_title(each)
    rows = len({round(axes.bbox.y0) for axes in shown})
    figure.set_figheight(figure.get_figheight() + 0.17 * rows * max(each.count("\n") for each in titles))


def first(grid: np.ndarray, count: int) -> list[Axes]:
    """The first `count` axes of a grid, row by row; the others are removed."""
    for axes in grid.flat[count:]:
        axes.remove()
    return list(grid.flat[:count])


def _ticks(axes: Axes, count: int = 6) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(count, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))


def frame(axes: Axes, x: np.ndarray, y: np.ndarray, *, spare: float) -> None:
    """Limits around the points, in-domain loss falling to the right, and as much of the identity line as fits.

    A third of the identity line stays in view if it adds at most the share `spare` to the height of the points.
    A note names the line, or says how far it is from the closest point. It has a strip below all points for itself,
    and stands at the end of the strip that the line leaves free.
    """
    left, right = padded(x)[::-1]
    bottom, top = padded(y)
    third = (left - right) / 3
    wanted = min(bottom, left - third), max(top, right + third)
    if wanted[1] - wanted[0] <= (1 + spare) * (top - bottom):
        bottom, top = wanted
    strip = STRIP * (top - bottom)
    bottom -= strip
    axes.plot([left, right], [left, right], zorder=1, **IDENTITY)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    note = "dashed: identity"
    if left < bottom or right > top:
        note = f"identity line {abs(y - x).min():.2f} nats {'below' if left < bottom else 'above'}"
    on_right = (left + right) / 2 < bottom + strip / 2 < left
    look: dict[str, Any] = {"color": "#666666", "fontsize": 8, "bbox": BLANK, "transform": axes.transAxes}
    axes.text(0.98 if on_right else 0.02, 0.03, note, ha="right" if on_right else "left", va="bottom", **look)


def log_axis(axes: Axes, marks: Sequence[float] | None = None) -> None:
    """A logarithmic horizontal axis with numbers as people read them, at `marks` or about every factor of 3.

    The largest mark has a number, and so do all others that have room. Call it once for all panels that share the axis,
    after everything is drawn: matplotlib 3.9.0 takes what is drawn on a logarithmic axis later for its logarithm.
    """
    axes.set_xscale("log")
    left, right = axes.get_xlim()
    if marks is None:
        powers = range(int(np.floor(np.log10(left))), int(np.ceil(np.log10(right))) + 1)
        marks = [digit * 10.0**power for power in powers for digit in (1, 3) if left <= digit * 10.0**power <= right]
    apart = (right / left) ** (LABEL * axes.figure.dpi / axes.bbox.width)
    kept: list[float] = []
    for mark in sorted(marks, reverse=True):
        if not kept or kept[-1] >= apart * mark:
            kept.append(mark)
    axes.set_xticks(kept[::-1], [readable(mark) for mark in kept[::-1]])
    axes.set_xticks([], minor=True)


def padded(values: np.ndarray) -> tuple[float, float]:
    """The range of some values, and a little more."""
    low, high = float(values.min()), float(values.max())
    pad = 0.05 * (high - low) or 0.05
    return low - pad, high + pad


def title(domain: str, domains: Sequence[str]) -> str:
    """The title of a domain's panel."""
    return "mean of domains" if domain == MEAN and len(domains) > 1 else domain


def token_unit(tokens: float) -> tuple[float, str]:
    """A unit in which numbers of tokens up to `tokens` are short, and its name in brackets, if it has one."""
    units = ((1e9, " (billions)"), (1e6, " (millions)"), (1e3, " (thousands)"))
    return next(((size, name) for size, name in units if tokens >= size), (1.0, ""))


def wrap(text: str, length: int) -> str:
    """Breaks a long label into lines, after an underscore, hyphen or space if there is one."""
    lines = []
    while len(text) > length:
        cut = max(text.rfind(mark, length // 2, length) for mark in "_- ") + 1 or length
        lines.append(text[:cut].rstrip())
        text = text[cut:]
    return "\n".join([*lines, text])


def signed(value: float, _: object = None) -> str:
    """A number on an axis of distances."""
    return f"{value:+.6g}" if abs(value) > 1e-9 else "0"


def name_lines(
    figure: Picture, findings: Findings, *, order: Sequence[Group] = (), note: str = "", right_of: Axes | None = None
) -> None:
    """Names the lines in a legend: up to `DIRECT` in the order of their ends, next to a panel at the right edge.

    Args:
        figure: what is drawn, with all limits set.
        findings: the models.
        order: the models of a legend in its order, as far as they are drawn.
        note: what the reference is called, in brackets.
        right_of: the panel at whose right side a legend is; without it, the legend is above all panels.
    """
    drawn = {line.group for line in figure.plotted}
    groups = [group for group in order or findings.groups if group.name in drawn]
    names = {group.name: label(group, note if group is findings.reference else "") for group in groups}
    whole = [
        axes
        for axes in dict.fromkeys(line.axes for line in figure.plotted)
        if (spec := axes.get_subplotspec()) is not None
        and (spec.is_last_col() or len(figure.axes) == 1)
        and {line.group for line in figure.plotted if line.axes is axes} == drawn
    ]
    if right_of is None and len(groups) - bool(note) <= DIRECT and whole:
        right_of = whole[0]
        ends = {name: _end(right_of, [line for line in figure.plotted if line.group == name]) for name in names}
        names = {name: names[name] for name in sorted(names, key=lambda name: -ends[name])}
    _legend(figure, findings, names, right_of)


def _end(axes: Axes, lines: Sequence[Plotted]) -> float:
    """The mean height at which lines end at the right of a panel."""
    last = np.argmin if axes.xaxis_inverted() else np.argmax
    return float(np.mean([line.y[last(line.x)] for line in lines if line.axes is axes and len(line.x)]))


def _legend(figure: Picture, findings: Findings, names: dict[str, str], right_of: Axes | None) -> None:
    lines = [Line2D([], [], **findings.styles[name].line(markersize=6)) for name in names]
    blank = ["x"] * len(names)
    width = 28 if right_of is None else BESIDE if len(names) > DIRECT else 24
    wrapped = [wrap(name, width) for name in names.values()]
    heights = [name.count("\n") + 1 for name in wrapped]
    if right_of is not None:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.02), "borderaxespad": 0.0}
        made = right_of.legend(lines, blank, handlelength=2.6, fontsize=8.5 if len(names) <= 20 else 7.5, **place)
        figure.set_figheight(max(figure.get_figheight(), 0.19 * sum(heights) + 0.5))
    else:
        longest = max(len(line) for name in wrapped for line in name.split("\n"))
        columns = max(1, min(len(names), int(figure.get_figwidth() / (0.085 * longest + 0.7))))
        made = figure.legend(lines, blank, loc="outside upper left", ncols=columns, handlelength=2.6)
        # Rows past the third would take their height from the panels.
        rows = max(sum(column) for column in np.array_split(heights, columns))
        figure.set_figheight(figure.get_figheight() + 0.2 * max(0, rows - 3))
    for text, name in zip(made.get_texts(), wrapped, strict=True):
        text.set_text(name)  # later: it drops names that begin with _


def label(group: Group, note: str = "") -> str:
    """The name of a group, with a note and the number of its seeds."""
    remarks = [note] if note else []
    if len(group.runs) > 1:
        remarks.append(f"{len(group.runs)} seeds")
    return group.name + (f" ({', '.join(remarks)})" if remarks else "")


def save(figures: Mapping[str, Figure], out: Path) -> dict[str, list[Path]]:
    """Writes NAME.png and NAME.svg of each figure, by name, in the report's style.

    One warning names the letters that the font lacks, in place of matplotlib's for each of them.
    """
    known = get_font(findfont(STYLE["font.family"])).get_charmap()
    texts: list[Any] = [text for figure in figures.values() for text in figure.findobj(Text)]
    letters = {letter for text in texts for letter in text.get_text() if letter.isprintable()}
    if boxes := "".join(sorted(letter for letter in letters if ord(letter) not in known)):
        font = f"the font of the figures, {STYLE['font.family']}, lacks {boxes}"
        warnings.warn(f"{font}: each letter of these is drawn as a box", SeqarchWarning, stacklevel=4)
    with own_style(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        return {name: write(figure, out / name) for name, figure in figures.items()}


def write(figure: Figure, stem: Path) -> list[Path]:
    """Writes `stem.png` and `stem.svg`."""
    written = [stem.with_suffix(".png"), stem.with_suffix(".svg")]
    figure.set_dpi(DPI)
    FigureCanvasAgg(figure).print_png(written[0])  # as `savefig`, which draws twice
    figure.set_layout_engine("none")  # keeps the layout of the first, which took longer than drawing
    for axes in figure.axes:  # the layout's last digits vary, and the identifiers in the file are a digest of all
        axes.set_position(np.round(axes.get_position().bounds, 6).tolist())
    FigureCanvasSVG(figure).print_svg(written[1], metadata={"Date": None})
    return written
