"""Fill-in-the-middle: what stands around an editor's cursor, as tokens for models trained on such texts."""

from __future__ import annotations

from collections.abc import Callable

from localspec.engine.llama import Vocab
from localspec.errors import InvalidRequest
from localspec.protocol.frames import InfillPrompt

DEFAULT_PREDICT = 128  # tokens kept free for an infill where the request does not say
_SNIPPET = "\n\n--- snippet ---\n\n"


def infill_tokens(vocab: Vocab, prompt: InfillPrompt, n_ctx: int) -> list[int]:
    """[repository context] [BOS] <prefix> prefix prompt <suffix> suffix <middle>.

    The repository context comes first, so that it stays in the prefix cache while somebody types.
    Text near the cursor matters most: what does not fit into the context is cut from the far ends of
    prefix and suffix (three quarters to the prefix), then from the repository context's beginning.

    Raises:
        InvalidRequest: the model has no fill-in-the-middle tokens.
    """
    fim = vocab.fim
    if min(fim.prefix, fim.suffix, fim.middle) < 0:
        raise InvalidRequest("This model has no fill-in-the-middle tokens.", param="input_prefix")

    def plain(text: str) -> list[int]:
        return vocab.tokenize(text, add_special=False, parse_special=False)

    room = n_ctx - (prompt.n_predict or DEFAULT_PREDICT) - 8
    line = plain(prompt.prompt)[-max(room // 4, 1) :]
    room -= len(line)
    prefix, suffix = plain(prompt.prefix), plain(prompt.suffix)
    prefix_room = max(room * 3 // 4, room - len(suffix))
    prefix = prefix[-prefix_room:] if prefix_room > 0 else []
    suffix = suffix[: max(room - len(prefix), 0)]
    room -= len(prefix) + len(suffix)
    extra = _repository(vocab, prompt, plain)[-room:] if room > 0 else []
    bos = [vocab.bos] if vocab.add_bos and vocab.bos >= 0 else []
    return [*extra, *bos, fim.prefix, *prefix, *line, fim.suffix, *suffix, fim.middle]


def _repository(vocab: Vocab, prompt: InfillPrompt, plain: Callable[[str], list[int]]) -> list[int]:
    """Other files: <repo> name, then <sep> file name and text for each; plain text without such tokens."""
    fim = vocab.fim
    tokens: list[int] = []
    if fim.repo >= 0:
        tokens += [fim.repo, *plain("myproject\n")]
    for name, text in prompt.extra:
        if fim.separator >= 0:
            tokens += [fim.separator, *plain(f"{name}\n"), *plain(text)]
        else:
            tokens += [*plain(_SNIPPET), *plain(text)]
    if fim.separator >= 0:
        tokens += [fim.separator, *plain("filename\n")]
    return tokens
