"""Mixers of the zoo go through Hugging Face's folders as those of seqarch do."""

from typing import Any

import pytest
import torch

import seqarch
from seqarch.experiment.load import module_of
from seqarch.training.weights import write_weights

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gated_attention.GatedAttention", {"n_heads": 4}),
        ("s4d.S4D", {}),
        ("mlstm.MLSTM", {"n_heads": 2}),
        ("mamba3.Mamba3", {"d_state": 8, "head_dim": 16}),
    ],
)
@torch.no_grad()
def test_logits_are_equal_and_padded_prompts_go_on_as_alone(name, options, tmp_path):
    from transformers import AutoModelForCausalLM

    from seqarch.hf.export import export

    mixers = {"mixer": {"class_path": f"seqarch_zoo.{name}", "init_args": options}}
    facts = {
        "seqarch": {"precision": "32-true", "tokenizer": "byte"},
        "hyper_parameters": {"vocab_size": 257, "d_model": 32, "n_layers": 2, "mixers": mixers},
        "global_step": 0,
        "TextDataModule": {"sequence_length": 32},
    }
    path = tmp_path / "model.safetensors"
    write_weights(path, facts, module_of(facts, ["seqarch_zoo"]).state_dict())
    folder = export(path, tmp_path / "out", "seqarch_zoo")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, allow_code=("seqarch_zoo",)).eval()
    lm, _ = seqarch.load(path, "seqarch_zoo")
    tokens = torch.randint(0, 257, (2, 24))
    assert torch.equal(model(tokens).logits, lm.cpu()(tokens))
    if model.generation_config.use_cache:
        mask = torch.ones_like(tokens)
        mask[0, :7] = 0
        new = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
        alone = model.generate(tokens[:1, 7:], max_new_tokens=5, do_sample=False)
        assert new[0, 7:].tolist() == alone[0].tolist()
