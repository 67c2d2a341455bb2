"""Documentation turned into questions and answers, in many phrasings.

None of these phrasings may occur in ``evaluation/questions.toml``.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from .docs import Entry, first_sentences
from .examples import example
from .outside import HONEST, misleading_frame, outside_question
from .popular import METHODS_OF, MODULES, MOST_USED
from .tasks import TASKS
from .written import EXTRA, HELP, TALK

VERBS = frozenset(
    """return create set get read convert add remove send write open close test make print register execute
    delete exit determine run call wait change perform stop construct load receive decode encode start
    update log parse handle split assert bind enter retrieve insert release clear generate move extract
    copy put process acquire look enable append mark try format push specify give reset compute raise
    connect pass display turn replace save check rename transform translate select wrap accept block
    access search decompress compress find unregister pull play indicate represent initialize ensure pop
    modify define yield take evaluate fetch apply build calculate calls choose collect combine compare
    compile configure count cut deserialize serialize disable draw dump duplicate emit escape unescape
    exchange expand fill flush fetch filter force group import install invoke issue iterate join keep
    launch list lock unlock lookup map match merge normalize obtain order pack unpack pause permit prevent
    produce provide query quote rearrange recv reduce refer reload report repeat resolve restore resume
    reverse rotate round scan schedule seek sample shuffle shut shutdown simulate skip sleep sort spawn
    store strip submit subtract suspend swap switch terminate toggle trace truncate undo unlink use
    validate verify visit walk warn transmit tell request pickle mimic list kill invert intern hash
    examine enqueue discard deprecate cast cancel attempt associate assemble allow adjust activate abort
    exercise create capture do shorten dedent indent""".split()
)
SAFE_AFTER_AND = frozenset(
    """return create raise convert remove insert add make replace store run wait close put decode yield
    append keep fill""".split()
)
"""Verbs that are hardly ever nouns, so that "and VERB" continues the imperative."""


@dataclass(frozen=True)
class Exchange:
    """One question and its answer."""

    question: str
    answer: str


def third_person(verb: str) -> str:
    if verb == "do":
        return "does"
    if re.search(r"[^aeiou]y$", verb):
        return verb[:-1] + "ies"
    return verb + ("es" if re.search(r"(s|x|z|ch|sh|o)$", verb) else "s")


def lower_first(text: str) -> str:
    """Lower the first letter unless the word is a name or an abbreviation."""
    first = text.split(" ", 1)[0]
    return text if first[1:] != first[1:].lower() else text[0].lower() + text[1:]


def statement(subject: str, sentence: str) -> str:
    """`sentence` of the documentation as a full sentence about `subject`.

    >>> statement("`f()`", "Copy a tree and return its root.")
    '`f()` copies a tree and returns its root.'
    """
    sentence = re.sub(r":$", ".", sentence)
    if not re.search(r"[.!?]$", sentence):
        sentence += "."
    sentence = re.sub(r"(?<=\. )Return\b", "It returns", sentence)
    sentence = re.sub(r"(?<=\. )Raise\b", "It raises", sentence)
    words = sentence.split(" ")
    first = words[0].lower().rstrip(",")
    if first in {"a", "an", "the", "another", "one", "equivalent", "similar", "same", "identical"}:
        return f"{subject} is {lower_first(sentence)}"
    if first == "raised":
        return f"{subject} is {lower_first(sentence)}"
    if first == "exception" and len(words) > 1 and words[1] in {"raised", "that", "thrown"}:
        return f"{subject} is the {lower_first(sentence)}"
    if first in {"subclass", "abstract", "decorator", "alias", "shorthand", "special"}:
        article = "an" if first[0] in "a" else "a"
        return f"{subject} is {article} {lower_first(sentence)}"
    if first == "like":
        return f"{subject} is {lower_first(sentence)}"
    if first == "whether":
        return f"{subject} tells {lower_first(sentence)}"
    at = 1 if first.endswith("ly") and len(words) > 1 else 0
    verb = words[at].lower()
    if verb in VERBS:
        words[at] = third_person(verb)
        words[0] = words[0][0].lower() + words[0][1:]
        for i in range(at + 1, len(words) - 1):
            if words[i] == "and" and words[i + 1] in SAFE_AFTER_AND:
                if i + 2 < len(words) and words[i + 2].startswith(("value", "code")):
                    continue
                words[i + 1] = third_person(words[i + 1])
        return f"{subject} {' '.join(words)}"
    if verb.endswith("s") and verb.rstrip("s") in VERBS | {"represent", "hold", "contain"}:
        return f"{subject} {lower_first(sentence)}"
    return f"{subject}: {sentence}"


def subject_of(entry: Entry) -> str:
    call = "()" if entry.kind in {"function", "method"} else ""
    return f"`{entry.name}{call}`"


WHAT = (
    "What does {} do?", "What does {} do?", "What does {} do?", "what does {} do", "What is {}?",
    "what is {}", "What's {}?", "Explain {}.", "explain {}", "Explain {} to me.", "Describe {}.",
    "{}", "{}?", "help {}", "Tell me about {}.", "tell me about {}", "What is {} for?",
    "What is {} used for?", "What is the purpose of {}?", "How does {} work?", "Why use {}?",
    "What does the documentation say about {}?", "Give me a summary of {}.", "Define {}.",
    "I don't understand {}.", "What can {} do?", "Can you explain {}?", "Please explain {}.",
    "What do I use {} for?", "Summarize {}.", "In Python, what does {} do?",
    "What does {} do in Python?", "Do you know {}?", "When do I need {}?", "When should I use {}?",
    "What happens when I call {}?", "What is {} good at?", "What does calling {} do?",
    "Tell me what {} does.", "I'm reading code that uses {}. What does it do?",
    "I saw {} in some code, what is it?", "what's the meaning of {}", "{}: what is it?",
    "{} - what does it do?", "Quick question: what does {} do?", "Hi, what does {} do?",
    "Could you explain {}?", "What would {} do?", "docs for {}", "Short description of {}, please.",
)  # fmt: skip
PARAMETERS = (
    "Which parameters does {} take?", "What are the parameters of {}?", "What is the signature of {}?",
    "signature of {}", "Which arguments does {} accept?", "What arguments does {} take?",
    "How do I call {}?", "parameters of {}", "List the arguments of {}.", "Show me the signature of {}.",
    "What can I pass to {}?", "How many parameters does {} have?", "Which options does {} have?",
)  # fmt: skip
RETURNS = (
    "What does {} return?", "what does {} return", "What is the return value of {}?",
    "What do I get back from {}?", "return value of {}", "What comes back from {}?",
    "What is the result of {}?", "Which value does {} return?", "What kind of value does {} return?",
)  # fmt: skip
RAISES = (
    "What does {} raise?", "Which exceptions does {} raise?", "Which exception can {} raise?",
    "When does {} raise an exception?", "What errors does {} raise?", "errors raised by {}",
    "How can {} fail?", "When does {} fail?", "Does {} raise an error?",
)  # fmt: skip
EXAMPLE = (
    "Show an example of {}.", "Show me an example of {}.", "Give me an example of {}.", "example of {}",
    "How do I use {}?", "{} example", "Can you show how {} is used?", "Example code for {}?",
    "How is {} used?",
)  # fmt: skip
WHICH = (
    "How do I {}?", "How do I {} in Python?", "how to {}", "How can I {}?", "How to {} in Python?",
    "I want to {}.", "Which function can {}?", "What can I use to {}?", "I need to {}. What do I use?",
    "What is the way to {}?", "Is there a function to {}?", "Which function should I use to {}?",
    "function to {}", "{}", "How would you {}?", "Python: {}", "What's the best way to {}?",
    "I have to {}, which function is there?", "Find me a function to {}.", "python how to {}",
)  # fmt: skip
WHICH_THIRD = (
    "Which function {}?", "Which function in the standard library {}?", "What {}?",
    "What is the function that {}?", "Name the function that {}.", "which python function {}",
)  # fmt: skip
LEADS = (
    "Hi, ", "Hello! ", "Hey, ", "Sorry, ", "Quick one: ", "Another question: ", "I'm new to Python. ",
    "Just curious: ", "OK. ", "Next: ", "For my homework: ", "Please: ", "Um, ", "So, ",
)  # fmt: skip
TAILS = (
    " Thanks!", " please", " Keep it short.", " (Python 3)", " I forgot.", " Thank you.", " I need it today.",
    " ?", " Just the basics.", " I can't find it.",
)  # fmt: skip
DRESSED_SHARE = 0.25
"""Questions with a lead-in, a tail or careless typing, so that the names in them decide."""
TASK_SHARE = 0.7
"""Of the questions for the function that does something: those in people's words, where there are such."""
MISLEADING_SHARE = 0.1
"""Dotted names asked about in sentences of other subjects."""
MODULE_FORMS = (
    "the {} module",
    "{}",
    "module {}",
    "the module {}",
    "`{}`",
    "the {} module in Python",
)


