from pathlib import Path

from benchmarks.litgpt_step import shape_of

RECIPE = Path(__file__).parents[2] / "recipes/transformer_pp_110m.yaml"


def test_litgpt_gets_the_shape_of_the_recipe():
    found = shape_of(str(RECIPE), {"data": {"sequence_length": 64, "micro_batch_size": 3}})
    config, batch = found["config"], found["batch"]
    assert batch == [3, 64]
    assert config["block_size"] == 64
    assert (config["n_layer"], config["n_head"], config["n_embd"]) == (12, 12, 768)
    assert config["padded_vocab_size"] == 32000
    assert config["intermediate_size"] == 2048
