"""How references to a repository are parsed, and which models its files are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.errors import HubError, InvalidRequest, LocalspecError, NotOnHub, WebPage
from localspec.registry.catalogue import NAME_PATTERN, REPO_PATTERN
from localspec.registry.file_names import strip_part
from localspec.registry.hub.hub import Hub
from localspec.registry.hub.offline import ListedFile
from localspec.registry.hub.repository import (
    Choice,
    Reference,
    choose_quantization,
    derive_model_name,
    derive_pair_name,
    list_choices,
    list_parts,
    match_choices,
    parse_reference,
)
from localspec.registry.hub.retry import RetryableError
from tests.support.hub import TestHub

R = "Qwen/Qwen3-8B-GGUF"
FILE = "Qwen3-8B-Q4_K_M.gguf"
LETTERS = st.text("abx1+()[] ", min_size=1, max_size=4).map(lambda text: f"a{text}b")
FOLDERS = st.sampled_from(["", "v1/", "v2/", "base/", "v1/base/", "c+d/", "c d/"])
REPOSITORIES = st.sampled_from(["m", "n"])


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        (R, Reference(repo=R)),
        (f" {R} ", Reference(repo=R)),
        (f"{R}:Q4_K_M", Reference(repo=R, quant="Q4_K_M")),
        (f"{R}:latest", Reference(repo=R)),
        (f"hf:{R}:Q8_0", Reference(repo=R, quant="Q8_0")),
        (f"hf://{R}", Reference(repo=R)),
        (f"hf.co/{R}:Q8_0", Reference(repo=R, quant="Q8_0")),
        (f"huggingface.co/{R}", Reference(repo=R)),
        (f"https://huggingface.co/{R}", Reference(repo=R)),
        (f"https://huggingface.co/{R}/", Reference(repo=R)),
        (f"https://hf.co/{R}:Q6_K", Reference(repo=R, quant="Q6_K")),
        (f"https://huggingface.co/{R}/tree/main", Reference(repo=R)),
        (f"https://huggingface.co/{R}/blob/main/{FILE}", Reference(repo=R, file=FILE)),
        (f"https://huggingface.co/{R}/resolve/main/{FILE}?download=true", Reference(repo=R, file=FILE)),
        (f"https://huggingface.co/{R}/blob/v1/a/{FILE}", Reference(repo=R, file=f"a/{FILE}", revision="v1")),
        (f"https://huggingface.co/{R}?show_file_info={FILE}", Reference(repo=R, file=FILE)),
        (f"https://mirror.example:8080/{R}", Reference(repo=R)),
        (f"{R}:{FILE}", Reference(repo=R, file=FILE)),
        (f"{R}/{FILE}", Reference(repo=R, file=FILE)),
        (f"{R}:Q4/{FILE}", Reference(repo=R, file=f"Q4/{FILE}")),
        (f"{R}:Balanced", Reference(repo=R, quant="Balanced")),
        (f"{R}:My Recipe (1)", Reference(repo=R, quant="My Recipe (1)")),
        (f"{R}:a b/C+D (1) [x].GGUF", Reference(repo=R, file="a b/C+D (1) [x].GGUF")),
        (f"https://huggingface.co/{R}/blob/main/C%2BD%20(1).gguf", Reference(repo=R, file="C+D (1).gguf")),
        ("coder-7b", None),
        ("tinny", None),
        ("a:b", None),
    ],
)  # fmt: skip
def test_references_are_parsed(text: str, reference: Reference | None) -> None:
    assert parse_reference(text, "https://mirror.example:8080") == reference


@pytest.mark.parametrize(
    "text",
    [
        "https://example.com/a/b",
        f"https://huggingface.co@evil.example/{R}",
        "https://huggingface.co/Qwen",
        "https://huggingface.co/datasets/a/b",
        "hf:qwen3",
        "./a.gguf",
        "/home/a/b.gguf",
        "models/b.gguf",
        "a/b:../../c",
        "a/b:x\ty",
        "a/b:..",
        "a/b:/x",
        "a/b:.hidden.gguf",
        "a/../b",
        "a/b/c",
        "a/b/c/d.txt",
        f"https://huggingface.co/{R}/blob/main/../x.gguf",
    ],
)
def test_other_texts_are_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(InvalidRequest, match="OWNER/REPO"):
        parse_reference(text)


@given(
    st.one_of(
        st.text(max_size=80),
        st.lists(
            st.sampled_from(
                "https:// hf: huggingface.co / a b-GGUF : Q4_K_M [ ] @ ? # % .gguf blob main .. ü".split()
            ),
            max_size=12,
        ).map("".join),
    ),
    st.sampled_from([None, "", "http://[", "https://user:p@hub.example/x"]),
)
def test_any_text_is_parsed_or_refused(text: str, endpoint: str | None) -> None:
    try:
        reference = parse_reference(text, endpoint)
    except InvalidRequest:
        return
    if reference:
        assert REPO_PATTERN.fullmatch(reference.repo)
        assert not (reference.quant and reference.file)
        assert parse_reference(str(reference).removesuffix(f"@{reference.revision}")) == Reference(
            repo=reference.repo, quant=reference.quant, file=reference.file
        )


@given(
    st.from_regex(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", fullmatch=True),
    st.from_regex(r"[A-Za-z0-9_.-]{0,60}", fullmatch=True),
)
def test_every_reference_has_a_legal_name_of_its_own(repo: str, quant: str) -> None:
    name = derive_pair_name(Reference(repo=repo, quant=quant))
    assert NAME_PATTERN.fullmatch(name) or not name
    long = Reference(repo="a/" + "x" * 80, quant="Q4_K_M")
    assert derive_pair_name(long) != derive_pair_name(Reference(repo="a/" + "x" * 80, quant="Q8_0"))


@given(st.lists(st.tuples(REPOSITORIES, FOLDERS, LETTERS), min_size=2, max_size=2, unique=True))
def test_two_files_are_two_pairs(files: list[tuple[str, str, str]]) -> None:
    """Files of one name may be of two repositories or folders, and a name has few kinds of characters."""
    references = [
        Reference(repo=f"own/{repo}-GGUF", file=f"{folder}m-{name}-Q8_0.gguf")
        for repo, folder, name in files
    ]
    names = {derive_pair_name(reference) for reference in references}
    assert len(names) == 2
    assert all(NAME_PATTERN.fullmatch(name) for name in names)


def test_names_of_pairs_are_derived_from_references() -> None:
    assert derive_pair_name(Reference(repo=R)) == "qwen-qwen3-8b"
    assert derive_pair_name(Reference(repo=R, quant="Q4_K_M")) == "qwen-qwen3-8b-q4_k_m"
    assert derive_pair_name(Reference(repo=R, file=FILE)) == "qwen-qwen3-8b-q4_k_m"
    assert derive_pair_name(Reference(repo=R, file=f"x/{FILE}")) == "qwen-qwen3-8b-x-q4_k_m"
    split = "m-Q8_0-00001-of-00002.gguf"
    assert derive_pair_name(Reference(repo="a/m-GGUF", file=split)) == "a-m-q8_0"
    assert derive_model_name("bartowski/mistralai_Mistral-Small-24B-GGUF") == "mistral-small-24b"
    assert derive_model_name("bartowski/Meta-Llama-3.1-8B-Instruct-GGUF") == "llama-3.1-8b-instruct"
    assert derive_model_name("ggml-org/Qwen2.5-Coder-7B-Q8_0-GGUF") == "qwen2.5-coder-7b"
    assert derive_model_name("unsloth/gemma-3-12b-it-qat-GGUF") == derive_model_name(
        "gemma-3-12b-it-qat"
    )
    assert derive_model_name("unsloth/Qwen3.6-27B-MTP-GGUF") == "qwen3.6-27b"


FILES = [
    ("README.md", 10),
    ("Qwen3-8B-BF16.gguf", 16_000),
    ("Qwen3-8B-Q8_0.gguf", 8_700),
    ("Qwen3-8B-UD-Q8_K_XL.gguf", 10_000),
    ("Qwen3-8B-Q5_K_M.gguf", 5_900),
    ("Qwen3-8B-Q4_K_M.gguf", 5_000),
    ("Qwen3-8B-UD-Q4_K_XL.gguf", 5_100),
    ("Qwen3-8B-IQ2_XXS.gguf", 2_400),
    ("mmproj-Qwen3-8B-F16.gguf", 900),
    ("imatrix.gguf", 5),
    ("mtp-Qwen3-8B.gguf", 100),
    ("Q6_K/Qwen3-8B-Q6_K-00001-of-00002.gguf", 4_000),
    ("Q6_K/Qwen3-8B-Q6_K-00002-of-00002.gguf", 2_700),
    ("Q3_K_M/Qwen3-8B-Q3_K_M-00001-of-00002.gguf", 4_000),  # its second part is missing
]


def list_files(*files: tuple[str, int]) -> list[ListedFile]:
    return [ListedFile(file, size) for file, size in files or FILES]


def test_the_models_of_a_repository() -> None:
    offered = {choice.quant: choice for choice in list_choices(list_files())}
    assert list(offered) == [
        "BF16", "UD-Q8_K_XL", "Q8_0", "Q6_K", "Q5_K_M", "UD-Q4_K_XL", "Q4_K_M", "IQ2_XXS",
    ]  # fmt: skip
    assert {choice.stem for choice in offered.values()} == {"qwen3-8b"}
    assert (offered["Q6_K"].parts, offered["Q6_K"].size) == (2, 6_700)
    assert offered["Q6_K"].file.endswith("-00001-of-00002.gguf")
    files = [choice.file for choice in list_choices(list_files(), everything=True)]
    assert {"mmproj-Qwen3-8B-F16.gguf", "imatrix.gguf", "mtp-Qwen3-8B.gguf"} <= set(files)


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("qwen2.5-coder-7b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("model.i1-IQ3_XS.gguf", "i1-IQ3_XS"),
        ("llama-2-7b.Q4_0.gguf", "Q4_0"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("gemma-3-270m-it-qat-F16.gguf", "F16"),
        ("Q8_0/model-00001-of-00001.gguf", "Q8_0"),
        ("a-TQ1_0.gguf", "TQ1_0"),
        ("phi-q4.gguf", "Q4"),
        ("Qwen3-8B.gguf", ""),
        ("target.gguf", ""),
        ("muse-glimmer-30B-kquant-17gb.gguf", "KQUANT-17GB"),
        ("muse-glimmer-30B-kquant-dynamic.gguf", "KQUANT-DYNAMIC"),
        ("Muse-Glimmer-30B-KQuant-17GB-Q4_K_M.gguf", "Q4_K_M"),
    ],
)
def test_the_quantization_is_read_from_the_name(file: str, quant: str) -> None:
    assert [choice.quant for choice in list_choices(list_files((file, 1)))] == [quant]


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("Q4_K_M", "Qwen3-8B-Q4_K_M.gguf"),
        ("q4_k_m", "Qwen3-8B-Q4_K_M.gguf"),
        ("Q4_K_XL", "Qwen3-8B-UD-Q4_K_XL.gguf"),
        ("Qwen3-8B-Q8_0", "Qwen3-8B-Q8_0.gguf"),
        ("qwen3-8b-q8_0.gguf", "Qwen3-8B-Q8_0.gguf"),
        ("Qwen3-8B-Q6_K-00001-of-00002.gguf", "Q6_K/Qwen3-8B-Q6_K-00001-of-00002.gguf"),
    ],
)
def test_a_quantization_or_file_is_found_by_its_name(text: str, file: str) -> None:
    reference = parse_reference(f"{R}:{text}")
    assert reference
    assert [choice.file for choice in match_choices(reference, list_choices(list_files()))] == [
        file
    ]


def test_a_missing_quantization_is_refused_with_those_there_are() -> None:
    with pytest.raises(NotOnHub, match=r"has no 'Q9'; it has: BF16, UD-Q8_K_XL, Q8_0, .*:IQ2_XXS"):
        match_choices(Reference(repo=R, quant="Q9"), list_choices(list_files()))
    with pytest.raises(NotOnHub, match="contains no GGUF file of a model"):
        match_choices(Reference(repo=R), list_choices(list_files(("mmproj-F16.gguf", 1))))


def test_several_models_of_one_repository_need_a_choice() -> None:
    two = list_choices(list_files(("alpha-Q4_0.gguf", 2), ("beta-Q4_0.gguf", 1)))
    with pytest.raises(InvalidRequest, match=r"several models; .* a/b:alpha-Q4_0.gguf"):
        match_choices(Reference(repo="a/b"), two)
    assert [choice.stem for choice in match_choices(Reference(repo="a/Beta-GGUF"), two)] == ["beta"]
    assert len(match_choices(Reference(repo="a/b", file="beta-Q4_0.gguf"), two)) == 1


# A listing: folders, names, recipes, quantizations, parts, sidecars.
_PATHS = st.builds(
    lambda folder, stem, recipe, quant, part: f"{folder}{stem}{recipe}{quant}{part}.gguf",
    st.sampled_from(["", "", "v1/", "v2/", "base/", "MTP/", "Q4_K_M/", "Tiny-Q8_0/"]),
    st.sampled_from(
        ["Tiny", "tiny", "Tiny-it", "mtp-Tiny", "mmproj-Tiny", "Tiny MTP (1)", "a+b[c]"]
    ),
    st.sampled_from(["", "", "-KQuant-17GB", "-Dynamic", "-Balanced", "-assistant"]),
    st.sampled_from(["", "-Q4_K_M", "-Q8_0", "-UD-Q4_K_M", "-q4_k_m"]),
    st.sampled_from(["", "", "-00001-of-00002", "-00002-of-00002"]),
)
_LISTINGS = st.dictionaries(_PATHS, st.integers(1, 3), min_size=1, max_size=10).map(
    lambda sizes: [ListedFile(file, size) for file, size in sizes.items()]
)
_TAGS = [
    "",
    "Q4_K_M",
    "q8_0",
    "Dynamic",
    "kquant-17gb",
    "Balanced",
    "v1",
    "tiny",
    "KQuant-17GB-Q4_K_M",
]


def match(suffix: str, choices: Sequence[Choice]) -> tuple[Choice, ...] | LocalspecError:
    """Return what a reference with this suffix means, or the error."""
    reference = parse_reference(f"own/Other-GGUF:{suffix}" if suffix else "own/Other-GGUF")
    assert reference
    try:
        return match_choices(reference, choices)
    except (NotOnHub, InvalidRequest) as error:
        return error


@given(_LISTINGS)
def test_a_named_file_is_taken_or_refused(listing: list[ListedFile]) -> None:
    choices = list_choices(listing, everything=True)
    paths = [file.file for file in listing]
    for path in paths:
        name = path.rpartition("/")[2]
        for suffix in (path, name, path.lower(), f"v3/{name}"):
            found = match(suffix, choices)
            if isinstance(found, tuple):
                parts = list_parts(found[0].file)
                assert len(found) == 1
                assert any(f"/{part}".lower().endswith(f"/{suffix}".lower()) for part in parts)
                assert suffix in parts or suffix not in paths
            elif suffix in paths:
                assert " lacks " in found.message
            else:
                assert re.search("own/Other-GGUF:| lacks |no whole model", found.message)


@given(_LISTINGS, st.sampled_from(_TAGS))
def test_a_tag_means_one_file_or_is_asked_about(listing: list[ListedFile], tag: str) -> None:
    choices = list_choices(listing)
    found = match(tag, choices)

    def is_named(choice: Choice) -> bool:
        return tag.lower() in f"{choice.file}-{choice.label}".lower()

    if isinstance(found, NotOnHub):
        assert not any(map(is_named, choices))
    if isinstance(found, LocalspecError):
        if choices:  # what the message names means one file
            (written,) = shlex.split(re.split(r"a colon: |For example: ", found.message)[-1])
            example = match(written.removeprefix("own/Other-GGUF:"), choices)
            assert isinstance(example, tuple)
            assert len(example) == 1
        return
    assert len({choice.model for choice in found}) == 1
    assert len({choice.label.lower() for choice in found}) == len(found)
    assert all(map(is_named, found))
    if tag and strip_part(found[0].file.rpartition("/")[2]).lower() != tag.lower():
        (choice,) = found
        # Only copies of it, split into more parts, may have the same label.
        same_label = [other for other in choices if other.label.lower() == choice.label.lower()]
        assert all(
            other.parts > choice.parts for other in filter(is_named, same_label) if other != choice
        )


@pytest.mark.parametrize(
    ("suffix", "files", "meant"),
    [
        ("v2/M-Q4_K_M.gguf", ["v1/M-Q4_K_M.gguf", "v2/M-Q4_K_M.gguf"], 1),
        ("v2/M-Q4_K_M", ["v1/M-Q4_K_M.gguf", "v2/M-Q4_K_M.gguf"], 1),
        ("v2", ["v1/M-Q4_K_M.gguf", "v2/M-Q4_K_M.gguf"], 1),
        ("v3/M-Q4_K_M.gguf", ["v1/M-Q4_K_M.gguf", "v2/M-Q4_K_M.gguf"], "has no 'v3/M-Q4_K_M.gguf'"),
        ("M-Q4_K_M.gguf", ["v1/M-Q4_K_M.gguf", "v2/M-Q4_K_M.gguf"], "several files"),
        ("M-Q4_K_M.gguf", ["M-Q4_K_M.gguf", "v2/M-Q4_K_M.gguf"], 0),
        ("Q4_K_M", ["base/M-Q4_K_M.gguf", "instruct/M-Q4_K_M.gguf"], "several files"),
        ("Q4_K_M", ["M-Q4_K_M.gguf", "v2/M-Q4_K_M.gguf"], "several files"),
        ("", ["base/M-Q4_K_M.gguf", "instruct/M-Q8_0.gguf"], "several models"),
        ("Q6_K", ["M-Q6_K.gguf", "Q6_K/M-Q6_K-00001-of-00002.gguf", "Q6_K/M-Q6_K-00002-of-00002.gguf"], 0),
        ("Q6_K/M-Q6_K-00002-of-00002.gguf",
         ["Q6_K/M-Q6_K-00001-of-00002.gguf", "M-Q6_K.gguf", "Q6_K/M-Q6_K-00002-of-00002.gguf"], 0),
        ("M-Q6_K-00001-of-00003.gguf", ["M-Q6_K-00001-of-00003.gguf"], "lacks M-Q6_K-00002-of-00003"),
        ("Q4_K_M", ["M-KQuant-17GB-Q4_K_M.gguf", "M-Dynamic-Q4_K_M.gguf"], "several files"),
        ("Q4_K_M", ["M-Dynamic-Q4_K_M.gguf", "M-Q4_K_M.gguf"], 1),
        ("kquant-17gb", ["M-KQuant-17GB-Q4_K_M.gguf", "M-Dynamic-Q4_K_M.gguf"], 0),
        ("KQuant-17GB-Q4_K_M", ["M-Dynamic-Q4_K_M.gguf", "M-KQuant-17GB-Q4_K_M.gguf"], 1),
        ("M-KQuant-17GB-Q4_K_M.gguf", ["M-Dynamic-Q4_K_M.gguf", "M-KQuant-17GB-Q4_K_M.gguf"], 1),
        ("Balanced", ["M-APEX-Balanced.gguf", "M-APEX-I-Balanced.gguf", "M-APEX-Mini.gguf"], "several files"),
        ("APEX-Balanced", ["M-APEX-Balanced.gguf", "M-APEX-I-Balanced.gguf"], 0),
        ("mini", ["M-APEX-Balanced.gguf", "M-APEX-Mini.gguf"], 1),
        ("_K_M", ["M-Q4_K_M.gguf", "M-Q8_0.gguf"], 0),  # as llama.cpp matches
        ("q4_k_m", ["My Model (1)+x [y]-Q4_K_M.gguf"], 0),
    ],
)  # fmt: skip
def test_what_a_suffix_means(suffix: str, files: list[str], meant: int | str) -> None:
    size = 300 // len(files)
    listing = [ListedFile(file, size if "-of-" in file else 2 * size) for file in files]
    found = match(suffix, list_choices(listing, everything=suffix.endswith(".gguf")))
    if isinstance(meant, str):
        assert isinstance(found, LocalspecError)
        assert meant in found.message
    else:
        assert isinstance(found, tuple)
        assert files[meant] in [part for choice in found for part in list_parts(choice.file)]
        assert len(found) == 1


def test_files_of_one_content_are_one_model() -> None:
    files = [ListedFile(f"{folder}M-Q4_K_M.gguf", 5, oid="a") for folder in ("", "Q4_K_M/")]
    found = match("Q4_K_M", list_choices(files))
    assert isinstance(found, tuple)
    assert [choice.file for choice in found] == ["M-Q4_K_M.gguf"]
    other = [files[0], ListedFile("Q4_K_M/M-Q4_K_M.gguf", 5, oid="b")]
    assert isinstance(match("Q4_K_M", list_choices(other)), InvalidRequest)


@pytest.mark.parametrize(
    ("gpu", "ram", "quant"),
    [
        (0, 20_000, "Q8_0"),  # no more than eight bits, and the usual one of them
        (0, 8_000, "Q6_K"),
        (0, 6_000, "Q5_K_M"),
        (0, 5_050, "Q4_K_M"),
        (0, 2_500, "IQ2_XXS"),
        (0, 100, "IQ2_XXS"),  # nothing fits: the smallest
        (6_000, 90_000, "Q5_K_M"),
        (1_000, 90_000, "Q4_K_M"),  # main memory has to help
    ],
)
def test_the_best_quantization_that_fits_is_chosen(gpu: int, ram: int, quant: str) -> None:
    def fits(choice: Choice) -> str:
        if choice.size <= (gpu or ram):
            return "yes"
        return "partly" if gpu and choice.size <= gpu + ram else "no"

    assert choose_quantization(list_choices(list_files()), fits).quant == quant  # type: ignore[arg-type]


def test_a_single_file_is_taken_whatever_it_is() -> None:
    for file in ("a.gguf", "a-F16.gguf"):
        assert (
            choose_quantization(list_choices(list_files((file, 9))), lambda _: "yes").file == file
        )


# The hub's list of files.


def test_all_pages_of_a_list_are_read(hub: TestHub) -> None:
    for number in range(7):
        hub.add("own/many", f"folder/m-{number}.gguf", b"x" * number)
    hub.page = 3
    listing = Hub(hub.endpoint).list_files("own/many")
    listed = [(file.file, file.size) for file in listing]
    assert listed == [(f"folder/m-{number}.gguf", number) for number in range(7)]
    assert len({file.oid for file in listing}) == 7


def test_failures_of_the_list_are_errors(hub: TestHub) -> None:
    mine = Hub(hub.endpoint)
    with pytest.raises(NotOnHub, match="no repository own/none"):
        mine.list_files("own/none")
    hub.add("own/a", "a.gguf", b"x")
    for status, kind in ((503, RetryableError), (403, HubError)):
        hub.list_statuses = [(status, "")]
        with pytest.raises(kind):
            mine.list_files("own/a")
    hub.list_page = True
    with pytest.raises(WebPage, match="page of its own"):
        mine.list_files("own/a")
