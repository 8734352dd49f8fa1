"""`fit --profile`: a trace of the steps that were asked for, and the dearest rows."""

import gzip
import json

import pytest

from seqarch.errors import UserError
from seqarch.runs.folder import read_config


@pytest.mark.commands
def test_a_trace_of_the_steps_and_ten_rows(fit, capsys):
    run_dir = fit(profile=2)
    (trace,) = (run_dir / "profile").iterdir()
    assert trace.name == "steps_3-4_process_0.pt.trace.json.gz"
    names = {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {name for name in names if name.startswith("ProfilerStep")} == {"ProfilerStep#2", "ProfilerStep#3"}
    lines = capsys.readouterr().out.splitlines()
    begin = next(at for at, line in enumerate(lines) if str(trace) in line)
    assert lines[begin + 1].split() == ["ms", "share", "calls", "operator"]
    rows = [line.split() for line in lines[begin + 2 : begin + 12]]
    times = [float(row[0]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert any(row[3] == "aten::mm" for row in rows)
    assert not lines[begin + 12].split()[0][0].isdigit(), "ten rows"
    assert "profile" not in read_config(run_dir)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"profile": 3}, "profile is 3, but of the 4 steps left it can record 2"),
        ({"profile": -1}, "profile must be at least 0, not -1"),
        ({"profile": 1, "trainer.profiler": "pytorch"}, "leave one out"),
    ],
)
def test_what_cannot_be_recorded_is_refused_and_leaves_nothing(fit, tmp_path, options, said):
    with pytest.raises(UserError, match=said):
        fit(**options)
    assert list(tmp_path.iterdir()) == []
