"""When two runs are the same run, and where recipes and runs are found."""

import copy
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import seqarch
from seqarch.cli.commands import parse
from seqarch.data.shards import open_domain
from seqarch.errors import UserError
from seqarch.exam import pool
from seqarch.exam.derive import load_size
from seqarch.exam.plan import Entrant, Exam, difference, fingerprint, minutes_used, remember, remembered, reuse
from seqarch.exam.pool import Stopped, Worker, share_cores, share_gpus
from seqarch.exam.run import find_shards, text_files
from seqarch.exam.train import _make_run
from seqarch.experiment.recipes import recipes_folder
from seqarch.runs.folder import is_finished, read_note, run_name, write_note, write_record
from seqarch.training.run_folder import check_same_run
from tests.conftest import wait_for
from tests.exam.works import die, echo, join, linger, see

RECIPE = load_size("tiny", {}).recipe
DATA = {"docs": "byte abc"}


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("data", "root", "elsewhere"),
        ("trainer", "devices", 4),
        ("checkpoint", "keep", 9),
        ("data", "micro_batch_size", 2),
    ],
)
def test_where_a_run_is_made_does_not_make_it_another(section, key, value):
    moved = copy.deepcopy(RECIPE)
    moved[section][key] = value
    assert fingerprint(moved, 0, DATA, "code") == fingerprint(RECIPE, 0, DATA, "code")


def test_recipe_seed_data_and_code_make_it_another():
    other = copy.deepcopy(RECIPE)
    other["model"]["learning_rate"] = 1e-3
    keys = [
        fingerprint(RECIPE, 0, DATA, "code"),
        fingerprint(other, 0, DATA, "code"),
        fingerprint(RECIPE, 1, DATA, "code"),
        fingerprint(RECIPE, 0, {"docs": "byte abd"}, "code"),
        fingerprint(RECIPE, 0, DATA, "other"),
    ]
    assert len(set(keys)) == 5
    assert ["recipe or data" in difference(key, keys[0]) for key in keys[1:]] == [True, True, True, False]
    assert "code of seqarch or of the model has changed" in difference("0123456789abcdef", keys[0])  # had no code yet


def test_a_copy_that_was_cut_short_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SEQARCH_CACHE", str(tmp_path / "cache"))
    source, run = tmp_path / "one/seed_0", tmp_path / "two/seed_0"
    for folder in (source, source / "branches/step_1"):
        folder.mkdir(parents=True)
        write_record(folder, {"status": "finished"})
    write_note(source, fingerprint="key")
    remember(source, "key")
    (source / "gone").symlink_to("nowhere")
    with pytest.raises(OSError, match="No such file"):
        reuse(run, source)
    assert not is_finished(run)
    (source / "gone").unlink()
    assert remembered(run, "key") == source
    reuse(run, source)
    assert is_finished(run)
    assert is_finished(run / "branches/step_1")


def test_minutes_of_a_killed_attempt_count_up_to_its_last_row(tmp_path):
    assert minutes_used(tmp_path) == 0
    write_note(tmp_path, minutes=4.0, start=None)
    assert minutes_used(tmp_path) == 4
    write_note(tmp_path, start=10_000.0)  # killed before its first row
    assert minutes_used(tmp_path) == 4
    (tmp_path / "curves.csv").touch()
    os.utime(tmp_path / "curves.csv", (10_600, 10_600))
    assert minutes_used(tmp_path) == 10
    write_note(tmp_path, start=20_000.0)  # killed before it added a row
    assert minutes_used(tmp_path) == 4


def test_an_attempt_notes_the_minutes_of_a_killed_one(tmp_path):
    it = Entrant("it", {"model": {"learning_rate": 1e-3}}, 1, "code")
    exam = Exam(tmp_path, "tiny", it, [], 1, {})
    run = exam.run(it, 0)
    run.mkdir(parents=True)
    (run / "curves.csv").touch()
    os.utime(run / "curves.csv", (10_600, 10_600))
    write_note(run, fingerprint=exam.key(it, 0), start=10_000.0)
    with pytest.raises(UserError, match="it stopped before its last step"):
        _make_run(exam, it, 0, Mock(fit=lambda args: write_note(run, seen=minutes_used(run))))
    assert read_note(run)["seen"] == 10


