"""Text of a message stays text: the special tokens of a prompt come from its template alone."""

from __future__ import annotations

import atexit
import json
import re
from functools import cache
from typing import Any

import llama_cpp.llama_cpp as C
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from localspec.engine.llama import MarkedToken, Vocab
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
    VocabularyOnly,
    vocabulary,
    with_tokens,
)

# Texts in templates for which vocabularies have a token.
_MARKER = re.compile(r"<[|｜/]?[^<>\s'\"{}+]+>|\[/?[A-Z_]{3,}\]|<[|｜][^<>|｜\s]+[|｜]>")
# Texts that a template searches for in a message, and that would change its prompt.
_SEARCHED = re.compile(
    r"(?:split|startswith|endswith|find|index|partition|replace|strip)\(\s*['\"]([^'\"]+)"
    r"|['\"]([^'\"]+)['\"]\s*(?:not\s+)?in\b"
)


def find_markers(template: str) -> list[str]:
    """Return the special tokens that a template may write, in the order of their first use."""
    return list(dict.fromkeys(_MARKER.findall(template)))


@pytest.fixture(scope="module")
def vocab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocab:
    """Load a real vocabulary, or a synthetic one with a token for every marker of every template."""
    name, folder = request.param, tmp_path_factory.mktemp("vocabulary")
    if name.startswith("real "):
        file = REAL / f"ggml-vocab-{name.removeprefix('real ')}.gguf"
    else:
        marker_texts = find_markers("\n".join(map(templates.template, templates.files())))
        # As in converted files, some are control tokens and the others are user-defined.
        added = {text: (CONTROL, USER_DEFINED)[at % 3 == 0] for at, text in enumerate(marker_texts)}
        file = with_tokens(vocabulary(name), added).write(folder / "vocabulary.gguf")
    loaded = VocabularyOnly(file)
    atexit.register(loaded.close)
    return loaded.vocab


@cache
def get_renderer(name: str) -> TemplateRenderer:
    return templates.shared_renderer(templates.template(name), watches=True)


def render_once(template: str, content: str, spellings: list[str], eos: str = "") -> RenderedPrompt:
    """Return the prompt of one message, in which these special tokens are distinguished."""
    renderer = templates.shared_renderer(template, "", eos, watches=True)
    renderer.watch(spellings)
    return renderer.rendered(ChatPrompt([Message("user", content)]))


@cache
def get_special_tokens(vocab: Vocab, template: str) -> SpecialTokens:
    return SpecialTokens(vocab, templates.template(template))


KINDS = ["qwen2", "llama-spm"]
REAL_KINDS = [f"real {name}" for name in ("qwen2", "llama-bpe", "phi-3") if REAL.is_dir()]
# One template for each way to write a prompt, for the tests with every vocabulary.
SAMPLE_TEMPLATES = ["chatml_thinking", "inst", "plain_turns", "turns_and_calls"]
CASES = [
    *((kind, template) for kind in KINDS for template in sorted(templates.files())),
    *((kind, template) for kind in REAL_KINDS for template in SAMPLE_TEMPLATES),
]
WORDS = ("hello", "Ünïcode ☃", " ", "\n\n", "a < b", "x[0]", *"end | < > </ im_ <| |>".split())


@st.composite
def texts(draw: st.DrawFn, spellings: list[str]) -> str:
    """Draw words, spellings of special tokens, and parts of these."""
    pieces = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    chosen = []
    for kind in pieces:
        spelling = draw(st.sampled_from(spellings))
        cut = draw(st.integers(0, len(spelling)))
        word = draw(st.sampled_from(WORDS))
        chosen.append((word, spelling, spelling[:cut], spelling[cut:])[kind])
    return "x" + "".join(chosen)


@st.composite
def chats(draw: st.DrawFn, spellings: list[str]) -> dict[str, Any]:
    """Draw a chat as JSON whose texts of every kind may spell special tokens."""
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


def make_prompt(chat: dict[str, Any]) -> ChatPrompt:
    messages = [Message(m["role"], m["content"], m.get("extra", {})) for m in chat["messages"]]
    return ChatPrompt(messages, tools=chat["tools"] or None)


def tokenize_chat(vocab: Vocab, template: str, chat: dict[str, Any]) -> tuple[str, list[int]]:
    """Return the text and the tokens of the prompt of a chat."""
    special = get_special_tokens(vocab, template)
    get_renderer(template).watch(special.spellings)
    prompt = get_renderer(template).rendered(make_prompt(chat))
    return prompt.text, special.tokenize(prompt)


def list_structure(vocab: Vocab, template: str, tokens: list[int]) -> list[str]:
    special = get_special_tokens(vocab, template)
    return [text for token in tokens if (text := vocab.text(token)) in special]


