"""Log-likelihoods and greedy texts, against a plain loop over the definition."""

import pytest
import torch

from seqarch.data.tokenizers import ByteTokenizer, load_tokenizer
from seqarch.errors import UserError
from seqarch.evaluation import Scorer
from tests.evaluation.test_scorer import small_lm
from tests.model.test_generation import COMPOSED, build, tokens

EOS = ByteTokenizer.eos_id
PAIRS = [(b"the cat", b" sat"), (b"", b"x"), (b"the cat", b"!"), (b"the cat", b"?"), (b"a much longer context", b" ab")]


@pytest.fixture(scope="module")
def lm():
    return small_lm(vocab=257)


def by_hand(lm, context, continuation, prefix=True):
    row = [EOS] * prefix + [*context, *continuation]
    with torch.no_grad():
        logits = lm(torch.tensor([row[:-1]]))[0, -len(continuation) :]
    target = torch.tensor([*continuation])
    best = bool((logits.argmax(dim=1) == target).all())
    return float(logits.double().log_softmax(dim=1).gather(1, target[:, None]).sum()), best


def test_empty_continuations_are_refused(lm):
    with pytest.raises(UserError, match=r"^the continuation of pair 1 is empty: give at least one token$"):
        Scorer(lm, ByteTokenizer()).log_likelihood([(b"a", b"b"), (b"a", b"")])


@pytest.mark.parametrize("length", [3, 5, 8, 100])
def test_prompts_are_cut_as_lm_eval_cuts_them(lm, length):
    """`HFLM` of lm-eval takes the last `length + 1` tokens without the last, or leaves room for what it generates."""
    scorer, read = Scorer(lm, ByteTokenizer(), length=length), []
    hook = lm.embedding.register_forward_pre_hook(lambda module, args: read.append(args[0].flatten().tolist()))
    scorer.log_likelihood([(b"the cat", b" sa")], cut=True)
    scorer.generate([b"the cat"], 2, cut=True)
    scorer.log_likelihood([(b"the cat", b" sa")])
    scorer.generate([b"the cat"], 1)
    hook.remove()
    whole = [EOS, *b"the cat sa"]
    assert read[0] == whole[-(length + 1) :][:-1]
    kept = whole[:-3][-(length - 2) :]
    written = [token for each in read[1:] for token in each]
    assert written[: len(kept)] == kept
    assert written[-len(whole[:-3]) :] == whole[:-3]
    assert whole[:-1] in read


def test_prompts_that_leave_no_room_are_refused(lm):
    scorer = Scorer(lm, ByteTokenizer(), length=3)
    said = "^the model was trained on 3 tokens: no prompt fits before 3 tokens$"
    with pytest.raises(UserError, match=said):
        scorer.generate([b"a"], 3, cut=True)
    with pytest.raises(UserError, match=said):
        scorer.log_likelihood([(b"a", b"bcde")], cut=True)
    assert len(scorer.generate([b"a"], 2, cut=True)) == len(scorer.log_likelihood([(b"a", b"bcd")], cut=True)) == 1


@pytest.mark.parametrize("max_tokens", [1, 30, 1000])
def test_log_likelihoods_are_those_of_the_model(lm, max_tokens):
    passes = []
    hook = lm.register_forward_pre_hook(lambda module, args: passes.append(tuple(args[0].shape)))
    found = Scorer(lm, ByteTokenizer(), max_tokens=max_tokens).log_likelihood(PAIRS)
    hook.remove()
    assert sum(rows for rows, _ in passes) == 4, "answers of one token share a row"
    assert len(passes) == {1: 4, 30: 3, 1000: 1}[max_tokens]
    for (total, likeliest), pair in zip(found.tolist(), PAIRS, strict=True):
        expected, best = by_hand(lm, *pair)
        assert total == pytest.approx(expected, rel=1e-5)
        assert likeliest == best


