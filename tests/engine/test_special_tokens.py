"""Text of a message is read as text: special tokens of a prompt come from its template alone."""

from __future__ import annotations

import atexit
import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from localspec.engine.llama import MarkedToken, Model, Vocab
from localspec.engine.prompt.prepare import Preparer
from localspec.engine.prompt.special_tokens import RenderedPrompt, SpecialTokens, is_structure
from localspec.engine.prompt.template import TemplateRenderer
from localspec.errors import InvalidRequest, TemplateFailed
from localspec.protocol.frames import ChatPrompt, Generate, Message, MixedPrompt, TextPrompt
from tests.support import templates
from tests.support.running import Running
from tests.support.vocabularies import (
    CONTROL,
    REAL,
    USER_DEFINED,
    vocabulary,
    with_tokens,
)

# What templates write that vocabularies have a token for.
_MARKER = re.compile(r"<[|｜/]?[^<>\s'\"{}+]+>|\[/?[A-Z_]{3,}\]|<[|｜][^<>|｜\s]+[|｜]>")
# A template that looks for one of these in a message writes another prompt where it is there.
_SOUGHT = re.compile(
    r"(?:split|startswith|endswith|find|index|partition|replace|strip)\(\s*['\"]([^'\"]+)"
    r"|['\"]([^'\"]+)['\"]\s*(?:not\s+)?in\b"
)


class VocabularyOnly(Model):
    """A model's file without its weights."""

    def __init__(self, path: Path) -> None:
        params = C.llama_model_default_params()
        params.vocab_only = True
        self.handle = C.llama_model_load_from_file(os.fsencode(path), params)
        assert self.handle, f"llama.cpp cannot read {path}"
        self.vocab = Vocab(self)


def markers(template: str) -> list[str]:
    """What a template may write of special tokens, in the order in which it first does."""
    return list(dict.fromkeys(_MARKER.findall(template)))


@pytest.fixture(scope="module")
def vocab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    """A vocabulary of one kind, with a token for every marker of every template if it is not a real one."""
    name, folder = request.param, tmp_path_factory.mktemp("vocabulary")
    if name.startswith("real "):
        file = REAL / f"ggml-vocab-{name.removeprefix('real ')}.gguf"
    else:
        named = markers("\n".join(map(templates.template, templates.files())))
        # As converters leave them: some are control tokens, others just may not be cut.
        added = {text: (CONTROL, USER_DEFINED)[at % 3 == 0] for at, text in enumerate(named)}
        file = with_tokens(vocabulary(name), added).write(folder / "vocabulary.gguf")
    loaded = VocabularyOnly(file)
    atexit.register(loaded.close)
    return loaded.vocab


@cache
def renderer(name: str) -> TemplateRenderer:
    made = TemplateRenderer(templates.template(name), "<s>", "</s>")
    atexit.register(made.close)
    return made


_known: dict[tuple[int, str], SpecialTokens] = {}


def special_tokens(vocab: Vocab, template: str) -> SpecialTokens:
    key = id(vocab), template
    if key not in _known:
        _known[key] = SpecialTokens(vocab, templates.template(template))
    return _known[key]


KINDS = ["qwen2", "llama-spm"]
REAL_KINDS = [f"real {name}" for name in ("qwen2", "llama-bpe", "phi-3") if REAL.is_dir()]
# Of each way to write a prompt one, where every vocabulary is tried.
SOME = ["chatml_thinking", "inst", "plain_turns", "turns_and_calls"]
CASES = [
    *((kind, template) for kind in KINDS for template in sorted(templates.files())),
    *((kind, template) for kind in REAL_KINDS for template in SOME),
]
WORDS = (
    "hello",
    "Ünïcode ☃",
    " ",
    "\n\n",
    "a < b",
    "x[0]",
    "end",
    "|",
    "<",
    ">",
    "</",
    "im_",
    "<|",
    "|>",
)


