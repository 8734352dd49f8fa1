"""Sentences and cells of the results page on the drafts, with the numbers of the CSV files."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tests.benchmarks.prose_finished import other_rate
from tests.benchmarks.test_draft_tables import cells, gap, interval, models, rows, span, value

FOURTEEN = models("figure_1b")


def last_losses(run: str, domain: str = "mean") -> list[float]:
    """The losses at the end of each seed of a draft."""
    points = [row for row in rows("figure_1b/scatter.csv") if (row["run"], row["domain"]) == (run, domain)]
    ends = {row["seed"]: float(row["ood_loss"]) for row in sorted(points, key=lambda row: int(row["step"]))}
    return list(ends.values())


def ends(run: str, key: str = "ood_loss") -> float:
    return float(FOURTEEN[run][key])


def entropy(run: str, seed: int, step: int, layers: Iterable[int]) -> list[float]:
    where = {(run, str(seed), str(step), str(layer)) for layer in layers}
    table = rows("reasons/entropy.csv")
    return [float(row["entropy"]) for row in table if (row["run"], row["seed"], row["step"], row["layer"]) in where]


def copied(run: str) -> str:
    """What copying saves at the end."""
    found = [row["copying"] for row in rows("copying/copying.csv") if run in row["run"] and row["step"] == "1730"]
    return f"{float(found[-1]):.2f}"


def minutes(commit: str, *starts: str) -> list[float]:
    """The minutes of the runs at `draft` of a commit whose names begin so."""
    table = {row["run"]: row for row in rows("runs.csv") if row["commit"] == commit and row["minutes"]}
    return [
        float(row["minutes"])
        for name, row in table.items()
        if "medium" not in name and name.split("/")[2].startswith(starts)
    ]


ATTENTION = ("transformer", "window", "top1_chunk", "qk_norm", "position", "temperature", "constant")
RECURRENT = ("rwkv5", "rwkv6", "mamba", "delta", "gated", "based", "hybrid")
SPREAD = ("mamba1", "mamba2", "based", "window_64", "transformer_pp")
LAST = {
    run: {domain: float(np.mean(last_losses(run, domain))) for domain in ("arxiv", "github", "stack")}
    for run in FOURTEEN
}
ENTROPY = {"arxiv": 6.30, "github": 6.19, "stack": 6.90}
"""Unigram entropies of the drafts' hold-outs, from the runs' `run.json`."""
COPIED = {name.split()[0]: float(said.split()[0]) for name, *_, said, _ in cells("| model, one run each")}


def draft_sentences() -> Iterable[str]:
    """The drafts."""
    apart = max(map(ends, SPREAD)) - min(map(ends, SPREAD))
    assert max(inside := [ends(run, "in_domain_loss") for run in SPREAD]) - min(inside) < 0.02
    yield f"end within 0.02 nats of each other on web text. On the unseen text they lie up to {apart:.2f} nats apart."
    faster = ends("transformer_pp") - float(models("learning_rate/2.2e-3")["transformer_pp"]["ood_loss"])
    yield f"Transformer++ at [2.2e-3] is {faster:.1f} nats lower OOD."
    yield f"most of all Transformer++ ({faster:.2f} nats OOD)"
    better = [name for name, *_, of in cells("| model, one run each") if of.startswith("-") and float(of) < -0.2]
    most = [saved for name, saved in COPIED.items() if all(not each.startswith(name) for each in better)]
    assert max(most) <= 0.7
    least = min(COPIED[name.split()[0]] for name in better)
    yield f"copies at least {int(least * 10) / 10} nats, and every other one at most 0.7."
    yield f"itself is {interval('reasons/against_rwkv7', 'rwkv7_shell_softmax_100k')}, two seeds each."
    learned = interval("positions", "position_absolute")
    other = interval("positions/against_transformer", "position_absolute")
    yield f"has a gap of {learned}. It cannot be told apart from the Transformer ({other},"
    shell, first = "rwkv7_shell_softmax_100k", range(3)
    early = [entropy(run, seed, 346, [1])[0] for seed in (0, 1) for run in ("transformer", shell)]
    yield "is down to {:.1f} and {:.1f} nats ({:.1f} and {:.1f} in seed 1).".format(*early)
    yield f"are then still at {span(entropy('transformer_pp', 0, 346, first), 1)} nats."
    yield f"They end at {span(entropy('transformer_pp', 0, 1730, first), 1)} nats,"
    assert (
        max(abs(float(gap("figure_1a/unseen", row[0], "stack")["gap"])) for row in cells("| model | web training"))
        < 0.02
    )
    yield "All gaps on stack fall below 0.02 nats"
    for run in ("rwkv7", "top1_chunk", "window_64", "mamba2"):
        three, all_five = (abs(float(gap(f"figure_1a{part}", run)["gap"])) for part in ("/unseen", ""))
        assert all_five < three
    yield "The first panel of the figure has the mean of all five hold-outs, in which the gaps are smaller."
    stop = {
        run: row
        for run in ("mamba2_decay_none_no_conv", "mamba2")
        for row in rows("mamba2/scatter.csv")
        if row["run"] == run and row["step"] == "934" and row["seed"] == "0"
    }
    bare, whole = (float(row["in_domain_loss"]) for row in stop.values())
    yield f"after {int(stop['mamba2']['tokens']) / 1e6:.0f}M tokens such a Mamba-2 is at {bare:.2f} nats,"
    yield f"Mamba-2 itself at {whole:.2f}."
    yield f"copies little ({copied('hybrid_gated_delta_net_attention')} nats)"
    yield f"takes Transformer++ to {interval('temperature', 'qk_norm')}."
    yield f"Exact selection, which has it too, is at {value('figure_1b', 'top1_chunk')}."
    large = [copied(f"exam_medium/medium/{run}/") for run in ("transformer", "transformer_pp", "top1_chunk")]
    yield "copying: {} nats for the Transformer, {} for Transformer++ and {} for Top-1 chunk".format(*large)


def cells_of_answers() -> Iterable[str]:
    """Rows of tables that no other test reads."""
    on_stack = [value("windows", f"window_{keys}", "stack") for keys in (16, 64, 256)]
    yield f"on stack only {', '.join(on_stack)}:"
    facts, runs = models("relation"), ("constant_keys", "constant_queries_keys")
    inside, outside = ([f"{float(facts[run][key]):.3f}" for run in runs] for key in ("in_domain_loss", "ood_loss"))
    yield f"they end at {' and '.join(inside)} in domain, {' and '.join(outside)} OOD"
    by_domain = [" and ".join(value("relation", run, domain) for run in runs) for domain in ("stack", "github")]
    yield f"on stack {by_domain[0]}, on github {by_domain[1]}"
    sharp = ["temperature_0.0625", "qk_norm", "temperature_0.25", "temperature_0.5", "temperature_1.0"]
    losses = [f"{float(models('temperature')[run]['ood_loss']):.3f}" for run in sharp]
    losses[3] += " (at step 1,488)"
    yield f"OOD loss at the end {', '.join(losses)}: sharper"
    yield f"The gaps, {', '.join(value('temperature', run) for run in sharp)}, all hold zero"
    flat = [" and ".join(value("temperature", run, domain) for run in sharp[3:]) for domain in ("stack", "github")]
    yield f"at 0.5 and 1.0 on stack {flat[0]}, on github {flat[1]}"
    chunks = [f"top1_chunk{end}" for end in ("_16", "_32", "", "_128", "_2_remote", "_4_remote")]
    yield f"| {' | '.join(interval('chunk_size', run) for run in chunks)} |"
    for run in ("rwkv7", "transformer", "top1_chunk", "mamba2"):
        end = models("medium")[run]
        loss = f"{float(end['in_domain_loss']):.3f} / {float(end['ood_loss']):.3f}"
        yield f"| {run} | {interval('figure_1b', run)} | {interval('medium', run)} | {loss} |"
    end = models("medium")["transformer_pp"]
    yield f"| reference | reference | {float(end['in_domain_loss']):.3f} / {float(end['ood_loss']):.3f} |"
    yield f"seed 0 | {' | '.join(map(other_rate, ('delta_net', 'rwkv7', 'top1_chunk')))} |"
    two, three = (span(minutes(commit, *ATTENTION), 1) for commit in ("dead9ea", "8985401"))
    yield f"| attention or Top-1 chunk | {two} | {span([m for m in minutes('8985401', *ATTENTION) if m < 10], 1)} |"
    assert three.endswith("10.1")  # two remote chunks, which the page names by themselves
    alone = [f"{minutes('dead9ea', run)[0]:.1f}" for run in ("top1_element", "rwkv7_shell")]
    yield f"| Top-1 element, the shell | {', '.join(alone)} |"
    recurrent = [
        [
            *minutes(commit, *RECURRENT),
            *(m for m in minutes(commit, "rwkv7") if m not in minutes(commit, "rwkv7_shell")),
        ]
        for commit in ("dead9ea", "8985401")
    ]
    yield f"| recurrences | {span(recurrent[0], 1)} | {span(recurrent[1], 1)} |"
