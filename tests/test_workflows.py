"""The workflows of GitHub and the versions that they test."""

import re
from pathlib import Path

import yaml

from scripts.setup_env import constraints, project

ROOT = Path(__file__).parents[1]
RUN = re.compile(r"bash (\.ci/\w+)( newest| \$\{\{ matrix\.versions \}\})?")


def test_workflows_run_scripts_of_ci_with_pinned_actions_and_may_write_nothing() -> None:
    workflows = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").iterdir()]
    assert len(workflows) == 3
    assert [workflow["permissions"] for workflow in workflows] == [{"contents": "read"}] * 3
    jobs = [job for workflow in workflows for job in workflow["jobs"].values()]
    assert not any("permissions" in job for job in jobs)
    versions = [
        each["versions"] for job in jobs for each in job.get("strategy", {}).get("matrix", {}).get("include", ())
    ]
    assert sorted(versions) == ["lowest", "newest", "tested"]
    steps = [step for job in jobs for step in job["steps"]]
    scripts = [match and ROOT / match[1] for step in steps if "run" in step for match in [RUN.fullmatch(step["run"])]]
    assert all(script and script.is_file() for script in scripts)
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"]) for step in steps if "uses" in step)


def test_every_dependency_has_a_lower_bound() -> None:
    pins = constraints("lowest", list(project()["optional-dependencies"]))
    assert [pin for pin in pins if not re.fullmatch(r"[\w-]+==[\w.]+ *", pin)] == []


def test_the_image_and_the_conda_environment_name_extras_and_files_that_exist() -> None:
    image, conda = ((ROOT / name).read_text() for name in ("Dockerfile", "environment.yml"))
    extras = {extra for found in re.findall(r"\[([a-z0-9,]+)\]\"", image + conda) for extra in found.split(",")}
    assert extras >= {"gpu", "eval", "hf", "tokenizers"}
    assert extras <= project()["optional-dependencies"].keys()
    copied = [word for words in re.findall(r"^COPY (.*) \S+$", image, flags=re.MULTILINE) for word in words.split()]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    let_in = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE)
    assert {name.split("/")[0] for name in copied} == {*let_in}