@st.composite
def texts(draw: st.DrawFn, spellings: list[str]) -> str:
    """Words, spellings of special tokens, and halves of these."""
    pieces = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    found = []
    for kind in pieces:
        spelling = draw(st.sampled_from(spellings))
        cut = draw(st.integers(0, len(spelling)))
        word = draw(st.sampled_from(WORDS))
        found.append((word, spelling, spelling[:cut], spelling[cut:])[kind])
    return "x" + "".join(found)


@st.composite
def chats(draw: st.DrawFn, spellings: list[str]) -> dict[str, Any]:
    """A chat as JSON, whose texts of every kind may spell special tokens."""
    text = texts(spellings)
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(text)})
    for _ in range(draw(st.integers(0, 2))):
        messages.append({"role": "user", "content": draw(text)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(text), "extra": {}}
        if draw(st.booleans()):
            answer["extra"]["reasoning_content"] = draw(text)
        messages.append(answer)
        if draw(st.booleans()):
            function = {"name": draw(text), "arguments": {draw(text): draw(text)}}
            call = {"id": "call00001", "type": "function", "function": function}
            answer["extra"]["tool_calls"] = [call]
            more = {"tool_call_id": "call00001", "name": "look"}
            messages.append({"role": "tool", "content": draw(text), "extra": more})
            messages.append({"role": "assistant", "content": draw(text)})
    messages.append({"role": "user", "content": draw(text)})
    tools = []
    if draw(st.booleans()):
        properties = {draw(text): {"type": "string", "description": draw(text)}}
        function = {
            "name": "look",
            "description": draw(text),
            "parameters": {"type": "object", "properties": properties},
        }
        tools = [{"type": "function", "function": function}]
    return {"messages": messages, "tools": tools}


def prompt_of(chat: dict[str, Any]) -> ChatPrompt:
    messages = [Message(m["role"], m["content"], m.get("extra", {})) for m in chat["messages"]]
    return ChatPrompt(messages, tools=chat["tools"] or None)


def rendered_tokens(vocab: Vocab, template: str, chat: dict[str, Any]) -> tuple[str, list[int]]:
    """The text and the tokens of a chat's prompt."""
    special = special_tokens(vocab, template)
    renderer(template).watch(special.spellings)
    prompt = renderer(template).rendered(prompt_of(chat))
    return prompt.text, special.tokenize(prompt)


def structure(vocab: Vocab, template: str, tokens: list[int]) -> list[str]:
    known = special_tokens(vocab, template)
    return [text for token in tokens if (text := vocab.text(token)) in known]


def neutral(chat: dict[str, Any], spellings: list[str]) -> dict[str, Any]:
    """The same chat with letters in place of every spelling of a special token."""
    found = json.dumps(chat)
    for spelling in sorted(spellings, key=len, reverse=True):
        found = found.replace(json.dumps(spelling)[1:-1], "q" * len(spelling))
    result: dict[str, Any] = json.loads(found)
    return result


@pytest.mark.parametrize(("vocab", "template"), CASES, indirect=["vocab"], scope="module")
def test_no_text_of_a_chat_makes_a_special_token(template: str, vocab: Vocab) -> None:
    found = (text for pair in _SOUGHT.findall(templates.template(template)) for text in pair)
    sought = {text for text in found if re.search(r"[<>|\]]", text)}
    every = special_tokens(vocab, template).spellings
    first = [text for text in every if text in templates.template(template)] + every[:8]
    drawn = [text for text in first if not any(each in text or text in each for each in sought)]

    @settings(max_examples=5)
    @given(chats(drawn))
    def check(chat: dict[str, Any]) -> None:
        said = json.dumps(chat, ensure_ascii=False)
        assume(not any(each in said for each in sought))
        try:
            letters = rendered_tokens(vocab, template, neutral(chat, every))[1]
        except (InvalidRequest, TemplateFailed):
            return  # it has no place for such a chat
        text, tokens = rendered_tokens(vocab, template, chat)
        assert structure(vocab, template, tokens) == structure(vocab, template, letters)
        if vocab.kind == C.LLAMA_VOCAB_TYPE_BPE:
            pieces = b"".join(vocab.piece(token, special=True) for token in tokens)
            bos = vocab.piece(vocab.bos, special=True) if vocab.add_bos else b""
            assert pieces.removeprefix(bos).decode() == text

    check()


@pytest.mark.parametrize("vocab", KINDS + REAL_KINDS, indirect=True, scope="module")
@pytest.mark.parametrize("template", SOME)
def test_a_chat_without_special_tokens_is_read_as_llama_cpp_reads_it(
    template: str, vocab: Vocab
) -> None:
    special = special_tokens(vocab, template)
    renderer(template).watch(special.spellings)

    @settings(max_examples=20)
    @given(st.lists(st.text("ab1 .<>|[]_/\n\t é☃語", max_size=20), min_size=1, max_size=3))
    def check(said: list[str]) -> None:
        messages = []
        for text in said:
            messages += [Message("user", f"{text}?"), Message("assistant", f"so {text}")]
        prompt = ChatPrompt([*messages, Message("user", "last")])
        if any(special.spans_in(message.content or "") for message in messages):
            return
        text = renderer(template).render(prompt)
        whole = vocab.tokenize(text, add_special=True, parse_special=True)
        assert special.tokenize(renderer(template).rendered(prompt)) == whole
        # the same where the template's own are told apart, one run of text after the other
        apart = RenderedPrompt(text, special.spans_in(text))
        assert special.tokenize(apart) == whole

    check()


def test_templates_that_take_text_apart_and_put_it_together_make_no_special_token() -> None:
    """What no template here does, another one may: each of these once put a turn together."""
    special = ["<|im_start|>", "<|im_end|>", "<|user|>", "<think>", "</think>"]
    joins = (
        "{{ m.content.replace('!', '') }}",
        "{{ m.content | replace('!', '') }}",
        "{{ m.content.split('!') | join }}",
        "{{ ''.join(m.content.split('!')) }}",
        "{{ '%s%s' % (m.content.split('!')[0], m.content.split('!')[1]) }}",
        "{{ '{}'.format(m.content.replace('!', '')) }}",
        "{{ m.content.partition('!')[0] + m.content.partition('!')[2] }}",
        "{% set ns = namespace(s='') %}{% for c in m.content if c != '!' %}{% set ns.s = ns.s + c %}"
        "{% endfor %}{{ ns.s }}",
        "{% macro f(x) %}{{ x.split('!')[0] }}{{ x.split('!')[1] }}{% endmacro %}{{ f(m.content) }}",
        "{% set s %}{{ m.content | replace('!', '') }}{% endset %}{{ s | trim }}",
        "{{ m.content.replace('!', '').upper().lower() }}",
    )
    for how in joins:
        template = (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}" + how + "<|im_end|>\n"
            "{% endfor %}{{ '<' ~ '|' + messages[0].role + '|' ~ '>' }}"
        )
        made = TemplateRenderer(template, "", "")
        made.watch(special)
        try:
            prompt = made.rendered(ChatPrompt([Message("user", "<|im_end!|>")]))
            assert prompt.text == "<|im_start|>user\n<|im_end|><|im_end|>\n<|user|>", how
            assert prompt.special is not None, how
            own = [prompt.text[start:end] for start, end in prompt.special]
            assert own == ["<|im_start|>", "<|im_end|>", "<|user|>"], how
            assert prompt.special[1][0] > prompt.text.index("<|im_end|>"), how
        finally:
            made.close()


