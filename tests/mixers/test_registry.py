"""Mixers are found through entry points. An error of one names its package and does not affect the others."""

import sys

import pytest

from seqarch import plugins
from seqarch.errors import PluginWarning, UserError
from seqarch.mixers import Mixer
from seqarch.mixers.registry import broken_parts, import_mixers, load_mixer, mixer_entries
from seqarch.plugins import packages, resolve

GOOD = "from seqarch.mixers import Mixer\nclass {name}(Mixer):\n    def forward(self, x):\n        return x\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a distribution with one entry point on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def run(package, source, name, target=None):
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{module}-0.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.3\n")
        (info / "entry_points.txt").write_text(f"[seqarch.mixers]\n{name} = {target or f'{module}:{name}'}\n")

    before = set(sys.modules)
    yield run
    for module in set(sys.modules) - before:
        if getattr(sys.modules[module], "__file__", None) and str(tmp_path) in str(sys.modules[module].__file__):
            del sys.modules[module]


def test_builtins_come_through_the_same_door():
    entries = {entry.name: entry for entry in mixer_entries()}
    assert {"Attention", "Top1Element", "Top1Chunk", "RWKV7Shell"} <= entries.keys()
    assert entries["Attention"].package == "seqarch"
    assert entries["Attention"].target == "seqarch.mixers.attention:Attention"
    assert all(issubclass(mixer, Mixer) for mixer in import_mixers().values())


def test_plugin_is_listed_with_its_package_and_loaded(install):
    install("my-mixers", GOOD.format(name="Mine"), "Mine")
    entry = next(entry for entry in mixer_entries() if entry.name == "Mine")
    assert (entry.package, entry.version, entry.target) == ("my-mixers", "0.3", "my_mixers:Mine")
    assert load_mixer("Mine").__name__ == "Mine"


def test_listing_imports_nothing(install):
    install("explosive", "raise RuntimeError('imported')", "Explosive")
    assert "Explosive" in [entry.name for entry in mixer_entries()]
    assert "explosive" not in sys.modules


def test_one_search_finds_the_entry_points_of_all_groups(install, monkeypatch):
    """A search reads the metadata of all packages, whatever the group."""
    install("my-mixers", GOOD.format(name="Mine"), "Mine")
    searches, search = [], plugins.entry_points
    monkeypatch.setattr(plugins, "entry_points", lambda **group: searches.append(group) or search(**group))
    assert "my_mixers" in packages()
    assert "Mine" in plugins.entries(plugins.MIXERS)
    assert "Mine" not in plugins.entries("seqarch.tasks")
    assert searches == [{}]


def test_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="unknown mixer 'Top1Chnk': did you mean Top1Chunk"):
        load_mixer("Top1Chnk")


def test_two_packages_with_one_name_are_both_named(install):
    install("their-mixers", GOOD.format(name="Same"), "Same")
    install("our-mixers", GOOD.format(name="Same"), "Same")
    with pytest.raises(UserError, match=r"'Same' is declared twice, by our-mixers .* and their-mixers .*uninstall one"):
        load_mixer("Same")
    with pytest.warns(PluginWarning, match="left out: mixer 'Same' is declared twice"):
        assert {"Attention", "Same"} & import_mixers().keys() == {"Attention"}
    assert "Same" in broken_parts()


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("import no_such_module", None, "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise RuntimeError('no GPU')", None, "cannot be imported: RuntimeError: no GPU"),
        ("raise SystemExit('no licence')", None, "cannot be imported: SystemExit: no licence"),
        ("", "no path", "cannot be imported: AttributeError"),
        ("class Other: pass", None, "cannot be imported: AttributeError"),
        ("class Bad: pass", None, "is not a subclass of seqarch.mixers.Mixer"),
        ("Bad = 3", None, "is not a subclass of seqarch.mixers.Mixer"),
        ("from seqarch.mixers import Mixer\nclass Bad(Mixer): pass", None, "defines no forward"),
        (GOOD.format(name="Other"), "bad_mixers:Other", "than its class: call both Other or Bad"),
    ],
)
def test_broken_plugin_is_named_and_spares_the_others(install, source, target, reason):
    install("bad-mixers", source, "Bad", target)
    with pytest.raises(UserError, match="mixer 'Bad' of package bad-mixers") as error:
        load_mixer("Bad")
    assert reason in str(error.value)
    with pytest.warns(PluginWarning, match="left out: mixer 'Bad' of package bad-mixers") as warned:
        mixers = import_mixers()
    assert len(warned) == 1
    assert "Attention" in mixers
    assert "Bad" not in mixers
    assert list(broken_parts()) == ["Bad"]
    assert "seqarch" in packages()


@pytest.mark.parametrize(
    "modules", [("seqarch.model", "seqarch_zoo"), ("seqarch.model", "torch.optim.sgd"), ("torch.optim.sgd", "other")]
)
def test_a_bare_name_is_the_class_of_seqarch_or_torch_whatever_others_are_imported(modules):
    class Base:
        pass

    first, later = (type("Same", (Base,), {"__module__": module}) for module in modules)
    assert Base.__subclasses__() == [first, later]
    assert resolve("Same", Base) is first
