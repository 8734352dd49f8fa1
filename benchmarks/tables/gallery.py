"""Every examined model side by side, from records: rows for programs, and a page of the site whose table sorts."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables.choice import decoded, recalled, state_shares
from benchmarks.tables.results import PAPER, REFERENCE, SMALL, copying, gaps, models, raw
from benchmarks.tables.speed import memory

ZOO = Path(__file__).parents[2] / "plugins/seqarch-zoo/README.md"
LEFT, RIGHT, WIDTH = -0.4, 1.0, 140
"""The gaps at both ends of a picture, and its width in pixels."""


@dataclass(frozen=True)
class Examined:
    """What was measured of a model; `None` where it was not. Gaps are in nats per token."""

    name: str
    tokens: str
    pairs: int
    gap: float
    half: float
    """Half of the 95 % interval."""
    recallable: float
    verdict: str
    copying: float | None = None
    recall: float | None = None
    training: float | None = None
    decoding: float | None = None
    state: float | None = None


def examined() -> list[Examined]:
    """All models with a gap, the best first: the paper's fourteen at 340M tokens, the zoo's at 170M."""
    speeds = {row[0].strip("`").removesuffix("_110m"): float(row[2].replace(",", "")) for row in memory()[1:]}
    found = list(_zoo())
    for model in (REFERENCE, *models()):
        row = gaps("fourteen").get((model, SMALL, "mean, raw"), {})
        found.append(
            Examined(
                model,
                "340M",
                int(row.get("pairs", 0)),
                float(row.get("gap", 0)),
                (float(row["high"]) - float(row["low"])) / 2 if row.get("low") else 0.0,
                raw(model, "mean, recallable tokens") if row else 0.0,
                row.get("word", "reference"),
                float(copying(model)),
                recalled().get(model),
                speeds.get(model),
                decoded().get(model),
                state_shares().get(model),
            )
        )
    return sorted(found, key=lambda one: one.gap)


def _zoo() -> Iterator[Examined]:
    """The rows of the zoo's table, which `benchmarks/exam_table.py` makes there from its records."""
    section = ZOO.read_text(encoding="utf-8").partition("## The exam at `small`")[2].partition("\n## ")[0]
    for line in re.findall(r"^\| `.*", section, flags=re.MULTILINE):
        name, pairs, _, _, last, _, recallable, _, verdict = (cell.strip(" `") for cell in line.strip("|").split("|"))
        gap, half = (float(part) for part in last.split(" ± "))
        yield Examined(name, "170M", int(pairs), gap, half, float(recallable.split()[0]), verdict)


COLUMNS = {
    "model": "",
    "gap": "loss on unseen text above Transformer++'s, at the same loss on the training text",
    "interval": "95 % interval; a ring is one pair of seeds, which settles nothing",
    "pairs": "pairs of seeds",
    "tokens": "training tokens",
    "recallable": "the gap on tokens that the text before gives",
    "copying": "nats per token saved on random text that is read again",
    "recall": "accuracy in the recall exam",
    "training": "tokens per second, 110M parameters, one H200",
    "decoding": "tokens per second, 64 sequences after 50,000 tokens, one H200",
    "state": "share of full attention's cache, %",
    "the paper": "what arXiv 2505.18522 finds",
    "verdict": "",
}


def page() -> str:
    """The page of the site, in Markdown with one HTML table."""
    head = "".join(f'<th title="{html.escape(about)}"><button>{name}</button></th>' for name, about in COLUMNS.items())
    rows = "\n".join(_row(one) for one in examined())
    meanings = "\n".join(f"* **{name}**: {about}" for name, about in COLUMNS.items() if about)
    return f"""---
hide: [toc]
---
# Gallery

Every model that we examined. Click on a head to sort. The paper's architectures have 42M parameters and 340M tokens
([Results](README.md)), the mixers of `plugins/seqarch-zoo` 170M tokens. Compare gaps within one number of tokens.

<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody></table></div>

{meanings}
"""


def _row(one: Examined) -> str:
    numbers = [
        (one.gap, f"{one.gap:+.3f}"),
        (one.half, _interval(one)),
        (one.pairs, str(one.pairs)),
        (float(one.tokens.strip("M")), one.tokens),
        (one.recallable, f"{one.recallable:+.3f}"),
    ]
    rest = ((one.copying, "{:.2f}"), (one.recall, "{:.3f}"), (one.training, "{:,.0f}"), (one.decoding, "{:,.0f}"))
    numbers += [(value, "" if value is None else form.format(value)) for value, form in rest]
    numbers.append((one.state, "" if one.state is None else f"{100 * one.state:.1f}"))
    cells = "".join(f'<td data-value="{"" if value is None else value}">{text}</td>' for value, text in numbers)
    return f"<tr><td><code>{one.name}</code></td>{cells}<td>{PAPER.get(one.name, '')}</td><td>{one.verdict}</td></tr>"


def _interval(one: Examined) -> str:
    """The interval as a picture in the colours of the page."""

    def x(gap: float) -> float:
        return round(WIDTH * (min(max(gap, LEFT), RIGHT) - LEFT) / (RIGHT - LEFT), 1)

    low, high = (x(one.gap + side * one.half) for side in (-1, 1))
    fill = "none" if one.pairs == 1 else "currentColor"
    said = f"{one.gap:+.3f} ± {one.half:.3f}" if math.isfinite(one.half) else f"{one.gap:+.3f}"
    return (
        f'<svg viewBox="0 0 {WIDTH} 14" width="{WIDTH}" height="14" role="img"><title>{said}</title>'
        f'<path d="M{x(0)} 0V14" class="zero"/><path d="M{low} 7H{high}" class="interval"/>'
        f'<circle cx="{x(one.gap)}" cy="7" r="4" fill="{fill}" stroke="currentColor" stroke-width="1.5"/></svg>'
    )