@pytest.mark.parametrize(
    "way",
    [
        "{{ '<|im_end|>' }}",
        "{% set end = '<|im_end|>' %}{{ end }}",
        "{{ '<|%s|>' % 'im_end' }}",
        "{{ '<|{}|>'.format('im_end') }}",
        "{{ ['<|', 'im_end', '|>'] | join }}",
        "{{ '<|' ~ 'im_end' ~ '|>' }}",
        "{% macro f() %}<|im_end|>{% endmacro %}{{ f() }}",
        "{% set s %}<|im_end|>{% endset %}{{ s | trim }}",
        "{{ ('  <|im_end|> ' + messages[0].content[:0]).strip() }}",
        "{{ '<|im_END|>' | lower }}",
        "{% filter trim %} <|im_end|>{% endfilter %}",
        "{{ messages[0].content[:0] + eos_token }}",
        "{{ messages[0].content.replace(messages[0].content, '<|im_end|>') }}",
        "{{ {'user': '<|im_end|>'}[messages[0].role] }}",
    ],
)
def test_a_special_token_that_a_template_writes_is_one_however_it_is_made(way: str) -> None:
    made = TemplateRenderer("{{ messages[0].content }}: " + way, "", "<|im_end|>")
    made.watch(["<|im_start|>", "<|im_end|>"])
    try:
        prompt = made.rendered(ChatPrompt([Message("user", "a <|im_start|>")]))
    finally:
        made.close()
    assert prompt.text == "a <|im_start|>: <|im_end|>"
    assert prompt.special == [(16, 26)]


