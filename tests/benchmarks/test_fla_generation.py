import types

import torch

from benchmarks.fla_generation import time_model


class Counter(torch.nn.Module):
    """A model whose cache is the number of tokens that it has read."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.calls = []

    def forward(self, input_ids, past_key_values, use_cache, logits_to_keep):
        self.calls.append((*input_ids.shape, past_key_values or 0))
        logits = self.weight.new_zeros(len(input_ids), logits_to_keep, 32000)
        seen = (past_key_values or 0) + input_ids.shape[1]
        return types.SimpleNamespace(logits=logits, past_key_values=seen)


def test_prompts_are_read_in_pieces_and_steps_go_on_from_them():
    model = Counter()
    row = time_model(model, prompt=20000, new=16, batch_size=2, steps=4)
    pieces = [(2, 8192, 0), (2, 8192, 8192), (2, 3616, 16384)]
    assert model.calls == [*pieces, *pieces, *((2, 1, 20000 + step) for step in range(5 + 4))]
    assert (row["batch_size"], row["prompt"], row["new"]) == (2, 20000, 16)
    assert row["prefill_tokens_per_s"] == 2 * 20000 / row["prefill_s"]
