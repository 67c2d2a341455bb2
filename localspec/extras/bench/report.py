"""The report of a bench, as `--json` writes it and `bench compare` reads it.

`schema_text` describes it. Times are milliseconds unless a name says otherwise. Rates are tokens per
second, from an answer's first token to its last, as llama-server counts. "plain" means the target
alone, "speculative" means with drafts as usual.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from localspec.errors import UsageError

VERSION = 1
Mode = Literal["plain", "speculative"]
Sampling = Literal["greedy", "own"]
Verdict = Literal["faster", "same", "off", "slower", "unclear", "not measured"]


class Estimate(Struct, frozen=True):
    """A figure and its 95 % bootstrap interval.

    - `pairs`: the number of pairs of answers behind it.
    - `low`, `high`: null if the pairs are too few for an interval.
    """

    value: float
    low: float | None = None
    high: float | None = None
    pairs: int = 1


class Round(Struct, frozen=True, array_like=True):
    """The tokens of one target pass, and its drafted and accepted tokens of this kind of draft.

    Servers other than localspec report this for each chunk of a stream, which may contain several
    passes.
    """

    tokens: int
    drafted: int
    accepted: int
    kind: str = ""


class Arrival(Struct, frozen=True, array_like=True):
    """Tokens that arrived together, this many milliseconds after those before."""

    tokens: int
    ms: float


class Run(Struct):
    """One answer.

    - `prompt`: number of the prompt in its workload.
    - `sampling`: "own" is the pair's own sampling.
    - `first_ms`: time until the first text, including the prompt.
    - `total_ms`: time until the last text.
    - `rate`: null if the answer is too short for one.
    - `digest`: hash of the text, so that answers can be compared without it.
    - `source`: where most drafts came from.
    - `reason`: why there were no drafts.
    - `joules`: energy used by the whole machine.
    - `others`: cores that other programs used.
    """

    workload: str
    prompt: int
    repetition: int
    mode: Mode
    sampling: Sampling
    tokens: int
    prompt_tokens: int
    first_ms: float
    total_ms: float
    write_ms: float
    rate: float | None
    digest: str
    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    source: str | None = None
    reason: str | None = None
    finish: str = ""
    joules: float | None = None
    others: float | None = None
    rounds: list[Round] = []
    arrivals: list[Arrival] = []


class Side(Struct):
    """All answers of one mode together.

    - `rate`: all tokens divided by all time.
    - `first_ms`, `total_ms`: medians.
    """

    answers: int
    tokens: int
    rate: float | None
    first_ms: float | None
    total_ms: float | None
    joules_per_token: float | None = None


class Acceptance(Struct):
    """Acceptance of drafts, with three figures that are all called acceptance rate.

    - `of_drafted`: accepted tokens per drafted token (llama.cpp, vLLM).
    - `of_answer`: accepted tokens per token of the answers (LM Studio).
    - `conditional`: the probability that a token is accepted if all before it were (α in the
      papers), estimated from the passes with a rejection.
    - `mean_length`: accepted tokens per pass that had drafts.
    - `by_position`: the fraction of first, second, … drafts that were accepted.
    - `sources`: drafted and accepted tokens by the source of the drafts.
    """

    drafted: int
    accepted: int
    rejected: int
    of_drafted: float | None
    of_answer: float | None
    conditional: float | None
    mean_length: float | None
    tokens_per_pass: float | None
    by_position: list[float] = []
    sources: dict[str, tuple[int, int]] = {}


class Difference(Struct):
    """The place where the two texts of a prompt diverge at temperature 0.

    - `at`: number of equal characters before it.
    - `plain`, `speculative`: how the texts continue.
    - `gap`: the difference in log-probability, under the target, between the token of the plain
      text and the next best one. If it is small, this is a near-tie within the rounding of wider
      passes.
    """

    prompt: int
    at: int
    plain: str
    speculative: str
    gap: float | None = None


class Theory(Struct):
    """Predictions from the measured costs: of passes by their width at load, of the rest from answers.

    - `tokens_per_pass`: by the formula, at the measured `conditional` acceptance and mean `depth`.
    - `speed_up`: from that and the costs.
    - `best_depth`, `best_speed_up`: the best of all fixed depths by replay.
    - `optimum`: the speed-up with perfect knowledge of what will be accepted.
    - `reached`: the fraction of that optimum that the chosen depths reached.
    - `regret`: the time lost against the best fixed depth, as a fraction of it. Below 0: better
      than any fixed depth.
    """

    depth: float
    tokens_per_pass: float
    speed_up: float
    best_depth: int | None = None
    best_speed_up: float | None = None
    optimum: float | None = None
    reached: float | None = None
    regret: float | None = None


class Workload(Struct):
    """One kind of work with one kind of sampling.

    - `identical`: all texts of the two modes were equal; null if they need not be.
    - `speed_up`: of rates.
    - `latency`: of the times of whole answers, including the prompt.
    - `note`: why all or a part of it was not measured.
    """

    name: str
    about: Literal["code", "text"]
    sampling: Sampling
    verdict: Verdict
    plain: Side | None = None
    speculative: Side | None = None
    speed_up: Estimate | None = None
    latency: Estimate | None = None
    acceptance: Acceptance | None = None
    identical: bool | None = None
    differences: list[Difference] = []
    theory: Theory | None = None
    note: str = ""


class Theirs(Struct):
    """Another server's answers to the same prompts, at temperature 0.

    - `ours`: our rate with drafts divided by theirs, as the other server is set up.
    - `drafted`, `accepted`: tokens, as the server reports them; null if it reports no drafts.
    - `same_prompts`: its prompts had as many tokens as ours.
    - `identical`: its texts are equal to our plain ones.
    """

    workload: str
    side: Side | None = None
    ours: Estimate | None = None
    note: str = ""
    drafted: int | None = None
    accepted: int | None = None
    same_prompts: bool | None = None
    identical: bool | None = None


class Ranked(Struct):
    """One of several drafts for the same target.

    - `size_ratio`: the size of its file divided by the target's.
    - `code`, `text`: geometric means of the speed-ups of such work.
    - `note`: why it could not be measured.
    """

    draft: str
    overall: Estimate | None = None
    code: float | None = None
    text: float | None = None
    of_drafted: float | None = None
    size_ratio: float | None = None
    sentence: str = ""
    note: str = ""


class Distribution(Struct):
    """A comparison of this many sampled answers each way.

    - `p`: the probability that their beginnings differ this much by chance alone.
    """

    answers: int
    p: float


class Costs(Struct):
    """The cost of passes at load by their width in tokens, and the cost of a round besides them."""

    target_ms: dict[int, float]
    draft_ms: dict[int, float] = {}
    overhead_ms: float = 0.0


class Machine(Struct):
    system: str
    processor: str
    cores: int
    backend: str | None = None


class Report(Struct):
    """The results of one bench.

    - `when`: when it began, in UTC.
    - `seconds`: how long it took.
    - `tokens`: maximum tokens of an answer.
    - `partial`: it ended early, and the report covers what was complete.
    - `quiet`: false if other programs disturbed it.
    - `memory`: bytes used by the loaded pair.
    - `overall`: geometric mean of the workloads' speed-ups at temperature 0.
    - `against`: the other server. `theirs` are its figures, and `their_runs` its answers.
    - `drafts`: several drafts that were compared, the best first. The rest of the report is about
      that one.
    - `distribution`: of the pair's own sampling.
    """

    pair: str
    when: str
    seconds: float
    tokens: int
    partial: bool
    quiet: bool | None
    machine: Machine
    sentence: str
    workloads: list[Workload]
    runs: list[Run]
    localspec: str
    target: str | None = None
    draft: str | None = None
    context: int | None = None
    memory: int | None = None
    overall: Estimate | None = None
    costs: Costs | None = None
    against: str | None = None
    theirs: list[Theirs] = field(default_factory=list)
    their_runs: list[Run] = field(default_factory=list)
    drafts: list[Ranked] = field(default_factory=list)
    distribution: Distribution | None = None
    notes: list[str] = field(default_factory=list)
    version: Literal[1] = 1


def as_json(report: Report) -> dict[str, Any]:
    """Return the report as plain values, ready to be written as JSON."""
    value: dict[str, Any] = msgspec.to_builtins(report, str_keys=True)
    return value


def read_report(name: str) -> Report:
    """Return a report that `--json` wrote.

    Raises:
        UsageError: the file cannot be read, or is no report.
    """
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=Report)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{name} is not a report of `localspec bench --json`: {error}.") from error


def schema_text() -> str:
    """Return the JSON schema of a report."""
    described = msgspec.json.schema(Report)
    for definition in described["$defs"].values():  # some versions of msgspec leave the indentation
        if "description" in definition:
            definition["description"] = inspect.cleandoc(definition["description"])
    named = {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
    return json.dumps(named, indent=1)