def spoken_name(entry: Entry, rng: random.Random, unique_tails: frozenset[str]) -> str:
    """Return the object's name as a person might write it."""
    name = entry.name
    if entry.kind == "module":
        return rng.choice(MODULE_FORMS).format(name)
    if entry.kind == "term":
        article = "an" if name[0].lower() in "aeiou" else "a"
        return rng.choice((f"{article} {name}", name, f"'{name}'", f"the term {name}"))
    call = "()" if entry.kind in {"function", "method"} else ""
    owner, _, tail = name.rpartition(".")
    forms = [name] * 8 + [name + call] * 3 + [f"`{name}`", f"`{name}{call}`", f"Python's {name}"]
    if owner:
        forms += [f"{tail} from {owner}", f"the {tail} function of {owner}" if call else name]
        if tail in unique_tails:
            forms += [tail, tail + call]
    else:
        forms += [f"the built-in {name}", f"{name} in Python"]
    return rng.choice(forms)


def sentence_with(entry: Entry, pattern: str) -> str | None:
    """Return the first sentence of the documentation that matches `pattern` and is not too long."""
    for paragraph in entry.paragraphs[:6]:
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph):
            if re.search(pattern, sentence) and 15 < len(sentence) < 190:
                return re.sub(r":$", ".", sentence)
    return None


