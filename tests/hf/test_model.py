"""Exported models in transformers: equal logits, left padding, generation, training, LoRA."""

import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from seqarch.data.tokenizer_files import find_tokenizer
from seqarch.errors import UserError
from seqarch.hf.export import export
from seqarch.hf.model import CACHE
from seqarch.model import generate
from tests.data.test_tokenizer_files import world_file
from tests.hf.conftest import checkpoint

HEADS = {"init_args": {"n_heads": 4}}
RECURRENT = ("Mamba2", "GatedDeltaNet", "RWKV7")


def mixer(name, **options):
    return {"mixer": {"class_path": name, "init_args": options}}


MIXERS = {
    "Attention": mixer("Attention", n_heads=4, n_kv_heads=2),
    "window": mixer("Attention", n_heads=4, window=8, position="alibi"),
    "Top1Element": mixer("Top1Element", n_heads=4),
    "Top1Chunk": mixer("Top1Chunk", n_heads=4, chunk_size=4),
    "approximate": mixer("Top1Chunk", n_heads=4, chunk_size=4, selection="approx"),
    "RWKV5": mixer("RWKV5", n_heads=4),
    "RWKV6": mixer("RWKV6", n_heads=4),
    "RWKV7": mixer("RWKV7", n_heads=4),
    "RWKV7Shell": mixer("RWKV7Shell", n_heads=4, core={"class_path": "seqarch.mixers.cores.SoftmaxCore"}),
    "Mamba2 in the shell": mixer("RWKV7Shell", n_heads=4, core=mixer("Mamba2", d_state=8, head_dim=16)["mixer"]),
    "Mamba1": mixer("Mamba1", d_state=4),
    "Mamba2": mixer("Mamba2", d_state=8, head_dim=16),
    "DeltaNet": mixer("DeltaNet", n_heads=4),
    "GatedDeltaNet": mixer("GatedDeltaNet", n_heads=2, head_dim=8),
    "GatedDeltaNet2": mixer("GatedDeltaNet2", n_heads=4),
    "NSA": mixer("NSA", n_heads=4, n_kv_heads=2, chunk_size=4, selected_chunks=3, window=4),
    "Based": mixer("Based", n_heads=2, window=8),
    "TaylorLinearAttention": mixer("TaylorLinearAttention", n_heads=2),
    "GatedConvolution": mixer("GatedConvolution"),
    "hybrid": {**mixer("Mamba2", d_state=8, head_dim=16), "attention": {"class_path": "Attention", **HEADS}},
}
LIKE_OTHERS = {
    "Top1Element",
    "RWKV5",
    "RWKV6",
    "RWKV7Shell",
    "Mamba1",
    "DeltaNet",
    "GatedDeltaNet2",
    "GatedConvolution",
}
"""Mixers whose states are of the same kinds as those of others."""
OPTIONS = {
    "Attention": {"tie_embeddings": False},
    "window": {"norm": "layernorm", "loops": 2, "canon": {"class_path": "seqarch.mixers.canon.Canon"}},
    "RWKV7": {"feed_forward": {"class_path": "seqarch.model.RWKVChannelMix"}, "embedding_norm": True},
    "Mamba2": {"feed_forward": None},
    "hybrid": {"pattern": ["mixer", "attention"], "no_feed_forward": ["mixer"]},
}
PROMPTS = ["Hello", "A much longer prompt than that", "xyz"]


