"""How two sides continue the same prompts: agreement of greedy tokens, KL divergence, perplexity, and the verdict."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

_ROUNDING = 1e-6
"""The error of a sum of probabilities that come from 32-bit log-probabilities."""

_MOST_NATS = 300.0


class Position(NamedTuple):
    """A token with its own log-probability and those of the likeliest tokens at its position.

    The end of a text is the token "". `logprobs` is empty where a side gives none.
    """

    token: str
    logprobs: Mapping[str, float]


class Continuation(NamedTuple):
    """A side's answer to one prompt: the greedy tokens, or why it failed.

    `prompt` has the prompt's tokens after the first; None where the side gives no log-probabilities of prompts.
    """

    positions: Sequence[Position] = ()
    prompt: Sequence[Position] | None = None
    error: str = ""


def _identifying(logprobs: Mapping[str, float]) -> dict[str, float]:
    """The entries whose text stands for one token: parts of a character all look alike."""
    return {text: logprob for text, logprob in logprobs.items() if text and "\ufffd" not in text}


def _term(p: float, q: float) -> float:
    return p * math.log(p / q) if p > 0 else 0.0


def divergence_bound(p: Mapping[str, float], q: Mapping[str, float], unranked: str | None = None) -> float | None:
    """A lower bound of the KL divergence KL(p || q) in nats, from the likeliest tokens of both; None if one has none.

    Counting outcomes together never makes the divergence larger. So the tokens that both give count one by one, and
    all others together, those that only `p` gives by themselves where `q` leaves them less than their part of it: each
    is at most as likely there as the least likely token that `q` gives, but for `unranked`, which need not be one of
    the likeliest.
    """
    if not p or not q:
        return None
    ours, theirs = _identifying(p), _identifying(q)
    common = ours.keys() & theirs.keys()
    total = sum(math.exp(ours[token]) * (ours[token] - theirs[token]) for token in common)
    rest_p = max(0.0, 1 - sum(math.exp(ours[token]) for token in common))
    rest_q = max(_ROUNDING, 1 - sum(math.exp(theirs[token]) for token in common))
    single = [token for token in ours if token not in common]
    only_p = min(rest_p, sum(math.exp(ours[token]) for token in single))
    least = math.exp(min((logprob for token, logprob in q.items() if token != unranked), default=0.0))
    listed = sum(map(math.exp, q.values()))
    most_q = max(_ROUNDING, min(len(single) * least, 1 - listed))
    if only_p * rest_q > most_q * rest_p:
        total += _term(only_p, most_q) + _term(rest_p - only_p, max(_ROUNDING, rest_q - most_q))
    else:
        total += _term(rest_p, rest_q)
    return max(0.0, total)


def perplexity(logprobs: Sequence[float]) -> float:
    """exp of the mean negative log-probability, at most the largest float: engines give -9999 or -inf for probability
    0."""
    return math.exp(min(_MOST_NATS, -fmean(logprobs)))


class Difference(NamedTuple):
    """How two continuations of one prompt differ.

    The first `common` of `tokens` are equal, `first` has what each side generates after them. `gap` is how much less
    likely B's token is there than A's, in nats and by A's own log-probabilities; None where A does not give them.
    `divergences` are bounds at the positions whose context is the same: up to the first difference. `in_prompt` are
    those in the prompt, where both sides cut it into the same tokens.
    """

    tokens: int
    common: int
    first: tuple[str, str] | None
    gap: float | None
    divergences: list[float]
    in_prompt: list[float]


def compare(a: Continuation, b: Continuation) -> Difference:
    """Compare two continuations token by token up to the first difference: after it the contexts differ."""
    common, divergences, in_prompt = 0, list[float](), _in_prompt(a.prompt or (), b.prompt or ())
    for ours, theirs in zip(a.positions, b.positions, strict=False):
        bound = divergence_bound(ours.logprobs, theirs.logprobs)
        if bound is not None:
            divergences.append(bound)
        if ours.token != theirs.token:
            listed = ours.logprobs if ours.logprobs.keys() >= {ours.token, theirs.token} else None
            gap = None if listed is None else listed[ours.token] - listed[theirs.token]
            return Difference(_longer(a, b), common, (ours.token, theirs.token), gap, divergences, in_prompt)
        common += 1
    tokens = _longer(a, b)
    rest = [side.positions[common].token if len(side.positions) > common else "" for side in (a, b)]
    return Difference(tokens, common, (rest[0], rest[1]) if tokens > common else None, None, divergences, in_prompt)


def _in_prompt(a: Sequence[Position], b: Sequence[Position]) -> list[float]:
    if [each.token for each in a] != [each.token for each in b]:
        return []
    bounds = [divergence_bound(ours.logprobs, theirs.logprobs, ours.token) for ours, theirs in zip(a, b, strict=True)]
    return [bound for bound in bounds if bound is not None]


def _longer(a: Continuation, b: Continuation) -> int:
    return max(len(a.positions), len(b.positions))


@dataclass(frozen=True)
class Thresholds:
    """Bounds within which two sides are the same: the least agreement, the most of the other known figures."""

    agreement: float = 0.98
    divergence: float = 0.01
    """The most nats, as the mean over the compared positions."""
    perplexity: float = 1.02
    """The most that the perplexity of one side may be, as a multiple of the other's."""


