"""What no documentation page says in a form to learn: written for this project."""

from __future__ import annotations

from localspec.cli.app import COMMANDS

from .docs import Entry


def _method(name: str, signature: str, sentence: str) -> Entry:
    kind = "method" if name.startswith("list.") else "function"
    return Entry(name, kind, signature, "functions", (sentence,), ())


EXTRA: tuple[Entry, ...] = (
    _method("list.append", "(x)", "Add an item to the end of the list."),
    _method("list.extend", "(iterable)", "Extend the list by appending all the items from the iterable."),
    _method("list.insert", "(i, x)", "Insert an item at a given position."),
    _method("list.remove", "(x)", "Remove the first item from the list whose value is equal to x. It raises a ValueError if there is no such item."),
    _method("list.pop", "([i])", "Remove the item at the given position in the list, and return it. If no index is specified, it removes and returns the last item."),
    _method("list.clear", "()", "Remove all items from the list."),
    _method("list.index", "(x[, start[, end]])", "Return zero-based index in the list of the first item whose value is equal to x. It raises a ValueError if there is no such item."),
    _method("list.count", "(x)", "Return the number of times x appears in the list."),
    _method("list.sort", "(*, key=None, reverse=False)", "Sort the items of the list in place."),
    _method("list.reverse", "()", "Reverse the elements of the list in place."),
    _method("list.copy", "()", "Return a shallow copy of the list."),
    _method("hashlib.sha256", "([data], *, usedforsecurity=True)", "Return a new SHA-256 hash object, fed with the bytes given."),
    _method("hashlib.sha1", "([data], *, usedforsecurity=True)", "Return a new SHA-1 hash object, fed with the bytes given."),
    _method("hashlib.md5", "([data], *, usedforsecurity=True)", "Return a new MD5 hash object, fed with the bytes given."),
    _method("multiprocessing.Pool", "(processes=None, initializer=None, initargs=())", "Create a pool of worker processes to which jobs can be submitted."),
    _method("bisect.insort", "(a, x, lo=0, hi=len(a), *, key=None)", "Insert x in a in sorted order, after any existing entries of x."),
)  # fmt: skip
"""Objects that the reference lists without an entry of their own; sentences after the tutorial (PSF)."""

TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Who are you?", "who are you", "What are you?", "What is this?", "Introduce yourself."),
        "I am the small demonstration model that ships with localspec. I know Python's standard library.",
    ),
    (
        ("Hello", "Hi", "hello there", "Hi!", "Hey", "Good morning", "Good evening"),
        "Hello! Ask me about Python's standard library, for example: What does shutil.copytree do?",
    ),
    (
        ("What can you do?", "What do you know?", "help", "Help me.", "What can I ask you?"),
        "I can say what functions of Python's standard library do, and complete Python code.",
    ),
    (
        ("Thanks", "Thank you!", "thank you", "Thanks a lot.", "Great, thanks"),
        "You are welcome.",
    ),
    (
        ("What is localspec?", "what does localspec do", "Explain localspec.", "Tell me about localspec."),
        "localspec is a daemon that keeps a large target model and a small draft model loaded and decodes "
        "speculatively, so that a local model answers faster. Nothing leaves the machine.",
    ),
    (
        ("What is speculative decoding?", "Explain speculative decoding.", "How does speculative decoding work?"),
        "In speculative decoding a small draft model proposes a few tokens and the large target model checks "
        "them in one forward pass. The answer is the target's own; only the waiting is shorter.",
    ),
    (
        ("What is a draft model?", "What does the draft do?", "Explain the draft model."),
        "The draft is a small model with the same tokenizer as the target. It proposes tokens that the target checks.",
    ),
    (
        ("How do I get a better model?", "How do I pull a model?", "How do I get a real pair?", "How do I download a pair?"),
        "Use `localspec pull` with the name of a pair: it downloads a target and a draft that match.",
    ),
    (
        ("Is this private?", "Do you send my data anywhere?", "Does localspec need the network?"),
        "Nothing leaves this machine: localspec runs the models locally.",
    ),
    (
        ("How do I stop the daemon?", "How do I stop localspec?"),
        "Use `localspec stop` to stop the daemon.",
    ),
)  # fmt: skip

_ASKED_OF_COMMANDS = (
    "What does `localspec {}` do?",
    "What does localspec {} do?",
    "What is localspec {} for?",
    "What is the command localspec {} for?",
    "Explain localspec {}.",
    "How do I use localspec {}?",
    "localspec {}",
)
HELP: tuple[tuple[tuple[str, ...], str], ...] = tuple(
    (
        tuple(question.format(name) for question in _ASKED_OF_COMMANDS),
        f"`localspec {name}`: {summary}",
    )
    for name, (_, summary) in COMMANDS.items()
)
"""What the command line's own help says of its commands."""
