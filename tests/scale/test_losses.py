"""What `seqarch scale` reads: CSV files and run folders."""

import math
import re
import shutil

import pytest

from seqarch import cli
from seqarch.errors import UserError
from seqarch.scale.losses import Point, best_rates, read_losses, read_runs, write_losses
from tests.report.runs_for_tests import write_run

HEAD = "model,parameters,tokens,loss,learning_rate\n"
SEED = "model,parameters,tokens,loss,seed,tokens_per_second\n"


def file_of(folder, text):
    path = folder / "losses.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_the_best_of_several_rates_counts_by_the_loss_at_the_last_tokens(tmp_path):
    rows = "a,10,1,3.0,0.1\na,10,2,2.0,0.1\na,10,1,2.5,0.2\na,10,2,2.2,0.2\n"
    found = read_losses(file_of(tmp_path, HEAD + rows))
    assert [(point.tokens, point.loss) for point in found] == [(1, 3.0), (2, 2.0)]


def test_written_losses_are_read_again(tmp_path):
    points = [Point("a", "10M", 1e7, 2e8, 1, 3.25, 0.001), Point("a", "10M", 1e7, 4e8, 1, 3.0, 0.001, 5e4)]
    found = read_losses(write_losses(tmp_path / "losses.csv", points))
    assert found[1] == points[1]
    assert math.isnan(found[0].tokens_per_second)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model,parameters,tokens\na,1,1\n", "no column 'loss'; its columns are model, parameters, tokens"),
        ("", "no column 'model'; its columns are none: it has no rows"),
        ("model,parameters,tokens,loss\n", "no column 'model'; its columns are none: it has no rows"),
        (b"\x89PNG\xff\x00", "losses.csv is not a CSV file: "),
        (HEAD + 'a,10,1,"1.0', "losses.csv is not a CSV file: unexpected end of data"),
        (HEAD + "a,10\n", "row 2, has more or fewer cells than the head"),
        (HEAD + "a,10,1,1.0,0.1,9\n", "row 2, has more or fewer cells than the head"),
        (HEAD + "a,10,1,low,\n", "line 2: loss is 'low', which is not a number"),
        (HEAD + "a,10,1,nan,\n", "line 2: loss is 'nan'"),
        (HEAD + "a,10,0,1.0,\n", "line 2: tokens must be positive, not 0.0"),
        (HEAD + "a,10,,1.0,\n", "line 2: tokens is '', which is not a number"),
        (HEAD + ",10,1,1.0,\n", "line 2: model is empty: give it a value"),
        (SEED + "a,10,1,1.0,0.5,\n", "line 2: seed is '0.5', which is not a whole number"),
        (SEED + "a,10,1,1.0,0,0\n", "line 2: tokens_per_second must be positive, not 0.0"),
        (
            HEAD + "a,10,1,1.0,0.1\na,10,1,1.1,0.1\n",
            "two losses of a, seed 0, at rung 10 after 1 tokens: leave one out",
        ),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, said):
    with pytest.raises(UserError, match=said):
        read_losses(file_of(tmp_path, text))


def test_another_column_may_be_the_loss(tmp_path):
    (point,) = read_losses(file_of(tmp_path, "model,parameters,tokens,loss,ood\na,10,1,1.0,2.0\n"), "ood")
    assert point.loss == 2.0


def test_one_rate_for_each_seed_is_no_choice_between_rates():
    points = [Point("a", "10M", 1e7, 1.0, seed, 3.0 + seed, 0.001 * (1 + seed)) for seed in (0, 1)]
    assert best_rates(points) == points


@pytest.fixture
def runs(tmp_path):
    """Two models at two widths."""
    sizes = {128: 1_000_000, 256: 4_000_000}
    found = []
    for width, parameters in sizes.items():
        for name, gap in (("transformer_pp", 0.0), ("mixer", 0.1)):
            run = write_run(tmp_path / f"{name}_{width}", name, gap=gap, facts={"parameters": parameters})
            config = run / "config.yaml"
            config.write_text(config.read_text().replace("d_model: 128", f"d_model: {width}\n  learning_rate: 0.001"))
            found.append(run)
    return found


def test_run_folders_of_one_width_are_a_rung(runs):
    points = read_runs(runs, "ood")
    assert {(point.model, point.rung, point.parameters) for point in points} == {
        *((name, "1M", 1_000_000) for name in ("transformer_pp", "mixer")),
        *((name, "4M", 4_000_000) for name in ("transformer_pp", "mixer")),
    }
    assert points[0].tokens_per_second == 21000.0
    assert points[0].learning_rate == 0.001


def test_two_runs_of_one_model_and_seed_are_refused(runs, tmp_path):
    again = shutil.copytree(runs[0], tmp_path / "again")
    with pytest.raises(UserError, match=r"two losses of transformer_pp, seed \d+, at rung 1M after .*: leave one out"):
        read_runs([*runs, again])


def test_unknown_losses_and_references_are_named(runs):
    with pytest.raises(UserError, match="odd"):
        read_runs(runs, "odd")
    with pytest.raises(UserError, match="transformer_pp"):
        read_runs(runs, reference="transformer")


@pytest.mark.parametrize(
    ("file", "entry"), [("run.json", r'"parameters": \d+, '), ("config.yaml", "  learning_rate: 0.001\n")]
)
def test_a_run_that_lacks_a_fact_of_its_model_is_named(runs, file, entry):
    text = (runs[1] / file).read_text()
    (runs[1] / file).write_text(re.sub(entry, "", text))
    assert (runs[1] / file).read_text() != text
    with pytest.raises(UserError, match="mixer_128 lacks the parameters or the learning rate of its model"):
        read_runs(runs)


def test_only_the_losses_of_runs_are_in_nats(runs, tmp_path):
    """A CSV file does not say whether its numbers are nats, bits per byte or perplexities."""
    rows = [f"{model},{size},1,{loss}\n" for size in (10, 20) for model, loss in (("a", 20), ("b", 25))]
    table = file_of(tmp_path, "model,parameters,tokens,perplexity\n" + "".join(rows))
    shown = {}
    for name, command in (("runs", map(str, runs)), ("file", ["--losses", str(table), "--loss", "perplexity"])):
        cli.run(["scale", *command, "--out", str(tmp_path / name)])
        shown[name] = [(tmp_path / name / each).read_text() for each in ("scale.md", "scale.svg")]
    assert all("in_domain, nats per token" in each for each in shown["runs"])
    assert all("perplexity" in each and "nats" not in each for each in shown["file"])
