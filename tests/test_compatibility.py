"""The rule for which drafts fit, compared with llama.cpp's own, and where it is more lenient."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.compatibility import MIN_COVERAGE, Tokenizer, compare_tokenizers


def llama_cpp_accepts(target: Tokenizer, draft: Tokenizer) -> bool:
    """Reimplement common_speculative_are_compatible (common/speculative.cpp), line by line."""
    if target.kind != draft.kind:
        return False
    if target.add_bos != draft.add_bos or (target.add_bos and target.bos != draft.bos):
        return False
    if target.add_eos != draft.add_eos or (target.add_eos and target.eos != draft.eos):
        return False
    ours, theirs = list(target.texts), list(draft.texts)
    if abs(len(ours) - len(theirs)) > 128:
        return False
    return all(
        our_text == their_text for our_text, their_text in zip(ours[5:], theirs[5:], strict=False)
    )


def texts(count: int) -> list[bytes]:
    return [b"t%d" % index for index in range(count)]


BASE = Tokenizer("bpe", texts(1000), bos=1, eos=2, add_bos=True, add_eos=False)


@st.composite
def tokenizers(draw: st.DrawFn) -> Tokenizer:
    """Draw BASE with any of its properties changed."""
    size = draw(st.sampled_from([40, 400, 871, 872, 999, 1000, 1001, 1128, 1129, 1300]))
    changed = texts(size)
    count = draw(st.sampled_from([0, 0, 0, 1, 20, size]))
    for index in draw(st.sets(st.integers(0, size - 1), max_size=count)):
        changed[index] = b"other %d" % index
    flags = st.sampled_from([True, True, False])
    ids = st.sampled_from([1, 1, 1, 2, 7, None])
    kind = draw(st.sampled_from(["bpe", "bpe", "bpe", "spm"]))
    return Tokenizer(kind, changed, draw(ids), draw(ids), draw(flags), draw(flags))


@settings(max_examples=500)
@given(tokenizers(), tokenizers())
def test_whatever_llama_cpp_accepts_is_accepted(target: Tokenizer, draft: Tokenizer) -> None:
    """Any further pair that is accepted has the same kind and the same added tokens."""
    verdict = compare_tokenizers(target, draft)
    if llama_cpp_accepts(target, draft):
        assert verdict.usable
    elif verdict.usable:
        assert verdict.coverage >= MIN_COVERAGE
        cut = min(len(target.texts), len(draft.texts))
        same = [f"{at}".encode() for at in range(cut)]
        assert llama_cpp_accepts(replace(target, texts=same), replace(draft, texts=same))
    else:
        assert verdict.reason


@settings(max_examples=500)
@given(tokenizers(), tokenizers())
def test_shared_ids_have_the_same_text_in_both(target: Tokenizer, draft: Tokenizer) -> None:
    verdict = compare_tokenizers(target, draft)
    if not verdict.usable:
        return
    ours, theirs = list(target.texts), list(draft.texts)
    shared = set(range(verdict.common)) - set(verdict.differing)
    assert shared == {i for i in range(min(len(ours), len(theirs))) if ours[i] == theirs[i]}
    assert (verdict.note == "") == (ours == theirs)
    assert 0 <= verdict.coverage <= 1
    assert (verdict.coverage > 0.999999) == (shared == set(range(len(ours))))


def test_a_refusal_names_the_first_difference() -> None:
    for draft, message in (
        (replace(BASE, kind="spm"), "the kind of tokenizer is 'bpe' in the target and 'spm' in"),
        (
            replace(BASE, add_bos=False),
            "add_bos_token is true in the target and false in the draft",
        ),
        (replace(BASE, bos=3), "the begin token is 1 in the target and 3 in the draft"),
        (replace(BASE, add_eos=True), "add_eos_token is false in the target and true in the draft"),
        (
            replace(BASE, texts=[b"x%d" % at for at in range(1000)]),
            "token 0 is 't0' in the target and 'x0' in the draft; the draft knows 0% of",
        ),
        (
            replace(BASE, texts=texts(100)),
            "the target has 1000 tokens and the draft 100; the draft",
        ),
    ):
        assert message in compare_tokenizers(BASE, draft).reason


def test_ids_that_are_not_added_may_differ() -> None:
    """Base and instruct files may differ in these ids, since the target alone tokenizes and ends."""
    bare = replace(BASE, add_bos=False)
    assert compare_tokenizers(bare, replace(bare, bos=11, eos=9)) == compare_tokenizers(bare, bare)


def test_missing_tokens_are_weighted_by_their_use() -> None:
    """The last ids are the rarest."""
    begin, end = texts(1000), texts(1000)
    for index in range(300):
        begin[index], end[index + 700] = b"a%d" % index, b"b%d" % index
    assert compare_tokenizers(BASE, replace(BASE, texts=end)).usable
    assert not compare_tokenizers(BASE, replace(BASE, texts=begin)).usable
