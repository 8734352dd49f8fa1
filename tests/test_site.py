"""The site, its tutorials and the facts that several files repeat about a version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import yaml

import seqarch
from scripts import site as hooks
from seqarch.cli.commands import COMMANDS
from seqarch.mixers.registry import mixer_entries

ROOT = Path(__file__).parents[1]

PAGE = """<html><head><link rel="canonical" href="https://a.org/"><link rel="stylesheet" href="{style}">
<style>{css}</style></head><body><a href="https://b.org/">a link</a><img src="{image}" srcset="{images}">
<code>url(https://c.org/in-text)</code><script src="{script}"></script></body></html>"""
LOCAL = {"style": "assets/a.css", "css": "p {}", "image": "../a.png", "images": "a.png 1x", "script": "a.js"}


def requests_of(folder: Path, **given: str) -> list[str]:
    (folder / "page.html").write_text(PAGE.format(**{**LOCAL, **given}))
    return list(hooks.outside_requests(folder))


def test_requests_to_other_hosts_are_found(tmp_path):
    assert requests_of(tmp_path) == []
    assert requests_of(tmp_path, script="https://d.org/a.js") == ["page.html: https://d.org/a.js"]
    assert requests_of(tmp_path, style="//d.org/a.css") == ["page.html: //d.org/a.css"]
    assert requests_of(tmp_path, images="a.png 1x, https://d.org/b.png 2x") == ["page.html: https://d.org/b.png 2x"]
    assert requests_of(tmp_path, css="@import 'https://d.org/f.css'") == ["page.html: https://d.org/f.css"]
    (tmp_path / "a.css").write_text('@font-face { src: url("https://d.org/f.woff2") }')
    assert requests_of(tmp_path) == ["a.css: https://d.org/f.woff2"]


def test_the_page_of_options_has_every_command_option_and_mixer():
    page = hooks.options_page()
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    assert {f"seqarch {name}" for name in ("fit", *COMMANDS)} <= set(headings)
    assert "seqarch data prepare" in headings
    assert {entry.name for entry in mixer_entries() if entry.package == "seqarch"} <= set(headings)
    assert re.search(r"^\| `--model.learning_rate` \| `0.0003` \| \S", page, flags=re.MULTILINE)
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}


def test_names_of_models_stay_in_one_piece():
    page = hooks.on_page_content('<img alt="of RWKV-7 here"><th>RWKV-7</th><td>Transformer++, pre-trained</td>', None)
    name = '<span class="name">{}</span>'.format
    cells = f"<th>{name('RWKV-7')}</th><td>{name('Transformer++')}, pre-trained</td>"
    assert page == '<img alt="of RWKV-7 here">' + cells


def test_options_stay_in_one_piece_and_long_names_break_between_their_parts():
    page = hooks.on_page_content("<pre><code>seqarch fit --data.root s</code></pre><td><code>a.b_c</code></td>", None)
    command = '<pre><code>seqarch fit <span class="name">--data.root</span> s</code></pre>'
    assert page == command + '<td><code class="name">a.<wbr>b_<wbr>c</code></td>'


def test_a_search_finds_pages_for_developers_last():
    for name, meta in (("extend.md", {"search": {"boost": 0.5}}), ("exam.md", {})):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name), meta={})
        assert (hooks.on_page_markdown("text", page), page.meta) == ("text", meta)


def test_links_of_the_root_s_pages_lead_to_pages():
    for name, source in hooks.ROOT_PAGES.items():
        targets = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", hooks.root_page(source))
        pages = [target for target in targets if "://" not in target]
        missing = [page for page in pages if page not in hooks.ROOT_PAGES and not (ROOT / "docs" / page).is_file()]
        assert not missing, name


def test_the_readme_shows_a_picture_in_few_lines():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (ROOT / re.findall(r'<img src="([^"]+)"', page)[0]).is_file()
    assert len(page.splitlines()) <= 120


def test_the_snippets_on_kernels_run(capsys):
    text = (ROOT / "docs" / "use_kernels.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    exec("\n".join(blocks), {})
    assert "torch.Size([2, 256, 4, 32])" in capsys.readouterr().out


def test_every_file_names_the_same_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    versions = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert citation["version"] == versions[0] == seqarch.__version__
    assert f"Version {seqarch.__version__.rpartition('.')[0]}" in (ROOT / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert citation["license"] == project["project"]["license"]