@dataclass
class Comparison:
    """All prompts of two sides, in the same order."""

    a: Sequence[Continuation]
    b: Sequence[Continuation]
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        pairs = list(zip(self.a, self.b, strict=True))
        both = {number: (a, b) for number, (a, b) in enumerate(pairs, 1) if not a.error and not b.error}
        self._both = [*both.values()]
        self.differences = [compare(a, b) for a, b in self._both]
        self._numbers = [*both]
        self.failed_on_both = sum(bool(a.error and b.error) for a, b in pairs)
        self.failed_on_one = len(pairs) - len(self._both) - self.failed_on_both

    def by_prompt(self) -> list[tuple[int, Difference]]:
        """The differences with the number of their prompt, from 1."""
        return list(zip(self._numbers, self.differences, strict=True))

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self.differences)

    @property
    def compared(self) -> int:
        """Tokens that both sides chose after the same text: those up to the first difference, it included."""
        return sum(each.common + (each.first is not None) for each in self.differences)

    @property
    def agreement(self) -> float:
        """Share of the compared tokens that are equal; 1 where there are none. It does not depend on the length."""
        return 1 - len(self.first_differences) / max(1, self.compared)

    @property
    def equal_share(self) -> float:
        """Share of all tokens that come before the first difference of their prompt; 1 where there are none."""
        return sum(each.common for each in self.differences) / self.tokens if self.tokens else 1.0

    @property
    def first_differences(self) -> list[int]:
        """Positions, from 1, of the prompts that differ."""
        return sorted(each.common + 1 for each in self.differences if each.first is not None)

    @property
    def gaps(self) -> list[float]:
        return [each.gap for each in self.differences if each.gap is not None]

    @property
    def divergences(self) -> list[float]:
        return [bound for each in self.differences for bound in (*each.in_prompt, *each.divergences)]

    @property
    def perplexities(self) -> tuple[float, float] | None:
        """Perplexities of the prompts that both sides give log-probabilities for; None where there are none."""
        ours: list[float] = []
        theirs: list[float] = []
        for a, b in self._both:
            if a.prompt and b.prompt:
                if len(a.prompt) != len(b.prompt):
                    return None  # per token, and the two tokenizers have other tokens
                ours += [each.logprobs[each.token] for each in a.prompt]
                theirs += [each.logprobs[each.token] for each in b.prompt]
        return (perplexity(ours), perplexity(theirs)) if ours else None

    def agreeing(self) -> list[tuple[float, float]]:
        """Share of the prompts whose first n tokens are equal, by n."""
        ends = self.first_differences
        longest = max((each.tokens for each in self.differences), default=0)
        total = max(1, len(self.differences))
        return [(float(n), 1 - sum(end <= n for end in ends) / total) for n in range(longest + 1)]

    def by_position(self) -> list[tuple[float, float]]:
        """Mean bound of the divergence by position, from 1."""
        columns: dict[int, list[float]] = {}
        for each in self.differences:
            for position, bound in enumerate(each.divergences, 1):
                columns.setdefault(position, []).append(bound)
        return [(float(position), fmean(bounds)) for position, bounds in sorted(columns.items())]

    def reasons(self) -> Iterator[str]:
        """Yield why the sides differ; nothing where they agree."""
        limits = self.thresholds
        if self.failed_on_one:
            yield f"{self.failed_on_one} prompts failed on one side only"
        if self.agreement < limits.agreement:
            yield f"agreement {self.agreement:.4f}: expected at least {limits.agreement:g}"
        if self.divergences and fmean(self.divergences) > limits.divergence:
            yield f"KL divergence {fmean(self.divergences):.4f} nats or more: expected at most {limits.divergence:g}"
        if (found := self.perplexities) is not None and max(found) / min(found) > limits.perplexity:
            yield f"perplexity {found[0]:.4g} and {found[1]:.4g}: expected a ratio of at most {limits.perplexity:g}"

    def as_json(self) -> dict[str, Any]:
        firsts, bounds, gaps, reasons = self.first_differences, self.divergences, self.gaps, list(self.reasons())
        found = self.perplexities
        return {
            "verdict": "differs" if reasons else "agrees",
            "reasons": reasons,
            "thresholds": vars(self.thresholds),
            "prompts": {
                "compared": len(self.differences),
                "equal": len(self.differences) - len(firsts),
                "failed_on_one_side": self.failed_on_one,
                "failed_on_both_sides": self.failed_on_both,
            },
            "agreement": {"share": self.agreement, "compared_tokens": self.compared},
            "before_first_difference": {"share": self.equal_share, "tokens": self.tokens},
            "first_difference": {"least": firsts[0], "median": median(firsts)} if firsts else None,
            "gap_nats": {"median": median(gaps), "max": max(gaps), "known": len(gaps)} if gaps else None,
            "kl_lower_bound_nats": {"mean": fmean(bounds), "max": max(bounds), "positions": len(bounds)}
            if bounds
            else None,
            "perplexity": {"a": found[0], "b": found[1]} if found else None,
        }
