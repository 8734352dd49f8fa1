import csv

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
