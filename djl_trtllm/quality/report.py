"""A whole comparison: both sides one after the other, so that they need not fit in memory together, and its report."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from djl_trtllm.bench.apis import read_prompts
from djl_trtllm.bench.report import Chart, Line, picture
from djl_trtllm.errors import BenchmarkError
from djl_trtllm.quality.figures import Comparison, Thresholds
from djl_trtllm.quality.sides import Asked, Side
from djl_trtllm.version import __version__

DEFAULT_PROMPTS = Path(__file__).with_name("prompts.jsonl")
MOST_PROMPTS = 10_000
_SHOWN = 3
_LONGEST = 60


@dataclass
class Report:
    """Two sides with what they answered."""

    a: Side
    b: Side
    asked: Asked
    comparison: Comparison
    warnings: list[str] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        return any(self.comparison.reasons())

    def table(self) -> list[list[str]]:
        """Rows of a name and a value; an unknown value is `not available`."""
        found = self.comparison
        firsts, bounds, gaps = found.first_differences, found.divergences, found.gaps
        rows = {
            "prompts with equal answers": f"{len(found.differences) - len(firsts)} of {len(found.differences)}",
            "agreement of tokens": f"{100 * found.agreement:.2f} % of {found.compared:,} after the same text",
            "before a first difference": f"{100 * found.equal_share:.2f} % of {found.tokens:,} tokens",
            "first difference": f"token {median(firsts):g} (median), {firsts[0]} (least)" if firsts else "none",
            "gap of likelihood there": gaps and f"{median(gaps):.3g} nats (median), {max(gaps):.3g} (most)",
            "KL divergence, at least": bounds and f"{fmean(bounds):.4g} nats (mean), {max(bounds):.3g} (most)",
            "perplexity of the prompts": found.perplexities and "{:.4g} and {:.4g}".format(*found.perplexities),
        }
        return [[name, str(text or "not available")] for name, text in rows.items()]

    def conclusion(self) -> Iterator[str]:
        """Yield examples of differences, and the verdict at last."""
        for number, each in self._differing()[:_SHOWN]:
            ours, theirs = each.first or ("", "")
            yield f"prompt {number}, token {each.common + 1}: {_token(ours)} and {_token(theirs)}"
        reasons = list(self.comparison.reasons())
        yield "differs: " + "; ".join(reasons) if reasons else "agrees"

    def as_json(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "a": {"name": self.a.name, "notes": self.a.notes},
            "b": {"name": self.b.name, "notes": self.b.notes},
            "output_tokens": self.asked.tokens,
            **self.comparison.as_json(),
            "differing": [
                {"prompt": number, "token": each.common + 1, "a": each.first[0], "b": each.first[1]}
                for number, each in self._differing()
            ],
            "warnings": self.warnings,
        }

    def _differing(self) -> list[tuple[int, Any]]:
        """The prompts that differ by their number (from 1), the earliest difference first."""
        found = [(number, each) for number, each in self.comparison.by_prompt() if each.first is not None]
        return sorted(found, key=lambda pair: pair[1].common)


def _token(text: str) -> str:
    return repr(text[:_LONGEST]) if text else "the end, or a part of a character"


def run(
    a: Side, b: Side, prompts: Path | None, tokens: int, thresholds: Thresholds, say: Callable[[str], None]
) -> Report:
    """Ask both sides, and compare. Raises DjlTrtllmError if a side cannot answer, or answers no prompt."""
    found = read_prompts(prompts or DEFAULT_PROMPTS, tokens, "--prompts")
    if len(found) > MOST_PROMPTS:
        raise BenchmarkError(f"--prompts {prompts}: {len(found):,} prompts; expected at most {MOST_PROMPTS:,}")
    if any(prompt.tokens for prompt in found):
        raise BenchmarkError(
            f"--prompts {prompts}: prompts of which only the length is known; record them with "
            "SERVING_RECORD_PROMPTS=ids or text, or give prompts of your own"
        )
    asked = Asked(found, tokens)
    answers = []
    for side in (a, b):
        say(f"{side.name}: {len(found)} prompts, up to {tokens} tokens each")
        answers.append(side.answer(asked))
        errors = [each.error for each in answers[-1] if each.error]
        if len(errors) == len(found):
            raise BenchmarkError(f"{side.name} answers no prompt: {errors[0]}")
        for note in side.notes:
            say(f"note: {side.name}: {note}")
    report = Report(a, b, asked, Comparison(answers[0], answers[1], thresholds))
    for side, answer in zip((a, b), answers, strict=True):
        errors = [each.error for each in answer if each.error]
        if errors:
            report.warnings.append(f"{side.name}: {len(errors)} prompts failed, the first one: {errors[0]}")
    if not report.comparison.differences:
        raise BenchmarkError("no prompt was answered by both sides: " + "; ".join(report.warnings))
    return report


def picture_of(report: Report) -> str:
    """Return the picture as SVG: prompts that still agree, and the divergence, by position."""
    found = report.comparison
    lines = [Line("agree", found.agreeing(), steps=True)]
    drawn = [Chart("Prompts whose answers agree up to a token", "tokens", "share", lines)]
    if bounds := found.by_position():
        drawn.append(Chart("KL divergence, at least", "token", "nats", [Line("mean", bounds)]))
    return picture(drawn)