def test_a_run_is_called_after_its_model():
    assert run_name(Path("runs/exam/tiny/mamba2/seed_12")) == "mamba2"
    assert run_name(Path("runs/seed_0/mamba2")) == "mamba2"
    assert run_name(Path("seed_0")) == "seed_0"


def test_a_run_folder_may_be_moved(tmp_path):
    (tmp_path / "config.yaml").write_text("run_dir: before\nmodel: {d_model: 8}\n")
    check_same_run(tmp_path, {"run_dir": str(tmp_path), "model": {"d_model": 8}})
    with pytest.raises(UserError, match=r"model.d_model was 8, is 16"):
        check_same_run(tmp_path, {"run_dir": str(tmp_path), "model": {"d_model": 16}})


def test_recipes_of_an_installed_wheel_are_found(tmp_path, monkeypatch):
    assert recipes_folder() == Path(seqarch.__file__).parents[1] / "recipes"
    monkeypatch.setattr(seqarch, "__file__", str(tmp_path / "site/seqarch/__init__.py"))
    with pytest.raises(UserError, match="seqarch's recipes are neither in"):
        recipes_folder()
    (tmp_path / "site/seqarch/recipes/exam").mkdir(parents=True)
    assert recipes_folder() == tmp_path / "site/seqarch/recipes"


def test_options_with_a_dot_are_split_off():
    words = ["--mixer", "A", "--mixer.x=1", "--data", "d", "--trainer.max_steps", "-1", "--out=o.p"]
    options = parse("exam", words)
    assert (options.mixer, options.data, options.out) == (["A"], "d", "o.p")
    assert options.options == {"mixer.x": "1", "trainer.max_steps": "-1"}


def test_files_of_a_domain(tmp_path):
    for name in ("web.jsonl.zst", "web-1.parquet", "web-0.parquet", "webs.jsonl", "web.txt", "web.png"):
        (tmp_path / name).touch()
    found = text_files(tmp_path, "web", ["web"])
    assert [path.name for path in found] == ["web-0.parquet", "web-1.parquet", "web.jsonl.zst", "web.txt"]


def test_text_of_a_domain_whose_name_begins_with_anothers_is_not_the_others(tmp_path):
    for name in ("wiki", "wiki-0", "wiki-fr", "wiki-fr-0"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name} {n}"}}\n' for n in range(99)))
    prepared = find_shards(tmp_path, ["wiki"], ["wiki-fr"], "byte", tmp_path / "out/shards")
    sources = {name: open_domain(prepared, name).manifest.sources for name in ("wiki", "wiki-fr")}
    files = {name: [source.file for source in each] for name, each in sources.items()}
    assert files == {"wiki": ["wiki-0.jsonl", "wiki.jsonl"], "wiki-fr": ["wiki-fr-0.jsonl", "wiki-fr.jsonl"]}


def test_shards_of_other_text_or_of_another_tokenizer_are_not_used_again(tmp_path):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        for name in ("web", "code"):
            lines = (f'{{"text": "{folder} {name} {n}"}}\n' for n in range(99))
            (tmp_path / folder / f"{name}.jsonl").write_text("".join(lines))
    find_shards(tmp_path / "one", ["web"], ["code"], "byte", tmp_path / "shards")
    for folder, tokenizer, what in (("other", "byte", "sources"), ("one", "mixtral", "tokenizer")):
        with pytest.raises(UserError, match=rf"shards/web was prepared from other inputs \({what}\)"):
            find_shards(tmp_path / folder, ["web"], ["code"], tokenizer, tmp_path / "shards")


def test_prepared_domains_are_used_where_they_lie(shards, tmp_path):
    assert find_shards(shards, ["docs"], ["code"], "byte", tmp_path / "new") == shards
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("link", ["shards", "shards/docs"])
def test_shards_are_not_prepared_behind_a_link(tmp_path, link):
    (tmp_path / "docs.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "code.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / link).parent.mkdir(parents=True)
    (tmp_path / "out" / link).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"out/{link} is a link that leads out of the folder"):
        find_shards(tmp_path, ["docs"], ["code"], "byte", tmp_path / "out/shards")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_killed_process_is_told_and_replaced():
    worker = Worker(die)
    for _ in range(2):
        with pytest.raises(UserError, match="its process was ended by SIGKILL, usually for lack of memory"):
            worker.fit(["a"])
    worker.close()