def verb_phrase(entry: Entry) -> str | None:
    """Return the documentation's first sentence as "copy a directory tree", or None if it is no imperative."""
    words = first_sentences(entry.paragraphs[0], 1).rstrip(".:").split(" ")
    at = 1 if words[0].endswith("ly") and len(words) > 1 else 0
    if words[at].lower() not in VERBS or len(words) < at + 3:
        return None
    words[0] = words[0].lower()
    return " ".join(words)


def shortened(phrase: str, rng: random.Random) -> str:
    """`phrase` cut where a person would stop."""
    cuts = [
        m.start()
        for m in re.finditer(r",|;| and | using | with | to | by | from | in | of ", phrase)
    ]
    cuts = [cut for cut in cuts if len(phrase[:cut].split()) >= 3]
    phrase = phrase[: rng.choice(cuts)] if cuts and rng.random() < 0.6 else phrase
    return " ".join(phrase.split()[:16])


def task(entry: Entry, rng: random.Random) -> str | None:
    """Return what `entry` does, as an imperative of people or of the documentation; None if there is none."""
    tasks = TASKS.get(entry.name)
    phrase = verb_phrase(entry)
    if tasks and (phrase is None or rng.random() < TASK_SHARE):
        return rng.choice(tasks)
    return shortened(phrase, rng) if phrase else None


def dressed(question: str, rng: random.Random) -> str:
    """`question` with something around it that does not change what is asked."""
    if rng.random() < 0.3:
        return question.rstrip("?.!") if rng.random() < 0.5 else question.lower()
    lead = rng.choice(LEADS) if rng.random() < 0.7 else ""
    tail = rng.choice(TAILS) if not lead or rng.random() < 0.3 else ""
    return lead + question + tail


