"""Binary search for the largest number that fits, in the fewest trials that are certain to find it. No I/O.

With c candidates there are c + 1 results: each candidate, and none. A trial halves them at best, so that
ceil(log2(c + 1)) trials are needed, and enough. A guess may come before the middle only where what is left after
either outcome can still be found within that number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

_NEAR = 0.1
"""After a guess, the next number is this share away from it, then twice as far, and so on."""


def candidates(low: int, high: int, precision: float) -> Sequence[int]:
    """Numbers from `low` to `high`, both included, neighbours at most the share `precision` apart; 0: every number."""
    if precision <= 0:
        return range(low, high + 1)
    numbers = []
    number = low
    while number < high:
        numbers.append(number)
        number = max(number + 1, int(number * (1 + precision)))
    return [*numbers, high]


@dataclass(frozen=True)
class Search:
    """The state of a search over ascending `numbers`.

    `fitting` is the place of the largest number that is known to fit (-1: none yet), `failing` that of the smallest
    that is known not to (one after the last: none yet). `left` trials are certain to be enough. `guess` is the place
    near which the result is expected.
    """

    numbers: Sequence[int]
    fitting: int
    failing: int
    left: int
    guess: int | None = None
    tried: int = 0

    @classmethod
    def over(cls, numbers: Sequence[int], guess: int | None = None) -> Search:
        """A search that has not begun; `guess` is a number, not a place."""
        place = None if guess is None else max(bisect_right(numbers, guess) - 1, 0)
        return cls(numbers, -1, len(numbers), most_trials(len(numbers)), place)

    @property
    def next(self) -> int | None:
        """The number to try; None if the result is known."""
        place = self._place()
        return None if place is None else self.numbers[place]

    @property
    def found(self) -> int | None:
        """The largest number that is known to fit, the result once `next` is None."""
        return None if self.fitting < 0 else self.numbers[self.fitting]

    @property
    def bracket(self) -> tuple[int | None, int | None]:
        """The largest number known to fit, and the smallest known not to."""
        return self.found, None if self.failing == len(self.numbers) else self.numbers[self.failing]

    def after(self, number: int, fits: bool) -> Search:
        """The search with the outcome of a trial of one of its numbers, whether `next` named it or not."""
        place = bisect_right(self.numbers, number) - 1
        fitting = max(self.fitting, place) if fits else self.fitting
        failing = self.failing if fits else min(self.failing, place)
        left = max(self.left - 1, most_trials(failing - fitting - 1))
        return replace(self, fitting=fitting, failing=failing, left=left, tried=self.tried + 1)

    def _place(self) -> int | None:
        if self.failing - self.fitting <= 1:
            return None
        # What is left after either outcome can be found in one trial less.
        most = 1 << (self.left - 1)
        lowest = max(self.failing - most, self.fitting + 1)
        highest = min(self.fitting + most, self.failing - 1)
        return min(max(self._wanted(), lowest), highest)

    def _wanted(self) -> int:
        """Around the guess in growing steps until the result is between two trials, then the middle."""
        middle = (self.fitting + self.failing) // 2
        if self.guess is None or (self.fitting >= 0 and self.failing < len(self.numbers)):
            return middle
        if not self.tried:
            return self.guess
        near = self.numbers[self.guess] * _NEAR
        reach = bisect_right(self.numbers, self.numbers[self.guess] + near) - 1 - self.guess
        step = max(reach, 1) << (self.tried - 1)
        return self.fitting + step if self.fitting >= 0 else self.failing - step


def most_trials(numbers: int) -> int:
    """Trials that are certain to find the largest fitting one of this many numbers, or that none fits."""
    return numbers.bit_length()
