from pathlib import Path

from benchmarks.published_step import shape_of

RECIPE = Path(__file__).parents[2] / "recipes/transformer_pp_110m.yaml"


def test_published_models_get_the_shape_of_the_recipe():
    assert shape_of(str(RECIPE), {"data": {"sequence_length": 64, "micro_batch_size": 3}}) == {
        "batch": [3, 64],
        "vocab_size": 32000,
        "layers": 12,
        "heads": 12,
        "width": 768,
        "hidden": 2048,
    }
