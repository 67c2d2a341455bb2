"""What a bench has found, as `--json` writes it and `bench compare` reads it. schema.json describes it.

Times in milliseconds unless a name says otherwise; rates in tokens per second, from an answer's first token
to its last, as llama-server counts. "plain" is the target alone, "speculative" with drafts as usual.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from localspec.errors import UsageError

VERSION = 1
SCHEMA = Path(__file__).with_name("schema.json")
Mode = Literal["plain", "speculative"]
Sampling = Literal["greedy", "own"]
Verdict = Literal["faster", "same", "off", "slower", "unclear", "not measured"]


class Estimate(Struct, frozen=True):
    """A figure and its 95 % bootstrap interval, of so many pairs of answers; null: too few for one."""

    value: float
    low: float | None = None
    high: float | None = None
    pairs: int = 1


class Round(Struct, frozen=True, array_like=True):
    """What a target pass brought: so many tokens, after so many drafted ones, of which so many were accepted,
    from drafts of this kind. Another server than localspec says it of what came together, which may be more.
    """

    tokens: int
    drafted: int
    accepted: int
    kind: str = ""


class Arrival(Struct, frozen=True, array_like=True):
    """What came together: so many tokens, so many milliseconds after those before."""

    tokens: int
    ms: float


class Run(Struct):
    """One answer. `sampling` "own": as the pair samples by itself.

    `prompt`: the number of the prompt in its workload. `first_ms`: until the first text came, prompt and
    all; `total_ms`: until the last. `rate`: null where an answer is too short for one. `source`: where most
    drafts came from. `reason`: why there were none. `joules`: of the whole machine. `others`: cores that
    other programs kept busy. `digest`: of the text, so that answers can be compared without it.
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
    """Answers of one mode together. `rate`: all tokens by all time; times are medians."""

    answers: int
    tokens: int
    rate: float | None
    first_ms: float | None
    total_ms: float | None
    joules_per_token: float | None = None


class Acceptance(Struct):
    """Three figures that are all called acceptance rate.

    `of_drafted`: accepted by drafted tokens (llama.cpp, vLLM). `of_answer`: accepted by all tokens of the
    answers (LM Studio). `conditional`: the chance that a token is accepted if all before it were (α of the
    papers), from the passes that were rejected. `mean_length`: accepted tokens of a pass that had drafts.
    `by_position`: the share of first, second, … drafts that were accepted. `sources`: drafted and accepted
    tokens by where they came from.
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
    """Where the two texts of a prompt part at temperature 0: after so many characters, and how they go on.

    `gap`: how much likelier, as a difference of log-probabilities, the target found the token it wrote
    plainly than the next best one there; small: a near-tie within the rounding of wider passes.
    """

    prompt: int
    at: int
    plain: str
    speculative: str
    gap: float | None = None


class Theory(Struct):
    """What arithmetic says beside the measurement, from what rounds cost here: passes by their width as at
    the load, and all else as answers took it.

    `tokens_per_pass`: the formula's, at the measured `conditional` acceptance and mean `depth`; `speed_up`:
    from it and the costs. `best_depth`: of all fixed depths the best by replay, with its speed-up; `optimum`:
    the speed-up of somebody who knows beforehand what will be accepted. `reached`: the share of that which
    the depths chosen here reached; `regret`: the time they lost against the best fixed depth, as a share of
    it (less than 0: they were better than any fixed one).
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
    """One kind of work, at one kind of sampling. `identical`: whether all texts of the two modes were
    equal; null where they need not be. `speed_up`: of rates; `latency`: of whole answers' times, with the
    prompt. `note`: why it was not measured, or what of it was not.
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
    """What another server made of the same prompts, at temperature 0. `ours`: our rate with drafts over
    theirs, as it is set up. `drafted`, `accepted`: tokens, as it says; null where it says nothing of drafts.
    `same_prompts`: whether its prompts had as many tokens as ours. `identical`: whether its texts are those
    that we wrote plainly.
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
    """One of several drafts for the same target. `size_ratio`: its file by the target's. `code`, `text`: the
    geometric means of the speed-ups of such work. `note`: why it could not be measured.
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
    """Of so many sampled answers each way: how likely their beginnings differ so much by chance alone."""

    answers: int
    p: float


class Costs(Struct):
    """What passes cost at load, by their width in tokens, and what a round costs beside them."""

    target_ms: dict[int, float]
    draft_ms: dict[int, float] = {}
    overhead_ms: float = 0.0


class Machine(Struct):
    system: str
    processor: str
    cores: int
    backend: str | None = None


class Report(Struct):
    """`seconds` it took; `when` it began, in UTC. `partial`: it ended early, and what there is is told.
    `tokens`: of an answer at most. `memory`: bytes that the loaded pair has. `overall`: the geometric mean of
    the workloads' speed-ups at temperature 0. `quiet`: false where other programs disturbed it. `against`:
    the other server, `theirs` what is said of its answers, and `their_runs` these. `drafts`: of several
    that were compared, the best first; the rest of the report is of that one. `distribution`: of the pair's
    own sampling.
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
    """Plain values, as they are written."""
    value: dict[str, Any] = msgspec.to_builtins(report, str_keys=True)
    return value


def read(name: str) -> Report:
    """A report that `--json` wrote.

    Raises:
        UsageError: it cannot be read, or is none.
    """
    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=Report)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{name} is not a report of `localspec bench --json`: {error}.") from error


def schema() -> str:
    """The text of schema.json."""
    described = msgspec.json.schema(Report)
    named = {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}
    return json.dumps(named, indent=1) + "\n"