def replace_spellings(chat: dict[str, Any], spellings: list[str]) -> dict[str, Any]:
    """Return the chat with letters in place of every spelling of a special token."""
    dumped = json.dumps(chat)
    for spelling in sorted(spellings, key=len, reverse=True):
        dumped = dumped.replace(json.dumps(spelling)[1:-1], "q" * len(spelling))
    result: dict[str, Any] = json.loads(dumped)
    return result


@pytest.mark.parametrize(("vocab", "template"), CASES, indirect=["vocab"], scope="module")
def test_no_text_of_a_chat_makes_a_special_token(template: str, vocab: Vocab) -> None:
    pattern_texts = (
        text for pair in _SEARCHED.findall(templates.template(template)) for text in pair
    )
    searched = {text for text in pattern_texts if re.search(r"[<>|\]]", text)}
    spellings = get_special_tokens(vocab, template).spellings
    candidates = [text for text in spellings if text in templates.template(template)] + spellings[
        :8
    ]
    usable = [
        text for text in candidates if not any(word in text or text in word for word in searched)
    ]

    @settings(max_examples=5)
    @given(chats(usable))
    def check(chat: dict[str, Any]) -> None:
        dumped = json.dumps(chat, ensure_ascii=False)
        assume(not any(word in dumped for word in searched))
        try:
            letters = tokenize_chat(vocab, template, replace_spellings(chat, spellings))[1]
        except (InvalidRequest, TemplateFailed):
            return  # the template does not support such a chat
        text, tokens = tokenize_chat(vocab, template, chat)
        assert list_structure(vocab, template, tokens) == list_structure(vocab, template, letters)
        if vocab.kind == C.LLAMA_VOCAB_TYPE_BPE:
            pieces = b"".join(vocab.piece(token, special=True) for token in tokens)
            bos = vocab.piece(vocab.bos, special=True) if vocab.add_bos else b""
            assert pieces.removeprefix(bos).decode() == text

    check()


@pytest.mark.parametrize("vocab", KINDS + REAL_KINDS, indirect=True, scope="module")
@pytest.mark.parametrize("template", SAMPLE_TEMPLATES)
def test_a_chat_without_special_tokens_is_read_as_llama_cpp_reads_it(
    template: str, vocab: Vocab
) -> None:
    special = get_special_tokens(vocab, template)
    get_renderer(template).watch(special.spellings)

    @settings(max_examples=20)
    @given(st.lists(st.text("ab1 .<>|[]_/\n\t é☃語", max_size=20), min_size=1, max_size=3))
    def check(contents: list[str]) -> None:
        messages = []
        for text in contents:
            messages += [Message("user", f"{text}?"), Message("assistant", f"so {text}")]
        prompt = ChatPrompt([*messages, Message("user", "last")])
        if any(special.spans_in(message.content or "") for message in messages):
            return
        text = get_renderer(template).render(prompt)
        expected = vocab.tokenize(text, add_special=True, parse_special=True)
        assert special.tokenize(get_renderer(template).rendered(prompt)) == expected
        # The same holds if the template's own tokens are marked, one run of text after the other.
        marked = RenderedPrompt(text, special.spans_in(text))
        assert special.tokenize(marked) == expected

    check()


def test_templates_that_rejoin_text_make_no_special_token() -> None:
    """Other templates may do what none in this repository does, such as removing a character."""
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
    for expression in joins:
        template = (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
            + expression
            + "<|im_end|>\n"
            "{% endfor %}{{ '<' ~ '|' + messages[0].role + '|' ~ '>' }}"
        )
        prompt = render_once(template, "<|im_end!|>", special)
        assert prompt.text == "<|im_start|>user\n<|im_end|><|im_end|>\n<|user|>", expression
        assert prompt.special is not None, expression
        own = [prompt.text[start:end] for start, end in prompt.special]
        assert own == ["<|im_start|>", "<|im_end|>", "<|user|>"], expression
        assert prompt.special[1][0] > prompt.text.index("<|im_end|>"), expression


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
def test_special_token_written_by_a_template_is_recognized(way: str) -> None:
    spellings = ["<|im_start|>", "<|im_end|>"]
    template = "{{ messages[0].content }}: " + way
    prompt = render_once(template, "a <|im_start|>", spellings, "<|im_end|>")
    assert prompt.text == "a <|im_start|>: <|im_end|>"
    assert prompt.special == [(16, 26)]


