"""The HTML page of a report: one file, pictures embedded, readable in light and dark."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from seqarch.report.costs import hardware, over_runs, versions
from seqarch.report.gap import EARLY, MIN_OVERLAP, MIN_POINTS, readable
from seqarch.report.roles import OOD, Role
from seqarch.report.runs import Group, Run
from seqarch.report.tables import Comparison, final_losses, interval_text, verdict
from seqarch.runs import tags
from seqarch.runs.keys import flatten, may_differ
from seqarch.runs.tags import MEAN

CAPTIONS = {
    "scatter": (
        "Loss in domain against loss out of domain",
        "Points are evaluations, the last one large. Both losses fall while a model trains, so a run moves to "
        "the right and down. Compare runs at the same horizontal position, where they know the training domains "
        "equally well: the lower curve carries over better to text it was not trained on. Dotted: OOD loss equal to "
        "in-domain loss. The axes begin where the first quarter of training ends, of more than seven "
        "runs the first half; scatter.csv has every point.",
    ),
    "gap": (
        "The gaps",
        "A run's mean distance to the reference at the same in-domain loss, with its 95 % interval; the best run on "
        "top. Right of zero a run is worse out of domain than the reference was at the same in-domain losses.",
    ),
    "distance": (
        "Distance to the reference at the same in-domain loss",
        "The vertical distance between the curves of the first figure. Above zero a run is worse out of domain than "
        "the reference was at that in-domain loss; the gap in the table is the mean of these distances.",
    ),
    "losses": (
        "Loss while training",
        "Training loss is averaged over stretches of steps. The steep first tenth of training, of more "
        "than seven runs the first quarter, lies outside the axes where it would squeeze the rest.",
    ),
    "entropy": (
        "Attention entropy by layer",
        "Mean over heads and over the queries of a fixed probe batch, each layer a line, of the first seed. Low "
        "entropy: attention picks few keys; high: it averages over many. A window or a selected chunk leaves fewer "
        "keys to average over, so levels compare within a kind of mixer only.",
    ),
    "implied_entropy": (
        "Implied entropy by layer",
        "The same for recurrent mixers, of the weights that the unrolled recurrence gives to each earlier token's "
        "value, normalised by absolute value. It is another quantity than attention entropy: compare its course, and "
        "levels among recurrent mixers only.",
    ),
}

MIX_CAPTIONS = {
    "scatter": (
        "Loss on the held-out mix against the loss on each of its domains",
        "Points are evaluations, the last one large. Training runs to the right and down. Compare runs at the "
        "same horizontal position, where they know the mix equally well: the lower curve knows this domain better, and "
        "another one less well. Dotted: the domain's loss equal to that of the mix. The axes begin where the first "
        "quarter of training ends, of more than seven runs the first half; scatter.csv has every point.",
    ),
    "gap": (
        "The gaps",
        "A run's mean distance to the reference at the same loss on the held-out mix, with its 95 % interval; the best "
        "run on top. Right of zero a run is worse than the reference was at the same losses on the mix.",
    ),
    "distance": (
        "Distance to the reference at the same loss on the held-out mix",
        "The vertical distance between the curves of the first figure. Above zero a run is worse on this domain than "
        "the reference was at that loss on the mix; the gap in the table is the mean of these distances.",
    ),
}
"""Where the domains are those of training."""

CSS = """
:root { color-scheme: light dark; --text: #1d1d1f; --soft: #5b5b60; --back: #ffffff; --line: #d8d8dc; --band: #f4f4f6; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e8ea; --soft: #a4a4ab; --back: #17181b; --line: #3a3b40; --band: #212226; }
}
body { margin: 2rem auto; max-width: 66rem; padding: 0 1rem; color: var(--text); background: var(--back);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
p, li { max-width: 46rem; } .soft, figcaption { color: var(--soft); font-size: .92rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; }
th, td { text-align: left; padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; white-space: nowrap; } td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
td.number { white-space: nowrap; overflow-wrap: normal; } td.name { min-width: 10rem; }
td.long { min-width: 16rem; overflow-wrap: normal; }
td .soft { display: block; }
figure { margin: 1rem 0 0; } figure img { display: block; width: 100%; max-width: 56rem; background: #fff;
  padding: .6rem; box-sizing: border-box; border-radius: 6px; border: 1px solid var(--line); }
figcaption { max-width: 46rem; margin-top: .4rem; } summary { cursor: pointer; }
code { background: var(--band); padding: .05em .3em; border-radius: 3px; }
"""


def render(
    groups: Sequence[Group], reference: Group, comparisons: Sequence[Comparison], figures: Sequence[Path]
) -> str:
    """The page, from the comparisons and the SVG files of the figures (named by their stem)."""
    others = ", ".join(one.group.name for one in comparisons) if len(comparisons) < 3 else f"{len(comparisons)} models"
    title = f"{others} against {reference.name}" if comparisons else reference.name
    parts = [f"<h1>{'Base capabilities' if reference.role is OOD else 'Mixed training'}: {escape(title)}</h1>"]
    parts.append(_losses_section(reference.runs[0]))
    if comparisons:
        parts.append(_verdicts(comparisons, reference))
        parts.append(_gap_section(groups, reference, comparisons))
    parts.extend(_figure(path, reference.role) for path in figures)
    parts.append(_facts_section(groups))
    parts.append(_differences_section(groups))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _losses_section(run: Run) -> str:
    """What the two losses are."""
    weights, domains = escape(_weights(run.facts.get("train"))), escape(", ".join(run.domains))
    said = (
        f"In-domain: hold-out of the training domains ({weights}). OOD: hold-out of {domains}."
        if run.role is OOD
        else "Trained on a mix of domains and tested on held-out text of the same ones, so nothing is OOD. Held-out "
        f"mix: loss on the hold-outs, weighted as in training ({weights}). Hold-out: loss on the hold-out of {domains}."
    )
    return f'<p class="soft">Losses in nats a token. {said}</p>'


def _verdicts(comparisons: Sequence[Comparison], reference: Group) -> str:
    role = reference.role
    said = [verdict(one.overall, one.group) if one.overall else _sentence(one.refusal) for one in comparisons]
    single = all(len(group.runs) == 1 for group in (reference, *(one.group for one in comparisons)))
    remark = " (one run each: what another seed would change is not in the intervals)" if single else ""
    return (
        f"<p>{_capital(role.loss)} at the same {role.equal}, compared with {escape(reference.name)}{remark}:</p><ul>"
        + "".join(f"<li>{escape(text)}</li>" for text in said)
        + "</ul>"
    )


def _sentence(text: str) -> str:
    return _capital(text) + "."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _gap_section(groups: Sequence[Group], reference: Group, comparisons: Sequence[Comparison]) -> str:
    by_name = {one.group.name: one for one in comparisons}
    domains = list(reference.evaluations[0].with_mean())
    domains = domains[-1:] + domains[:-1]
    role = reference.role
    heads = ["run", role.inside, role.short, *(_domain(domain, domains) for domain in domains), "compared at"]
    rows = []
    for group in groups:
        inside, outside = final_losses(group)
        seeds = f'<span class="soft">{len(group.runs)} seeds</span>' if len(group.runs) > 1 else ""
        cells = [
            f'<td class="name">{escape(group.name)}{seeds}</td>',
            *map(_number, (f"{inside:.3f}", f"{outside:.3f}")),
        ]
        span = len(domains) + 1
        if group is reference:
            cells.append(f'<td colspan="{span}" class="soft">reference</td>')
        elif refusal := by_name[group.name].refusal:
            cells.append(f'<td colspan="{span}">{escape(_sentence(refusal))}</td>')
        else:
            gaps = {gap.domain: gap for gap in by_name[group.name].gaps}
            cells.extend(_two_lines(*interval_text(gaps[domain]).split(" ", 1)) for domain in domains)
            (low, high), points = gaps[domains[0]].overlap, gaps[domains[0]].points
            cells.append(_two_lines(f"{high:.2f} to {low:.2f}", f"{points} points"))
        rows.append("".join(cells))
    several = any(len(group.runs) > 1 for group in groups)
    return (
        f"<h2>The {role.gap}</h2>"
        + _table(heads, rows)
        + f'<p class="soft">{_capital(role.inside)} and {role.short}: losses at the last evaluation. Gap: how much '
        f"higher the {role.loss} is than that of {escape(reference.name)} at the same {role.equal}, on average, with "
        f"the 95 % bootstrap interval; positive is worse. Compared at: the {role.axis} that both went through, and the "
        f"evaluations of both inside it, without the first {EARLY:.0%} of each run's tokens. Fewer than {MIN_POINTS} "
        f"points of a run or less than {MIN_OVERLAP:g} nats of overlap give no gap.</p>"
        + '<p class="soft">The interval covers noise from one evaluation to the next and a gap that changes during '
        + ("training, and where there are several seeds initialisation and data order. " if several else "training. ")
        + "It does not cover another seed where there is one a run, and never another hold-out, a longer training or "
        "another learning rate.</p>"
    )


def _figure(path: Path, role: Role) -> str:
    captions = CAPTIONS if role is OOD else {**CAPTIONS, **MIX_CAPTIONS}
    title, caption = captions[path.stem]
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return (
        f'<h2>{title}</h2><figure><img alt="{title}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _facts_section(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    tables = []
    for describe in (_facts, _origin):
        described = [describe(run) for run in runs]
        rows = [
            f'<td class="name">{escape(run.name)}</td>{_number(str(run.seed))}' + "".join(map(_fact, row.values()))
            for run, row in zip(runs, described, strict=True)
        ]
        tables.append(_table(["run", "seed", *described[0]], rows))
    return "<h2>The runs</h2>" + "<p></p>".join(tables)


def _facts(run: Run) -> dict[str, str]:
    facts, left_out = run.facts, run.evaluations_left_out
    speed, mfu = (over_runs([run], tag, np.median) for tag in (tags.TOKENS_PER_SECOND, tags.MFU))
    peak = over_runs([run], tags.PEAK_MEMORY, np.max)
    return {
        "status": str(facts.get("status", "unknown")),
        "parameters": _count(facts.get("parameters")),
        "steps": f"{run.steps} of {facts.get('max_steps', '?')}",
        "tokens": readable(run.tokens),
        "tokens/s": _count(speed),
        "MFU": "not logged" if mfu is None else f"{mfu:.1%}",
        "peak memory": "not logged" if peak is None else f"{peak:.2f} GiB",
        "evaluations": f"{len(run.evaluations.step)}" + (f" ({left_out} incomplete, left out)" if left_out else ""),
    }


def _origin(run: Run) -> dict[str, str]:
    facts = run.facts
    commit = str(facts.get("commit") or "unknown")
    return {
        "mixers": ", ".join(f"{name}: {kind}" for name, kind in (facts.get("mixers") or {}).items()) or "unknown",
        "hardware": hardware(run),
        "started": str(facts.get("started") or "unknown")[:16].replace("T", " "),
        "commit": commit[:10] + ("-dirty" if commit.endswith("-dirty") else ""),
        "versions": versions(run) or "unknown",
    }


def _differences_section(groups: Sequence[Group]) -> str:
    """The settings in which the configurations differ: what a comparison actually compares."""
    if len(groups) < 2:
        return ""
    flat = [{key: str(value) for key, value in flatten(group.runs[0].config).items()} for group in groups]
    every = dict.fromkeys(key for one in flat for key in one if not may_differ(key, "report"))
    keys = [key for key in every if len({one.get(key) for one in flat}) > 1]
    rows = [
        f"<td><code>{escape(key)}</code></td>" + "".join(f"<td>{escape(one.get(key, 'not set'))}</td>" for one in flat)
        for key in keys
    ]
    body = _table(["setting", *(group.name for group in groups)], rows) if rows else "<p>None.</p>"
    return (
        '<h2>What differs between the runs</h2><p class="soft">Every setting that is not the same in all '
        "configurations (of the first seed of each run), apart from where the run was written.</p>"
        f"<details open><summary>{len(keys)} settings</summary>{body}</details>"
    )


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    return f'<div class="wide"><table><tr>{head}</tr>' + "".join(f"<tr>{row}</tr>" for row in rows) + "</table></div>"


def _number(text: str) -> str:
    return f'<td class="number">{escape(text)}</td>'


def _fact(text: str) -> str:
    return _number(text) if len(text) < 32 else f'<td class="long">{escape(text)}</td>'


def _two_lines(first: str, second: str) -> str:
    return f'<td class="number">{escape(first)}<span class="soft">{escape(second)}</span></td>'


def _domain(domain: str, domains: Sequence[str]) -> str:
    return "gap, mean" if domain == MEAN and len(domains) > 1 else f"gap, {domain}"


def _weights(train: Any) -> str:
    if not isinstance(train, Mapping) or not train:
        return "unknown"
    return next(iter(train)) if len(train) == 1 else ", ".join(f"{name} {weight:g}" for name, weight in train.items())


def _count(value: float | None) -> str:
    return "not logged" if value is None else readable(float(value))
