"""GBNF: accepted and refused grammars, and long lexemes that change no language."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits

from localspec.engine.llama.vocab import Vocab
from localspec.engine.sampling.grammars.compile import Grammars
from localspec.engine.sampling.grammars.gbnf import (
    MAX_DEPTH,
    MAX_QUANTIFIERS,
    Characters,
    GrammarSyntaxError,
    TokenTable,
    parse_gbnf,
)
from localspec.engine.sampling.grammars.lexemes import gbnf_to_lark
from localspec.errors import GrammarRejected
from localspec.protocol.frames import Constraint
from tests.support.gbnf_random import PIECES
from tests.support.llama_grammars import VocabularyFile
from tests.support.vocabularies import small_vocabulary, vocabulary

SHIPPED = Path(__file__).parent / "grammars"
MARKS = ["<think>", "</think>"]


class Language:
    """A vocabulary, and what grammars allow in it."""

    def __init__(self, vocab: Vocab, *, isolated: bool = False) -> None:
        self.vocab = vocab
        self._grammars = Grammars(vocab, isolated=isolated)

    def close(self) -> None:
        self._grammars.close()

    def contains(self, source: str, text: str) -> bool:
        """Return whether a text is in the language of a grammar; its markers are tokens."""
        matcher = self._grammars.compile(Constraint("grammar", source))
        for token in self.vocab.tokenize(text, add_special=False, parse_special=True):
            if matcher.ended or matcher.count_valid([token]) < 1:
                return False
            matcher.consume(token)
        return matcher.ended or bool(matcher.mask()[self.vocab.eos])


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Language:
    path = small_vocabulary(PIECES, MARKS).write(tmp_path_factory.mktemp("gbnf") / "vocab.gguf")
    file = VocabularyFile(path)
    return Language(file.vocab())


# A grammar, texts in its language, and texts that are not.
LANGUAGES: list[tuple[str, list[str], list[str]]] = [
    # escapes
    (r'root ::= "\u0628ab"', ["بab"], ["把b"]),
    (r'root ::= "\u0e01f"', ["กf"], ["\ue01f"]),
    (r'root ::= "caf\u00e9 bar"', ["café bar"], ["cafe bar"]),
    (r"root ::= [\u0400-\u04FF]+", ["Привет"], ["a", ""]),
    (r"root ::= [\u00e0-\u00ff]", ["é", "ÿ"], ["e", "Ā"]),
    (r"root ::= [\u0041-\u005a]", ["A", "Z"], ["a", "@"]),
    (r'root ::= [^"\\\u0000-\u001F]+', ["a b", "é🦊", "\x7f"], ["\n", '"', "\\", "\x1f"]),
    (r'root ::= "\U0001F98A"', ["🦊"], ["🦋"]),
    (r"root ::= [\U0001F600-\U0001F64F]{2}", ["😀🙏"], ["😀"]),
    (r"root ::= [\u3040-\u309F] | [\x41]", ["あ", "A"], ["ア", "B"]),
    (r'root ::= "\t\r\n\\\"\[\]\-\x5e"', ['\t\r\n\\"[]-^'], ["a"]),
    (r"root ::= [\-a]+", ["-a"], ["b", "\\"]),
    (r"root ::= [a\-c]", ["a", "-", "c"], ["b"]),
    (r"root ::= [\--/]", ["-", ".", "/"], ["a", "\\"]),
    # groups with quantifiers that have quantifiers
    ('root ::= ([0-9]+)? "b"', ["b", "1b", "12b"], ["", "1", "bb"]),
    ('root ::= ("a"+)? "b"', ["b", "aab"], ["a", "abb"]),
    ('root ::= (digit+)* "x"\ndigit ::= [0-9]', ["x", "12x"], ["1", "ax"]),
    ('root ::= ("a"?)+ "b"', ["b", "ab", "aaab"], ["a"]),
    ('root ::= ("a"{2}){2}', ["aaaa"], ["aa", "aaa", "aaaaa"]),
    ('root ::= (("a" "b")?)+ "c"', ["c", "abc", "ababc"], ["ac", "abac"]),
    ('root ::= "ab"{2,3}{2}', ["ab" * 4, "ab" * 5, "ab" * 6], ["ab" * 3, "ab" * 7]),
    ('root ::= "a"{2,}? "b"', ["b", "aab", "aaab"], ["ab"]),
    # classes
    ("root ::= [a-]+", ["a-"], ["b"]),
    ("root ::= [a-c-e]+", ["abc-e"], ["d"]),
    ("root ::= [^a-c]", ["d", "\n", "🦊"], ["b", "", "dd"]),
    ("root ::= [^]", [""], ["a"]),
    ('root ::= [] "a"', ["a"], [""]),
    ("root ::= [^z-a]", ["b", "z", "\n"], ["", "bb"]),
    ("root ::= [[]", ["["], ["]"]),
    ("root ::= .", ["a", "\n", "é", "🦊"], ["", "ab"]),
    # alternatives, newlines and comments
    ('root ::= | "a" |', ["", "a"], ["aa"]),
    ("root ::=", [""], ["a"]),
    ('root ::= "a" |\n "b" # end\n', ["a", "b"], ["", "ab"]),
    ('root ::= (\n"a" # one\n\n | # two\n"b"\n* )\r\n', ["a", "", "bb"], ["ab"]),
    ('\r\n# c\r\nroot ::= x "b"\r\nx ::= "a"\r', ["ab"], ["a"]),
    ('root ::= "#" # "b"', ["#"], ["#b"]),
    ('root::="a"x\nx::="b"', ["ab"], ["a"]),
    ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
    ('root ::= "a\nb"', ["a\nb"], ["ab"]),
    # characters instead of lexemes
    ('root ::= [a-z]+ "ab"', ["aab", "abab", "zab"], ["ab", "aba", "ab ab"]),
    ('root ::= "(" root ")" | [a-z]+ "ab"', ["(zab)", "abab"], ["(ab)", "(zab"]),
    ("root ::= ws word ws\nws ::= [ b]*\nword ::= [a-c]+", [" b a b ", "bbb", "b b"], ["", "a  a"]),
    ('root ::= [a-z]+ | "ab" "cd" "!"', ["abcd!", "abcd", "x"], ["abc!", "x!"]),
    (
        'root ::= x | "[" root "]"\nx ::= "ab" "c" | [a-z] [a-z] "x"',
        ["abx", "[abx]", "abc"],
        ["ab"],
    ),
    ('root ::= "a" root "b" | "a"', ["a", "aab", "aaabb"], ["ab", "aabb"]),
    ('root ::= "(" (text | root)* ")"\ntext ::= [^()]+', ["()", "(a(b)(c)d)"], ["", "(", "(a))"]),
    ('root ::= "(" ([ab] | root)+ ")"', ["(a)", "(ab(b)a)", "((a))"], ["()", "(()a)", "(c)"]),
    ('root ::= x\nx ::= [ab] x | "(" x ")" x | "c"', ["c", "abc", "a(bc)bc"], ["ab", "(c)"]),
    ('root ::= "a" root | [ab] "c"', ["ac", "bc", "aac", "aabc"], ["c", "bbc"]),
    # what cannot be finished
    ('root ::= "a" | "b" [z-a]', ["a"], ["b"]),
    (r'root ::= "a" ("\u0000" | "\uD800")* x?' + "\nx ::= [\\U00110000]", ["a"], ["aa"]),
    # tokens
    ("root ::= <think> !</think>* </think> .*", ["<think>ab</think>c", "<think></think>"], ["ab"]),
    ("root ::= [a-z]+ <think>", ["ab<think>"], ["ab", "<think>"]),
    ('root ::= "<think>"', [], ["<think>"]),
]


def test_token_terminals_work_in_the_compiling_process(language: Language) -> None:
    isolated = Language(language.vocab, isolated=True)
    try:
        assert isolated.contains("root ::= <think> !</think>* </think> [a-z]", "<think>ab</think>c")
        with pytest.raises(GrammarRejected, match="a token of the model, which '<x>' is not"):
            isolated.contains("root ::= <x>", "")
        with pytest.raises(GrammarRejected, match="no text matches it"):
            isolated.contains(f"root ::= <[{language.vocab.eos}]>", "")
    finally:
        isolated.close()


JSON = '{"a b": [1, -2.5e5, true, null, "\\u00e9\\n", {}], "é": ""}'
C = "int main(){int x = 1+2*y;while(x<5){f (x, 2);}// note\nreturn (\n-x\n);}"
EXAMPLES = {
    "arithmetic": (["x=1\n", "ab+2*(c)=\t(1 -2)\nc=d\n"], ["x=1", "1+=2\n", "=1\n"]),
    "c": ([C, ""], ["int main(){return 5}", "int(){}"]),
    "chess": (["1. e4 e5\n2. Nf3 Nc6\n", "1. O-O O-O-O\n11. dxe8=Q+ Kb1#\n"], ["1. e4 e5\n", "e4"]),
    "english": (["Hello, world [1]!", "a\nb"], ["", "é", "a  b"]),
    "japanese": (["こんにちは 世界、", "カ"], ["a", ""]),
    "json": ([JSON, "{}", '{ "a":\n\t1}'], ["[]", "{a:1}", '{"a":01}', '{"a":"\n"}']),
    "json_arr": (["[\n1,\n{}]", "[\n]"], ["[]", "{}"]),
    "list": (["- a b\n- é\n"], ["- a", "a\n", "- a\u2028\n"]),
}


@pytest.mark.parametrize(
    ("source", "inside", "outside"),
    [
        *(pytest.param(*language, id=language[0]) for language in LANGUAGES),
        *(
            pytest.param((SHIPPED / f"{name}.gbnf").read_text(encoding="utf-8"), *texts, id=name)
            for name, texts in EXAMPLES.items()
        ),
    ],
)
def test_a_grammar_has_its_language(
    language: Language, source: str, inside: list[str], outside: list[str]
) -> None:
    assert [text for text in inside if not language.contains(source, text)] == []
    assert [text for text in outside if language.contains(source, text)] == []


def test_every_grammar_of_llama_cpp_has_examples() -> None:
    assert {path.stem for path in SHIPPED.glob("*.gbnf")} == set(EXAMPLES)


REFUSED = {
    'root ::= "a': "line 1, column 12: found the end, expected '\"' at the end of the text.",
    "root ::= [": "line 1, column 11: found the end, expected ']' at the end of the class.",
    'a ::= "b"\nroot ::= ("b"': "line 2, column 14: found the end, expected an element, '|' or ')'.",
    'root ::= "a")': "line 1, column 13: found ')', expected an element, '|' or the end of the rule.",
    'root = "a"': "line 1, column 6: found '=', expected '::='.",
    'root_1 ::= "a"': "line 1, column 5: found '_', expected '::='.",
    '\n\n+ ::= "a"': "line 3, column 1: found '+', expected the name of a rule.",
    'root ::= "a"\n | "b"': "line 2, column 2: found '|', expected the name of a rule.",
    r'root ::= "\x4"': "column 14: found '\"', expected 2 hexadecimal digits after '\\x'.",
    r'root ::= "\u00g0"': "column 15: found 'g', expected 4 hexadecimal digits after '\\u'.",
    r'root ::= "\d"': "column 12: found 'd', expected one of x u U t r n",
    "root ::= *": "column 10: found '*', expected something to repeat before it.",
    'root ::= ""*': "column 12: found '*', expected something to repeat before it.",
    'root ::= "a"{0}?': "column 16: found '?', expected something to repeat before it.",
    'root ::= "a"{,3}': "column 14: found ',', expected a number of repetitions.",
    'root ::= "a"{1 2}': "column 16: found '2', expected ',' or '}'.",
    'root ::= "a"{1,2': "column 17: found the end, expected '}'",
    'root ::= "a"{5,0}': "column 13: found '{', expected a second bound that is not below the first.",
    'root ::= "a"{2001}': "column 13: found '{', expected at most 2000 repetitions.",
    'root ::= ("a"{0,50}){50}': "column 21: found '{', expected at most 2000 repetitions of rules.",
    'root ::= "a"{99999999999999999999}': "column 14: found '9', expected a number below 2^64.",
    "root ::= x": "column 10: found 'x', expected a rule that is defined, which 'x' is not.",
    'start ::= "a"': "there is no rule named 'root'.",
    "": "there is no rule named 'root'.",
    'root ::= root "a" | "b"': "the rule 'root' begins with itself",
    'root ::= "a" x\nx ::= y?\ny ::= x "b"': "the rule 'x' begins with itself",
    'root ::= ("a" |)*': "what is repeated without limit must not be empty",
    "root ::= !a": "column 11: found 'a', expected '<' after '!'.",
    "root ::= <[5)>": "column 13: found ')', expected ']>' after the token id.",
    "root ::= <[5]": "column 14: found the end, expected ']>' after the token id.",
    "root ::= <[4294967296]>": "column 12: found '4', expected a token id of at most 4294967295.",
    "root ::= <nothing>": "column 10: found '<', expected a token of the model, which '<nothing>' is not.",
    "root ::= <nothing": "column 18: found the end, expected '>' at the end of the token.",
    'root ::= "\0"': "column 11: found U+0000, expected GBNF",
    "root ::= [z-a]": "no text matches it.",
    'root ::= "a" <[4000000000]>': "no text matches it.",
    'root ::= "a"' + "?" * (MAX_QUANTIFIERS + 1): "quantifiers on one element",
    "root ::= " + "(" * MAX_DEPTH + '"a"' + ")" * MAX_DEPTH: "levels deep",
}


@pytest.mark.parametrize("source", REFUSED, ids=range(len(REFUSED)))
def test_refusal_names_the_position_and_what_was_expected(language: Language, source: str) -> None:
    with pytest.raises(GrammarRejected, match=re.escape(REFUSED[source])):
        language.contains(source, "")


ACCEPTED = [
    'root ::= "a"{2000}',
    'root ::= "a"{0,100000}',
    'root ::= foo{0} "a"',  # llama.cpp requires no definition of a removed rule
    'root ::= foo\nroot ::= "a"',
    "root ::= <[4000000000]>?",
    'root ::= "a" root?',
    'root ::= ("a"?)*',
    "root ::= " + "(" * (MAX_DEPTH - 1) + '"a"' + ")" * (MAX_DEPTH - 1),
]


@pytest.mark.parametrize("source", ACCEPTED)
def test_grammars_accepted_by_llama_cpp_are_accepted(language: Language, source: str) -> None:
    assert isinstance(language.contains(source, ""), bool)


@given(
    st.characters(codec="utf-8", exclude_characters="\0"), st.sampled_from("uUx "), st.booleans()
)
def test_every_character_in_every_spelling(char: str, kind: str, in_class: bool) -> None:
    code = ord(char)
    digits = {"x": 2, "u": 4, "U": 8}.get(kind, 9)
    spelled = f"\\{kind}{code:0{digits}x}" if len(f"{code:x}") <= digits < 9 else char
    if len(spelled) == 1 and spelled in '"\\]^':
        spelled = "\\U" + f"{code:08X}"
    source = f"root ::= [{spelled}]" if in_class else f'root ::= "{spelled}"'
    grammar = parse_gbnf(source, TokenTable())
    assert grammar.rules[grammar.root] == [(Characters(((code, code),)),)]


@given(st.text(alphabet='()[]{}|*+?"\\<>!.,:=^-#\n\r\t 01auxUroot_é', max_size=60))
def test_any_text_is_translated_or_refused(text: str) -> None:
    for source in (text, "root ::= " + text):
        try:
            lark = gbnf_to_lark(source)
        except GrammarSyntaxError:
            continue
        assert lark.startswith("start: ")


def test_doubling_rules_have_a_short_translation() -> None:
    rules = [f"r{at} ::= r{at + 1} r{at + 1}" for at in range(150)]
    source = "\n".join(["root ::= r0", *rules, 'r150 ::= "a" | "b"'])
    assert len(gbnf_to_lark(source)) < 2 * len(source)


@pytest.mark.parametrize(
    "source",
    [
        'root ::= "{" string (":" root)* "}"\nstring ::= "\\"" ([^"\\\\] | "\\\\" .)* "\\""',
        'root ::= "" | "(" root ")" | "\\"" [^"]* "\\""',
        'root ::= "\\"" rest\nrest ::= [^"] rest | "\\""',
        'root ::= "\\"" x "\\""\nx ::= [^"()] x | "(" x ")" x | ""',
        'root ::= "\\"" (text | root)* "\\""\ntext ::= [^"]+',
    ],
)
def test_a_mask_within_a_string_takes_few_steps(tmp_path: Path, source: str) -> None:
    """A string is one lexeme; by characters, a mask would take thousands of parser items."""
    vocab = VocabularyFile(vocabulary("qwen2").write(tmp_path / "qwen2.gguf")).vocab()
    limits = LLParserLimits(step_max_items=300)
    grammar = LLMatcher.grammar_from_lark(gbnf_to_lark(source))
    matcher = LLMatcher(vocab.guidance_tokenizer(), grammar, log_level=0, limits=limits)
    opening = '{"the' if source.startswith('root ::= "{"') else '"the'
    matcher.consume_tokens(vocab.tokenize(opening, add_special=False, parse_special=False))
    mask = np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8)
    assert not matcher.is_error(), matcher.get_error()
    assert np.count_nonzero(mask) > 2000