def test_lone_surrogates_of_a_message_are_no_marks() -> None:
    made = TemplateRenderer("{% for m in messages %}{{ m.content }}<s>{% endfor %}", "", "")
    made.watch(["<s>"])
    try:
        prompt = made.rendered(ChatPrompt([Message("user", "\ud800\ud801\ud802")]))
    finally:
        made.close()
    assert prompt.special is None  # and the tokenizer refuses the text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_call>", True),
        ("[PAD151669]", True),
        ("<|im_start|>", True),
        ("|||IP_ADDRESS|||", True),
        ('<|"|>', True),  # the template has it
        ("<h1>", False),
        ("</table>", False),
        ("<code>", True),  # the template has it
        ("    ", False),
        ("\n\n", False),
        ("ø", False),
        ("->", False),
    ],
)
def test_user_defined_tokens_that_mark_structure(text: str, expected: bool) -> None:
    assert is_structure(text, """{{ '<|"|>' }}<code>""") is expected


def test_a_prefill_is_text_but_for_the_thoughts_that_it_begins_with(cycle: Running) -> None:
    template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    made = TemplateRenderer(template, "<s>", "</s>")
    special = SpecialTokens(cycle.pair.vocab, template)
    for text in ("<think>", "</think>", "<s>", "</s>"):
        special._tokens[text] = MarkedToken(7, text, False, False, False)
    special.spellings = [*special._tokens]
    preparer = Preparer(cycle.pair, made, special=special)

    def own(prefix: str) -> list[str]:
        messages = [Message("user", "a</s>"), Message("assistant", prefix)]
        asked = ChatPrompt(messages, answer_prefix=prefix, continued="content")
        prompt = preparer.rendered(asked)
        assert prompt.text == f"<s>a</s></s><s>{prefix}"
        assert prompt.special is not None
        return [prompt.text[start:end] for start, end in prompt.special]

    try:
        turns = ["<s>", "</s>", "<s>"]
        assert own("b</s><s>c") == turns
        assert own("b<think>c</think>") == turns
        assert own("<think>\nb</s>") == [*turns, "<think>"]
        assert own(" <think>b</think></s><think>") == [*turns, "<think>", "</think>"]
    finally:
        made.close()


def test_a_second_bos_token_is_read_and_named(cycle: Running) -> None:
    vocab = cycle.pair.vocab
    bos = vocab.text(vocab.bos)
    assert vocab.add_bos
    for prompt in (TextPrompt(f"{bos}a"), MixedPrompt([f"{bos}a", 3])):
        prepared = cycle.preparer.prepare(Generate(1, prompt))
        assert prepared.tokens[:2] == [vocab.bos] * 2
        assert f"two BOS tokens: its own '{bos}'" in prepared.note
    for prompt in (TextPrompt("a"), TextPrompt(f"{bos}a", special=False)):
        assert not cycle.preparer.prepare(Generate(1, prompt)).note
