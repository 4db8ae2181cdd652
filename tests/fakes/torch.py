"""As much of torch as this server uses, of lists: the real one takes seconds and memory to load."""

from __future__ import annotations

from collections.abc import Iterable

__version__ = "0.0"
float32 = "float32"
int32 = "int32"


class Tensor(list[float]):
    """Of one dimension."""

    device = "cpu"

    def __setitem__(self, places: Iterable[int], values: Iterable[float]) -> None:  # type: ignore[override]
        for place, value in zip(places, values, strict=True):
            super().__setitem__(place, value)

    def argmax(self) -> int:
        return self.index(max(self))

    def tolist(self) -> list[float]:
        return list(self)


def tensor(values: Iterable[float], *, dtype: str = float32, device: str = "cpu") -> Tensor:
    made = Tensor(values)
    made.device = device
    return made


def zeros(size: int, *, dtype: str) -> Tensor:
    return Tensor([0.0] * size)