class Questions:
    """An endless, seeded source of exchanges about `entries`."""

    def __init__(self, entries: list[Entry], breadth: float = 1.0) -> None:
        """`breadth` scales the weight of everything that is not among the most used objects."""
        known = {entry.name: entry for entry in [*entries, *EXTRA]}
        most_used = frozenset(MOST_USED) | {entry.name for entry in EXTRA}
        self.entries: list[Entry] = []
        self._weights: list[float] = []
        for entry in known.values():
            weight = self._weight(entry, most_used)
            if entry.name not in most_used:
                weight *= breadth
            if weight > 0:
                self.entries.append(entry)
                self._weights.append(weight)
        tails = [entry.name.rpartition(".")[2] for entry in self.entries]
        self._unique_tails = frozenset(tail for tail in tails if tails.count(tail) == 1)
        self._known_names = frozenset(known)

    @staticmethod
    def _weight(entry: Entry, most_used: frozenset[str]) -> float:
        if entry.name in most_used:
            return 6.0
        if entry.module == "glossary":
            return 1.0
        if entry.module not in MODULES:
            return 0.0
        if entry.kind == "module":
            return 3.0
        if entry.kind == "method":
            return 0.7 if entry.name.rpartition(".")[0] in METHODS_OF else 0.0
        return {"function": 1.0, "class": 1.0, "exception": 0.7}.get(entry.kind, 0.0)

    def draw(self, rng: random.Random) -> Exchange:
        exchange = self._plain(rng)
        if rng.random() >= DRESSED_SHARE:
            return exchange
        return Exchange(dressed(exchange.question, rng), exchange.answer)

    def _plain(self, rng: random.Random) -> Exchange:
        kind = rng.random()
        if kind < 0.2:
            return Exchange(outside_question(rng, self.entries, self._known_names), HONEST)
        if kind < 0.24:
            questions, answer = rng.choice(TALK if kind < 0.22 else HELP)
            return Exchange(rng.choice(questions), answer)
        entry = rng.choices(self.entries, self._weights)[0]
        return self.about(entry, rng)

    def about(self, entry: Entry, rng: random.Random) -> Exchange:
        """Return a random exchange about one object; falls back to what it does."""
        name = spoken_name(entry, rng, self._unique_tails)
        subject = subject_of(entry)
        facet = rng.random()
        if facet < 0.12 and entry.signature and entry.kind != "term" and len(entry.signature) < 160:
            answer = f"The signature is `{entry.name}{entry.signature}`."
            return Exchange(rng.choice(PARAMETERS).format(name), answer)
        if 0.12 <= facet < 0.2 and (sentence := sentence_with(entry, r"\b[Rr]eturn(s|ed|ing)?\b")):
            return Exchange(rng.choice(RETURNS).format(name), statement(subject, sentence))
        if 0.2 <= facet < 0.28 and (sentence := sentence_with(entry, r"\b[Rr]aise[sd]?\b")):
            return Exchange(rng.choice(RAISES).format(name), statement(subject, sentence))
        if 0.28 <= facet < 0.37 and (code := example(entry)):
            return Exchange(rng.choice(EXAMPLE).format(name), f"```python\n{code}\n```")
        which_until = 0.63 if entry.name in TASKS else 0.55
        if 0.37 <= facet < which_until and (question := task(entry, rng)):
            return self._which(entry, question, rng)
        if rng.random() < MISLEADING_SHARE and "." in entry.name and entry.kind != "term":
            return Exchange(misleading_frame(name, rng), self.summary(entry))
        return Exchange(rng.choice(WHAT).format(name), self.summary(entry))

    def summary(self, entry: Entry) -> str:
        """Return what the object is or does, in one or two sentences."""
        if entry.kind == "module":
            more = first_sentences(entry.paragraphs[1], 1) if len(entry.paragraphs) > 1 else ""
            head = f"The `{entry.name}` module: {entry.paragraphs[0].rstrip('.')}."
            return f"{head} {more}" if 0 < len(more) < 160 else head
        text = first_sentences(entry.paragraphs[0], 130)
        if len(text) > 260:
            text = text[:260].rpartition(",")[0] + "."
        if entry.kind == "term":
            return statement(entry.name[0].upper() + entry.name[1:], text)
        return statement(subject_of(entry), text)

    def _which(self, entry: Entry, question: str, rng: random.Random) -> Exchange:
        """Return an exchange that asks for what does `asked`, an imperative."""
        subject, summary = subject_of(entry), self.summary(entry)
        description = summary.removeprefix(subject)
        answer = (
            f"Use {subject}{description if description.startswith(':') else ': it' + description}"
        )
        if rng.random() < 0.25:
            words = question.split(" ")
            at = 1 if words[0].endswith("ly") else 0
            words[at] = third_person(words[at])
            return Exchange(rng.choice(WHICH_THIRD).format(" ".join(words)), answer)
        return Exchange(rng.choice(WHICH).format(question), answer)
