import csv

import pytest

from seqarch.errors import SeqarchWarning, UserError
from seqarch.training.curves import CurvesLogger


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_one_row_a_step_and_one_column_a_tag(tmp_path):
    logger = CurvesLogger(tmp_path / "curves.csv")
    logger.log_metrics({"loss/train": 2.5, "tokens": 0}, step=0)
    logger.log_metrics({"loss/ood": 3.5, "tokens": 0}, step=0)
    logger.log_metrics({"loss/train": 0.1 + 0.2, "tokens": 8}, step=1)
    logger.log_metrics({"new": 1.0, "tokens": 16}, step=2)
    logger.save()
    assert rows(logger.path) == [
        {"step": "0", "tokens": "0", "loss/train": "2.5", "loss/ood": "3.5", "new": ""},
        {"step": "1", "tokens": "8", "loss/train": "0.30000000000000004", "loss/ood": "", "new": ""},
        {"step": "2", "tokens": "16", "loss/train": "", "loss/ood": "", "new": "1.0"},
    ]


def test_going_on_keeps_rows_up_to_the_checkpoint(tmp_path):
    first = CurvesLogger(tmp_path / "curves.csv")
    for step in range(4):
        first.log_metrics({"loss/train": float(step), "tokens": step}, step=step)
    first.save()
    second = CurvesLogger(tmp_path / "curves.csv")
    second.truncate(1)
    second.log_metrics({"loss/train": 20.0, "tokens": 2}, step=2)
    second.finalize("success")
    assert [(row["step"], row["loss/train"]) for row in rows(first.path)] == [("0", "0.0"), ("1", "1.0"), ("2", "20.0")]


def test_half_a_line_of_a_killed_process_is_dropped(tmp_path):
    logger = CurvesLogger(tmp_path / "curves.csv")
    logger.log_metrics({"loss/train": 1.0, "tokens": 0}, step=0)
    logger.save()
    with logger.path.open("a") as file:
        file.write("1,8,2.3")  # of 2.3456
    again = CurvesLogger(logger.path)
    again.truncate(5)
    assert [row["step"] for row in rows(logger.path)] == ["0"]


def write(logger, steps):
    for step in steps:
        logger.log_metrics(
            {"loss/train": 1 / (1 + step), "tokens": step, **({"late": 1.0} if step > 2 else {})}, step=step
        )
    logger.sync()


@pytest.mark.parametrize(
    ("what", "spoil"),
    [
        ("removed", lambda path: path.unlink()),
        ("changed", lambda path: path.write_bytes(path.read_bytes()[:-4])),
        ("changed", lambda path: path.write_text("step,tokens\n")),
        ("changed", lambda path: path.write_text(path.read_text().replace("0.5", "0.7"))),
    ],
    ids=["removed", "cut", "overwritten", "flipped"],
)
@pytest.mark.parametrize("rest", [[2], [2, 3, 4], []], ids=str)
def test_what_something_else_does_to_the_file_is_undone(tmp_path, what, spoil, rest):
    undisturbed, logger = CurvesLogger(tmp_path / "a.csv"), CurvesLogger(tmp_path / "b.csv")
    write(undisturbed, [0, 1, *rest])
    write(logger, [0, 1])
    spoil(logger.path)
    with pytest.warns(SeqarchWarning, match=f"b.csv was {what} by something else: its rows are written again"):
        write(logger, rest)
    assert logger.path.read_bytes() == undisturbed.path.read_bytes()
    assert logger.note == undisturbed.note


def test_rows_that_changed_since_the_checkpoint_are_refused(tmp_path):
    first = CurvesLogger(tmp_path / "curves.csv")
    write(first, range(3))
    note = first.note
    first.log_metrics({"lr-AdamW": 0.1}, 2)  # as `LearningRateMonitor` does at the next step's start
    write(first, range(3, 5))  # with a new column
    again = CurvesLogger(first.path)
    again.truncate(2, note)
    assert again.note == note == {"rows": 3, "curves": note["curves"]}
    changed = first.path.read_text().replace("0.5", "0.6")
    first.path.write_text(changed)
    with pytest.raises(UserError, match="is not what the run had written at step 2: restore it"):
        CurvesLogger(first.path).truncate(2, note)
    assert first.path.read_text() == changed
    first.path.unlink()
    with pytest.warns(SeqarchWarning, match="lacks 3 of the 3 rows that it had at step 2"):
        CurvesLogger(first.path).truncate(2, note)
