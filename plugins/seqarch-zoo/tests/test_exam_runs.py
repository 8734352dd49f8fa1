"""The README's commands make the runs whose records the package keeps."""

import re
import shlex
import tarfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from seqarch.cli import main
from seqarch.exam.derive import find_model, load_size, mixer_options
from seqarch.experiment.experiment import Experiment

ZOO = Path(__file__).parents[1]
RECORDS = sorted((ZOO / "benchmarks/exam_small").rglob("*.tar.xz"))
OWN = {"": {"seed_everything", "run_dir"}, "data": {"root", "seed"}, "trainer": {"enable_progress_bar"}}
"""Keys that each run sets for itself, by their section."""


def section(config, name):
    """The keys of a section that the recipe sets."""
    keys = config[name] if name else config
    return {key: value for key, value in keys.items() if key not in OWN.get(name, ()) and (name or key not in OWN)}


@pytest.fixture(scope="module")
def recipes():
    """The recipe of each model of the README's commands, by the name of its records."""
    readme = (ZOO / "README.md").read_text(encoding="utf-8").split("## The exam at `small`\n")[1].split("\n## ")[0]
    (shared,) = re.findall(r"^half=\((.*)\)$", readme, flags=re.MULTILINE)
    requests = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("seqarch.exam.run.run_exam", requests.append)
        for line in re.findall(r'^seqarch (exam .*) "\$\{half\[@\]\}"', readme, flags=re.MULTILINE):
            main(shlex.split(f"{line} {shared}"))
    found = {}
    for asked in requests:
        size, options = load_size(asked.size, asked.options), mixer_options(asked.mixers, asked.options)
        found |= [find_model(size, asked.against, {})]
        for mixer in asked.mixers:
            title, recipe = find_model(size, mixer, options)
            found[f"{mixer}-{options['layer']}" if "layer" in options else title] = recipe
    return found


def test_each_mixer_of_the_package_is_examined_or_named_as_not_examined(recipes):
    mixers = {point.name for point in entry_points(group="seqarch.mixers") if point.value.startswith("seqarch_zoo.")}
    (others,) = re.findall(r"^\*\*Not examined.*$", (ZOO / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    left_out = {*re.findall(r"`(\w+)`", others)} - {"FlaLayer"}
    assert {name.partition("-")[0] for name in recipes} == {"transformer_pp", *mixers} - left_out


def test_there_are_records():
    assert len(RECORDS) > 10


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name.partition(".")[0])
def test_the_commands_have_the_configuration_of_the_record(record, recipes):
    name, _, seed = record.name.removesuffix(".tar.xz").rpartition("-seed_")
    with tarfile.open(record) as archive:
        config = archive.extractfile(f"{name}/seed_{seed}/config.yaml")
        assert config is not None
        config = Experiment.from_recipe(yaml.safe_load(config.read())).config  # with the options that came since
    asked = Experiment.from_recipe(recipes[name]).config
    assert config["seed_everything"] == config["data"]["seed"] == int(seed)
    for part in OWN:
        assert section(config, part) == section(asked, part)
