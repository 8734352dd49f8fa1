"""Files are whole or absent, and keys of configurations are distinguished by their use."""

import numpy as np
import pytest

from seqarch.errors import UserError
from seqarch.runs import tags
from seqarch.runs.files import atomic, check_folder, read_arrays, read_json, write_json, write_text
from seqarch.runs.folder import checkpoint_path, checkpoints, newest_checkpoint
from seqarch.runs.keys import difference, flatten, may_differ, without


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "new" / "file"
    with atomic(path, durable=True) as partial:
        partial.write_text("whole")
        assert not path.exists()
    assert path.read_text() == "whole"
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "half \ud800")  # fails when the file is open
    assert path.read_text() == "whole"
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_one_of_several_processes_puts_the_file_in_place(tmp_path):
    with atomic(tmp_path / "file") as partial:
        with atomic(tmp_path / "file", replace=False) as same:
            assert same == partial
            partial.write_text("written together")
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").read_text() == "written together"


def test_a_link_where_it_writes_leads_nowhere(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "file.partial").symlink_to(tmp_path / "victim")
    (tmp_path / "file").symlink_to(tmp_path / "victim")
    write_json(tmp_path / "file", {})
    assert (tmp_path / "victim").read_text() == "mine"
    assert read_json(tmp_path / "file") == {}


def test_links_that_lead_out_are_refused(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "in").symlink_to(run)
    (run / "loop").symlink_to("loop")
    check_folder(run)
    (run / "out").symlink_to(tmp_path)
    with pytest.raises(UserError, match="run/out is a link that leads out of the folder"):
        check_folder(run)
    (tmp_path / "linked").symlink_to(run)
    (run / "out").unlink()
    check_folder(tmp_path / "linked")  # the user named it
    check_folder(tmp_path / "linked", tmp_path)
    (tmp_path / "linked").unlink()
    (tmp_path / "linked").symlink_to(tmp_path.parent)
    with pytest.raises(UserError, match="linked is a link that leads out of the folder"):
        check_folder(tmp_path / "linked", tmp_path)


def test_json_is_read_back_and_other_content_refused(tmp_path):
    write_json(tmp_path / "file", {"a": [1]})
    assert read_json(tmp_path / "file") == {"a": [1]}
    (tmp_path / "file").write_text("3")
    with pytest.raises(UserError, match="file:1: expected an object"):
        read_json(tmp_path / "file")


def test_checkpoints_are_listed_by_their_step(tmp_path):
    assert newest_checkpoint(tmp_path) is None
    for step in (900, 10_000, 20):
        with atomic(checkpoint_path(tmp_path, step)) as partial:
            partial.touch()
    for odd in ("step_00020000.ckpt.partial", "step_last.ckpt", "step_.ckpt", f"step_{'9' * 99}.ckpt"):
        (tmp_path / "checkpoints" / odd).touch()
    assert [path.name for path in checkpoints(tmp_path)] == [f"step_{n:08d}.ckpt" for n in (20, 900, 10_000)]
    assert newest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 10_000)


def test_keys_that_may_differ_depend_on_the_use():
    uses = {"resume", "exam", "checkpoint", "seeds", "report"}
    allowed = {
        "run_dir": {"resume", "exam", "report"},
        "extends": {"report"},
        "ckpt_path": {"resume", "exam", "report"},
        "trainer.strategy.class_path": {"resume", "exam"},
        "trainer.max_steps": set(),
        "checkpoint.keep": {"resume", "exam"},
        "checkpoints": set(),
        "model.learning_rate": {"checkpoint", "seeds"},
        "model.mixers.a.init_args.backend": {"checkpoint", "seeds"},
        "model.compile": {"checkpoint", "seeds"},
    }
    for key, expected in allowed.items():
        assert {use for use in uses if may_differ(key, use)} == expected, key


def test_keys_are_taken_out_of_nested_mappings():
    tree = {"run_dir": "a", "trainer": {"devices": 2, "max_steps": 3}, "checkpoint": {"keep": 1}, "data": {}}
    assert without(tree, "exam") == {"trainer": {"max_steps": 3}, "data": {}}
    assert tree["trainer"] == {"devices": 2, "max_steps": 3}


def test_the_first_difference_is_named_and_the_others_counted():
    before, now = {"a": 1, "b": {"d": 3, "c": 2}}, {"a": 1, "b": {"c": 4}}
    assert difference(before, before, "resume") is None
    assert difference(before, {**before, "run_dir": "x"}, "resume") is None
    assert difference(before, {**before, "e": 5}, "resume") == "e was None, is 5"
    assert difference(before, now, "resume") == "b.c was 2, is 4 and 1 more keys"


def test_a_configuration_is_completed_only_where_it_differs():
    def complete(old):
        return {"b": 2, **old}

    assert difference({"a": 1}, {"a": 1, "b": 2}, "resume", complete) is None
    assert difference({"a": 1}, {"a": 1, "b": 3}, "resume", complete) == "b was 2, is 3"
    assert difference({"a": 1}, {"a": 1}, "resume", lambda old: pytest.fail("completed")) is None


def test_tags_are_built_and_parsed():
    columns = ["step", tags.loss(tags.OOD), tags.loss(tags.OOD, "web"), tags.loss(tags.OOD, "code"), "loss/in_domain/x"]
    assert tags.domains(columns, tags.OOD) == ["code", "web"]
    assert tags.domains(columns, tags.IN_DOMAIN) == ["x"]
    columns = [tags.entropy(3, 1), tags.entropy(3), tags.entropy(10), tags.entropy(0, implied=True)]
    assert columns == ["entropy/layer_03/head_01", "entropy/layer_03", "entropy/layer_10", "implied_entropy/layer_00"]
    assert tags.entropy_layers(columns) == {3: "entropy/layer_03", 10: "entropy/layer_10"}
    assert tags.entropy_layers(columns, implied=True) == {0: "implied_entropy/layer_00"}


def test_flatten_gives_dotted_keys():
    config = {
        "model": {"d": 8, "pattern": ["a", "b"]},
        "callbacks": [{"class_path": "X"}, {"class_path": "Y"}],
        "e": {},
    }
    assert flatten(config) == {
        **{"model.d": 8, "model.pattern": ["a", "b"]},
        **{"callbacks.0.class_path": "X", "callbacks.1.class_path": "Y", "e": {}},
    }


def test_an_array_that_is_no_archive_of_arrays(tmp_path):
    with (tmp_path / "x.npz").open("wb") as file:
        np.save(file, np.zeros(2))
    with pytest.raises(UserError, match=r"x\.npz is damaged"):
        read_arrays(tmp_path / "x.npz")


def test_a_tag_whose_number_cannot_be_read_is_no_number():
    long = "1" * 5000
    columns = [f"{kind}{end}" for kind in ("repeat_gain/", "entropy/layer_") for end in (long, "x", "\u00b2", "03")]
    assert tags.repeat_gains(columns) == {3: "repeat_gain/03"}
    assert tags.entropy_layers(columns) == {3: "entropy/layer_03"}
    assert tags.position_range(f"loss_by_position/code/0-{long}") is None
    assert tags.position_range("loss_by_position/code/0-12") == ("code", 0, 12)