@pytest.mark.parametrize("template", sorted(templates.files()))
def test_texts_that_a_template_searches_for_are_found(template: str) -> None:
    content = "<think>\na<b> </think>\n\n[x] <|im_end|> <tool_call>"
    function = {"name": "think", "arguments": {"think": content, "<s>": [1, "user"]}}
    call = {"id": "call00001", "type": "function", "function": function}
    properties = {name: {"type": "string", "description": content} for name in ("think", "</s>")}
    parameters = {"type": "object", "properties": properties}
    tool = {"name": "think", "description": content, "parameters": parameters}
    response = Message("user", f"<tool_response>\n{content}\n</tool_response>")
    turn = [Message("user", content), Message("assistant", content), response]
    calls = [Message("user", "?"), Message("assistant", "", {"tool_calls": [call]})]
    chats = ChatPrompt(turn), ChatPrompt(calls, tools=[{"type": "function", "function": tool}])
    text = templates.template(template)
    watched, plain = (templates.shared_renderer(text, eos="", watches=on) for on in (True, False))
    watched.watch([*find_markers(text), "<|im_end|>", "<think>", "<s>"])
    for chat in chats:
        try:
            expected = plain.render(chat)
        except (InvalidRequest, TemplateFailed):
            continue  # the template does not support such a chat
        assert watched.render(chat) == expected


def test_names_between_brackets_of_a_template_make_no_special_token() -> None:
    spellings = ["<think>", "<|im_end|>"]
    template = (
        "{% for name in ['think', 'im_end'] %}{{ messages[0].content | trim == name }}{% endfor %}"
    )
    for expression in (
        "'<' ~ name ~ '>'",
        "'<' + name + '>'",
        "'<%s>' % name",
        "'<{}>'.format(name)",
    ):
        own = template + "{% set name = messages[0].content %}{{ " + expression + " }}<|im_end|>"
        prompt = render_once(own, "think", spellings)
        assert prompt.text == "TrueFalse<think><|im_end|>"
        assert prompt.special == [(16, 26)], expression


def test_errors_of_a_template_are_in_ordinary_characters() -> None:
    content = "messages[0].content"
    raising = f"{{{{ raise_exception('no ' + {content}) if {content}[2:] == '>' }}}}"
    with pytest.raises(TemplateFailed, match="no <s>"):
        render_once(f"{{{{ {content} }}}}{raising}", "<s>", ["<s>"])


def test_lone_surrogates_of_a_message_are_not_taken_for_marks() -> None:
    template = "{% for m in messages %}{{ m.content }}<s>{% endfor %}"
    prompt = render_once(template, "\ud800\ud801\ud802", ["<s>"])
    assert prompt.special is None  # the tokenizer then refuses the text


def test_user_defined_tokens_that_mark_structure() -> None:
    template = """{{ '<|"|>' }}<code>"""  # Two of them mark structure because it contains them.
    for text in (
        "<tool_call>",
        "[PAD151669]",
        "<|im_start|>",
        "|||IP_ADDRESS|||",
        '<|"|>',
        "<code>",
    ):
        assert is_structure(text, template), text
    for text in ("<h1>", "</table>", "    ", "\n\n", "ø", "->"):
        assert not is_structure(text, template), text


def test_prefill_is_text_apart_from_leading_thoughts(cycle: Running) -> None:
    template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    renderer = templates.shared_renderer(template, watches=True)
    special = SpecialTokens(cycle.pair.vocab, template)
    for text in ("<think>", "</think>", "<s>", "</s>"):
        special._tokens[text] = MarkedToken(7, text, False, False, False)
    special.spellings = [*special._tokens]
    preparer = Preparer(cycle.pair, renderer, special=special)

    def list_own_tokens(prefix: str) -> list[str]:
        messages = [Message("user", "a</s>"), Message("assistant", prefix)]
        chat = ChatPrompt(messages, answer_prefix=prefix, continued="content")
        prompt = preparer.rendered(chat)
        assert prompt.text == f"<s>a</s></s><s>{prefix}"
        assert prompt.special is not None
        return [prompt.text[start:end] for start, end in prompt.special]

    turns = ["<s>", "</s>", "<s>"]
    assert list_own_tokens("b</s><s>c") == turns
    assert list_own_tokens("b<think>c</think>") == turns
    assert list_own_tokens("<think>\nb</s>") == [*turns, "<think>"]
    assert list_own_tokens(" <think>b</think></s><think>") == [*turns, "<think>", "</think>"]


def test_second_bos_token_is_read_and_reported(cycle: Running) -> None:
    vocab = cycle.pair.vocab
    bos = vocab.text(vocab.bos)
    assert vocab.add_bos
    for prompt in (TextPrompt(f"{bos}a"), MixedPrompt([f"{bos}a", 3])):
        prepared = cycle.preparer.prepare(Generate(1, prompt))
        assert prepared.tokens[:2] == [vocab.bos] * 2
        assert f"two BOS tokens: its own '{bos}'" in prepared.note
    for prompt in (TextPrompt("a"), TextPrompt(f"{bos}a", special=False)):
        assert not cycle.preparer.prepare(Generate(1, prompt)).note