def test_the_most_likely_continuation_is_told_from_others(lm):
    scorer = Scorer(lm, ByteTokenizer())
    greedy = by_greedy_loop(lm, b"the cat", 3)
    other = [*greedy[:2], (greedy[2] + 1) % 256]
    assert scorer.log_likelihood([(b"the cat", greedy), (b"the cat", other)])[:, 1].tolist() == [1, 0]


def test_without_a_prefix_only_an_empty_context_gets_one(lm):
    scorer = Scorer(lm, ByteTokenizer(), prefix=False)
    assert scorer.prompt(b"ab") == [97, 98]
    assert scorer.prompt(b"") == [EOS]
    total = float(scorer.log_likelihood(PAIRS[:1])[0, 0])
    assert total == pytest.approx(by_hand(lm, *PAIRS[0], prefix=False)[0], rel=1e-5)
    assert total != pytest.approx(by_hand(lm, *PAIRS[0])[0], rel=1e-5)


def by_greedy_loop(lm, prompt, n):
    row = [EOS, *prompt]
    for _ in range(n):
        with torch.no_grad():
            row.append(int(lm(torch.tensor([row]))[0, -1].argmax()))
    return row[len(prompt) + 1 :]


def test_texts_are_those_of_a_greedy_loop_whatever_the_batch(lm):
    prompts = [b"one", b"two", b"a longer one", b"one", b"six"]
    tokenizer = ByteTokenizer()
    expected = [tokenizer.decode(by_greedy_loop(lm, prompt, 9)) for prompt in prompts]
    assert all(expected)
    for max_tokens in (1, 8, 1000):
        assert Scorer(lm, tokenizer, max_tokens=max_tokens).generate(prompts, 9) == expected


@pytest.mark.parametrize("name", ["Attention, ALiBi", *COMPOSED])
def test_texts_of_unequal_length_are_scored_and_written_as_one_by_one(name):
    lm = build(name)
    prompts = [tokens(length, seed=length).tolist() for length in (9, 3, 6)]
    pairs = [(prompt, tokens(length).tolist()) for length, prompt in enumerate(prompts, 1)]
    apart, together = (Scorer(lm, ByteTokenizer(), prefix=False, max_tokens=most) for most in (1, 1000))
    # a batch sums products of float32 in another order; padding on the wrong side changes likelihoods by far more
    torch.testing.assert_close(together.log_likelihood(pairs), apart.log_likelihood(pairs), rtol=1e-6, atol=1e-6)
    assert together.generate(prompts, 2) == apart.generate(prompts, 2)


@pytest.mark.parametrize(
    ("stop", "text", "drawn"),
    [((), "ab\ncd", 6), (("\n",), "ab", 3), (("d", "b\n"), "a", 3), (("zz",), "ab\ncd", 6), ("zd", "ab\ncd", 6)],
)
def test_a_text_ends_at_eos_and_at_the_first_stop_string(lm, monkeypatch, stop, text, drawn):
    new = []

    def writes(lm, prompts, max_new, *, temperature, stop):
        assert (max_new, temperature) == (20, 0)
        for token in [*b"ab\ncd", EOS, *b"xy"]:
            new.append(token)
            if stop(0, new):
                break
        return [torch.tensor(new)]

    monkeypatch.setattr("seqarch.evaluation.scorer.generate", writes)
    assert Scorer(lm, ByteTokenizer()).generate([b"xyz"], 20, stop) == [text]
    assert len(new) == drawn, "no token is drawn that no text needs"


def test_pairs_of_texts_are_split_like_in_lm_eval(lm):
    scorer = Scorer(lm, ByteTokenizer())
    assert scorer.encode_pair("Answer: ", "yes") == ([*b"Answer:"], [*b" yes"])
    subwords = load_tokenizer("mixtral")
    whole, before = subwords.encode("Answer: yes"), subwords.encode("Answer:")
    for pair in (("Answer:", " yes"), ("Answer: ", "yes")):
        assert Scorer(lm, subwords).encode_pair(*pair) == (before, whole[len(before) :])


def test_a_scorer_without_tokenizer_says_so(lm):
    with pytest.raises(UserError, match="without a tokenizer"):
        Scorer(lm).log_likelihood(PAIRS)
