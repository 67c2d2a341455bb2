"""Verify and commit, for one sequence of a pass: keep what the target agrees with, and learn from it."""

from __future__ import annotations

from localspec.engine.llama import Context, Vocab
from localspec.engine.pair.lane import Lane
from localspec.engine.sampling import sampler
from localspec.engine.sampling.sampler import Logits
from localspec.engine.speculation.controller import SequenceStep
from localspec.engine.speculation.drafters.ngram import length_bucket
from localspec.engine.speculation.verify import verify_chosen, verify_match, verify_rejection
from localspec.protocol.frames import Delta, TokenLogprob


def commit(lane: Lane, turn: SequenceStep, vocab: Vocab) -> Delta | None:
    """Keep what the target agrees with, and roll both memories back to it; the text to show, if any.

    The logits of the turn's pass are still there. Whatever is raised is this sequence's trouble: what
    its slot holds beyond `n_past` tokens is unknown then, and no other sequence was touched.
    """
    gen, slot = turn.gen, turn.gen.slot
    if turn.first_row < 0:
        lane.slots.prefilled(slot, len(turn.read))
        return None
    if gen.limit <= 0:  # the prompt was only to be read
        lane.slots.prefilled(slot, len(turn.read))
        gen.wrote(0, lane.began)
        gen.finish = "length"
        return None
    try:
        kept, raw = _verify(lane, turn)
    except _Doubtful:  # the same pass once more, now with logits
        gen.chosen_on_device = lane.context.choose_on_device(slot.id, False)
        lane.slots.commit(slot, 0)
        return None
    gen.round_over()
    logprobs: list[TokenLogprob] = []
    if gen.request.top_logprobs is not None:
        logprobs = [
            sampler.logprob(raw[i], token, gen.request.top_logprobs, vocab.piece)
            for i, token in enumerate(kept)
        ]
    _observe(turn, kept)
    count, delta = gen.keep(kept, len(kept) - 1, logprobs, lane.began)
    # Accepted drafts are in the target's KV already; its own last token is not.
    lane.slots.commit(slot, len(turn.read) + min(count, len(kept) - 1))
    gen.tally.produced += count
    return delta


def _verify(lane: Lane, turn: SequenceStep) -> tuple[list[int], dict[int, Logits]]:
    """The tokens to keep, and the target's own rows that were looked at."""
    gen, slot = turn.gen, turn.gen.slot
    raw: dict[int, Logits] = {}

    def rows(i: int, kept: list[int]) -> Logits:
        row = lane.context.finite(turn.first_row + i)
        raw[i] = row
        mask = None
        if gen.matcher is not None:
            gen.consume(kept)
            mask = gen.matcher.mask()
        history = slot.tokens + list(kept) if gen.sampler.settings.penalised else slot.tokens
        return gen.sampler.adjusted(row, history, mask)

    if gen.chosen_on_device:
        kept = verify_chosen(lambda i: _chosen(lane.context, turn.first_row + i), turn.drafted)
    elif turn.probs:
        kept = verify_rejection(rows, turn.drafted, turn.probs, gen.sampler, gen.generated)
    else:
        kept = verify_match(rows, turn.drafted, gen.sampler, gen.generated)
    gen.consume(kept)
    return kept, raw


class _Doubtful(Exception):
    """A token chosen on the device may come from logits that are no numbers."""


def _chosen(context: Context, row: int) -> int:
    """The token chosen on the device, unless it is what a search for the highest NaN ends with."""
    token = context.chosen(row)
    if token == 0:
        raise _Doubtful
    return token


def _observe(turn: SequenceStep, kept: list[int]) -> None:
    """Teach the beliefs: each verified draft up to the first rejection, and lookup for free."""
    gen = turn.gen
    accepted = len(kept) - 1
    if len(turn.read) == 1:  # else it was mostly there to read a prompt
        gen.tally.depths[len(turn.drafted)] += 1
        gen.tally.accepts[accepted] += 1
    if turn.drafted and turn.kind is not None:
        for at in range(min(accepted + 1, len(turn.drafted))):
            gen.beliefs[turn.kind].observe(turn.buckets[at], at < accepted)
        tally = gen.tally
        tally.drafted += len(turn.drafted)
        tally.accepted += accepted
        tally.kinds[turn.kind] = tally.kinds.get(turn.kind, 0) + len(turn.drafted)
        if turn.kind == "ngram" and gen.request.speculative.prediction is not None:
            tally.predicted_accepted += accepted
            tally.predicted_rejected += len(turn.drafted) - accepted
    elif "draft" in gen.beliefs:
        gen.beliefs["draft"].fade(len(kept))
    if turn.looked_up and turn.kind != "ngram":
        at = length_bucket(turn.match)
        for guess, token in zip(turn.looked_up, kept, strict=False):
            gen.beliefs["ngram"].observe(at, guess == token)
            if guess != token:
                break