def test_what_a_run_says_is_raised_and_success_is_silent():
    worker = Worker(echo)
    worker.fit([])
    with pytest.raises(UserError, match="went wrong"):
        worker.fit(["went", "wrong"])
    worker.fit([])
    worker.close()
    worker.close()


def test_each_run_of_several_processes_has_a_new_one():
    worker = Worker(join)
    worker.fit([])
    worker.fit([])
    worker.close()


@pytest.mark.parametrize(("before", "gpus", "seen"), [("5", "2,3", "2,3"), ("5", None, "5"), (None, "1", "1")])
def test_a_process_sees_its_gpus_and_the_exam_those_of_before(before, gpus, seen, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    worker = Worker(see, gpus)
    with pytest.raises(UserError, match=f"sees {seen},"):
        worker.fit([])
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
    worker.close()


@pytest.mark.parametrize(("before", "threads", "given"), [(None, 3, "3"), (None, None, "None"), ("7", 3, "7")])
def test_a_process_has_its_threads_unless_the_user_says_how_many(before, threads, given, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if before is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", before)
    worker = Worker(see, threads=threads)
    with pytest.raises(UserError, match=f"threads {given}$"):
        worker.fit([])
    assert os.environ.get("OMP_NUM_THREADS") == before
    worker.close()


@pytest.mark.parametrize(
    ("gpus", "threads"),
    [([None], None), (["0,1"], None), ([None, None, None], 5), (["0,1", "2,3"], 4), ([None] * 20, 1)],
)
def test_processes_share_the_cores(gpus, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    assert share_cores(gpus) == threads


def test_a_stopped_worker_ends_its_run_and_makes_no_other():
    worker = Worker(linger)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(worker.fit, [])
        wait_for(lambda: worker._running is not None)
        worker.stop()
        with pytest.raises(Stopped):
            run.result(timeout=30)
    with pytest.raises(Stopped):
        worker.fit([])
    worker.close()


@pytest.mark.parametrize(("alive", "ended"), [(True, []), (False, [1])])
def test_a_process_whose_exam_was_killed_ends_with_its_run(alive, ended, monkeypatch):
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(pool, "fit", lambda call: "")
    monkeypatch.setattr(pool.multiprocessing, "parent_process", lambda: SimpleNamespace(is_alive=lambda: alive))
    assert pool.work([]) == ""
    assert exits == ended


@pytest.mark.parametrize(
    ("trainer", "workers", "shares"),
    [
        ({"accelerator": "gpu", "devices": 1}, None, ["4", "5", "6", "7"]),
        ({"accelerator": "gpu", "devices": 1}, 2, ["4", "5"]),
        ({"accelerator": "gpu", "devices": 1}, 6, ["4", "5", "6", "7", "4", "5"]),
        ({"accelerator": "gpu", "devices": 2}, None, ["4,5", "6,7"]),
        ({"accelerator": "gpu", "devices": 2}, 3, ["4,5", "6,7", "4,5"]),
        ({"accelerator": "gpu", "devices": 3}, None, ["4,5,6"]),
        ({"accelerator": "gpu", "devices": "auto"}, None, ["4,5,6,7"]),
        ({"accelerator": "cpu"}, 2, [None] * 2),
        ({"accelerator": "cpu"}, None, [None] * 6),
        ({"accelerator": "cpu", "devices": 4}, None, [None] * 4),
        ({"accelerator": "cpu", "devices": 32}, None, [None]),
        ({}, None, [None] * 6),
        ({"accelerator": "mps"}, None, [None]),
    ],
)
def test_gpus_and_cores_are_shared_among_runs(trainer, workers, shares, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert share_gpus(trainer, workers, runs=6) == shares
    assert len(share_gpus({"accelerator": "cpu"}, None, runs=40)) == 16
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert share_gpus({}, None, runs=6) == [None]