def loaded(folder, **options) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def tokenized(folder, prompts=PROMPTS):
    return AutoTokenizer.from_pretrained(folder)(prompts, return_tensors="pt", padding=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in MIXERS]
)
@torch.no_grad()
def test_every_mixer_gives_its_logits_and_continues_padded_prompts_as_it_does_alone(name, exported):
    lm, _, folder = exported(MIXERS[name], **OPTIONS.get(name, {}))
    model, batch = loaded(folder), tokenized(folder)
    tokens = torch.randint(0, 257, (2, 40))
    assert torch.equal(model(tokens).logits, lm(tokens))
    alone = [row[mask.bool()] for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    whole = model(**batch).logits
    new = model.generate(**batch, max_new_tokens=8, do_sample=False, eos_token_id=None)[
        :, batch["input_ids"].shape[1] :
    ]
    for row, prompt in enumerate(alone):
        torch.testing.assert_close(whole[row, -len(prompt) :], lm(prompt[None])[0], atol=1e-4, rtol=1e-4)
        assert new[row].tolist() == generate(lm, [prompt], 8, temperature=0)[0].tolist()


@pytest.mark.parametrize("name", ["Attention", "approximate", *RECURRENT, "hybrid"])
@torch.no_grad()
def test_beams_and_draws_are_the_same_with_states_and_without(name, exported):
    _, _, folder = exported(MIXERS[name], **OPTIONS.get(name, {}))
    model, batch = loaded(folder), tokenized(folder)
    for options in ({"num_beams": 3, "do_sample": False}, {"do_sample": True, "top_k": 5}):
        texts = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            texts.append(model.generate(**batch, max_new_tokens=8, use_cache=use_cache, **options).tolist())
        assert texts[0] == texts[1]


@torch.no_grad()
def test_a_conversation_goes_on_from_its_states(exported):
    lm, _, folder = exported(MIXERS["hybrid"], **OPTIONS["hybrid"])
    model, batch = loaded(folder), tokenized(folder)
    first = model(**batch, use_cache=True)
    more = torch.randint(0, 257, (3, 5))
    mask = torch.cat((batch["attention_mask"], torch.ones_like(more)), dim=1)
    cache = first[CACHE]
    logits = model(more, attention_mask=mask, past_key_values=cache).logits
    prompt = batch["input_ids"][0][batch["attention_mask"][0].bool()]
    expected = lm(torch.cat((prompt, more[0]))[None])[0, -5:]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(UserError, match=r"past_key_values \(room for 48 tokens\) cannot take these"):
        model(torch.randint(0, 257, (3, 48)), past_key_values=cache)


@torch.no_grad()
def test_generation_stops_at_a_text(exported):
    folder = exported(MIXERS["Attention"]).folder
    model, tokenizer = loaded(folder), AutoTokenizer.from_pretrained(folder)
    options = {**tokenized(folder, ["the"]), "do_sample": False, "max_new_tokens": 30, "eos_token_id": None}
    begin = options["input_ids"].shape[1]
    new = model.generate(**options)[0, begin:].tolist()
    stop = next(token for token in new if 32 < token < 127)
    stopped = model.generate(**options, stop_strings=[chr(stop)], tokenizer=tokenizer)[0, begin:].tolist()
    assert stopped == new[: new.index(stop) + 1] != new


@torch.no_grad()
def test_arguments_that_the_model_cannot_follow_are_refused(exported):
    folder = exported(MIXERS["Mamba2"]).folder
    model, tokens = loaded(folder), torch.ones(1, 4, dtype=torch.int64)
    for wrong, options in (
        ("position_ids", {"position_ids": tokens}),
        ("output_hidden_states", {"output_hidden_states": True}),
        ("between", {"attention_mask": torch.tensor([[1, 0, 1, 1]])}),
        ("pad prompts on the left", {"attention_mask": torch.tensor([[1, 1, 1, 0]]), "use_cache": True}),
        ("shape", {"attention_mask": torch.ones(1, 3)}),
    ):
        with pytest.raises(UserError, match=wrong):
            model(tokens, **options)
    with pytest.raises(TypeError, match="input_ids"):
        model()
    for option in ({"cache_implementation": "static"}, {"prefill_chunk_size": 2}):
        with pytest.raises(UserError, match=f"states of their own: leave {next(iter(option))} out"):
            model.generate(tokens, **option)


def test_weights_of_another_model_are_refused(exported, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = exported(MIXERS["Attention"]).folder
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file({name: each for name, each in weights.items() if "qkv" not in name}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"lacks lm\.blocks\.0\.mixer\.qkv\.weight"):
        loaded(folder)
    save_file({**weights, "lm.more": torch.zeros(1)}, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"unknown lm\.more"):
        loaded(folder)


@pytest.mark.commands
def test_a_folder_loads_with_trust_remote_code_in_a_process_without_seqarch(tmp_path):
    ours = find_tokenizer(str(world_file(tmp_path)))  # the only one with code of its own
    folder = export(
        checkpoint(tmp_path, MIXERS["Attention"], tokenizer=ours, vocab_size=ours.vocab_size), tmp_path / "out"
    )
    code = f"""import sys, transformers
model = transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)
assert type(model).__name__ == "SeqarchForCausalLM"
tokenizer = transformers.AutoTokenizer.from_pretrained({str(folder)!r}, trust_remote_code=True)
print(model.num_parameters(), tokenizer("a key")["input_ids"])"""
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PATH": "", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert ran.stdout == f"{loaded(folder).num_parameters()} {[0, *ours.encode('a key')]}\n"


@pytest.mark.commands
def test_seqarch_does_not_import_transformers():
    code = "import sys, seqarch, seqarch.model; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_loss_is_that_of_the_labels_and_its_gradient_does_not_depend_on_checkpointing(exported):
    lm, _, folder = exported(MIXERS["hybrid"], **OPTIONS["hybrid"])
    tokens = torch.randint(0, 257, (2, 20))
    gradients = []
    for checkpointing in (False, True):
        model = loaded(folder).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert all(block.activation_checkpointing for block in model.lm.blocks)
        loss = model(tokens, labels=tokens).loss
        torch.testing.assert_close(loss, lm(tokens[:, :-1], tokens[:, 1:]))
        loss.backward()
        gradients.append([each.grad for each in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("use_cache", [True, False])
@torch.no_grad()
def test_the_loss_of_padded_rows_is_that_of_the_rows_alone(use_cache, exported):
    """No token is predicted from padding."""
    lm, _, folder = exported(MIXERS["Attention"])
    batch = tokenized(folder)
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    loss = loaded(folder)(**batch, labels=tokens.masked_fill(mask == 0, -100), use_cache=use_cache).loss
    rows = [row[own.bool()][None] for row, own in zip(tokens, mask, strict=True)]
    counts = torch.tensor([row.shape[1] - 1.0 for row in rows])
    alone = torch.stack([lm(row[:, :-1], row[:, 1:]) for row in rows])
    torch.testing.assert_close(loss, (alone * counts).sum() / counts.sum())


def test_the_trainer_accumulates_over_batches_as_over_one(exported, tmp_path):
    pytest.importorskip("accelerate")
    _, _, folder = exported(MIXERS["Mamba2"])
    rows = [torch.randint(0, 257, (size,)) for size in (6, 20, 11, 15) * 3]
    rows: Any = [{"input_ids": row, "labels": row} for row in rows]

    def collate(batch):
        pad = torch.nn.utils.rnn.pad_sequence
        ids = [each["input_ids"] for each in batch]
        mask = pad([torch.ones_like(each) for each in ids], batch_first=True)
        tokens = pad(ids, batch_first=True)
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}

    after = []
    for size, steps in ((4, 1), (1, 4)):
        model = loaded(folder)
        options = TrainingArguments(
            str(tmp_path / "trainer"), max_steps=3, per_device_train_batch_size=size, gradient_accumulation_steps=steps,
            learning_rate=1e-3, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, seed=0,
        )  # fmt: skip
        Trainer(model, options, train_dataset=rows, data_collator=collate).train()
        after.append(model.state_dict())
    before = loaded(folder).state_dict()
    assert any(not torch.equal(before[name], after[0][name]) for name in before)
    torch.testing.assert_close(*after, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["Attention", *RECURRENT])
def test_lora_trains_projections_and_merges(name, exported):
    peft = pytest.importorskip("peft")
    _, _, folder = exported(MIXERS[name], **OPTIONS.get(name, {}))
    tokens = torch.randint(0, 257, (2, 20))
    model = peft.get_peft_model(
        loaded(folder), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    losses = []
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    with torch.no_grad():
        adapted = model(input_ids=tokens).logits
        merged = model.merge_and_unload()(tokens).logits
    torch.testing.assert_close(adapted, merged, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_dtype_and_device_map(exported):
    pytest.importorskip("accelerate")
    lm, _, folder = exported(MIXERS["Attention"])
    tokens = torch.randint(0, 257, (2, 20))
    half = loaded(folder, dtype=torch.bfloat16)
    assert {each.dtype for each in half.parameters()} == {torch.bfloat16}
    assert torch.equal(half(tokens).logits, lm.to(torch.bfloat16)(tokens))
    mapped = loaded(folder, device_map={"": "cpu"})
    assert torch.equal(mapped(tokens).logits, loaded(folder)(tokens).logits)


def test_a_trained_model_saves_itself_for_the_next_reader(exported, tmp_path):
    _, _, folder = exported(MIXERS["Attention"])
    model = loaded(folder)
    model.lm.norm.weight.data += 1
    model.save_pretrained(tmp_path / "again")
    again = loaded(tmp_path / "again")
    assert all(map(torch.equal, model.parameters(), again.parameters()))
