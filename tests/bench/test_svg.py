from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from djl_trtllm.bench.svg import COLOURS, HEIGHT, WIDTH, Axis, Series, chart

CLIENTS = Axis("clients")
LINE = Series("tokens", [(1.0, 10.0), (2.0, 20.0), (4.0, 30.0)])


def drawn(*series: Series, x: Axis = CLIENTS, marked: tuple[float, str] | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(chart("Title & <more>", x, Axis("tok/s"), series, marked=marked))


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter() if element.tag.endswith("text")]


def paths(picture: ElementTree.Element) -> list[str]:
    """The lines of the series."""
    found = [element for element in picture.iter() if element.tag.endswith("path")]
    return [element.attrib["d"] for element in found if element.attrib.get("stroke") in COLOURS]


def test_a_chart_is_a_document_with_its_texts() -> None:
    found = texts(drawn(LINE))
    assert {"Title & <more>", "clients", "tok/s", "tokens", "0", "10", "30"} <= set(found)


def test_the_same_data_gives_the_same_text() -> None:
    assert len({chart("t", Axis("x"), Axis("y"), [LINE]) for _ in range(3)}) == 1


def test_points_are_in_proportion_inside_the_frame() -> None:
    (path,) = paths(drawn(LINE))
    points = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path)]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert (x3 - x2) == pytest.approx(2 * (x2 - x1), abs=0.2)
    assert (y1 - y2) == pytest.approx(y2 - y3, abs=0.2)
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in points)


def test_on_a_logarithmic_axis_doubling_is_a_step() -> None:
    (path,) = paths(drawn(LINE, x=Axis("clients", log=True)))
    (x1, _), (x2, _), (x3, _) = (tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path))
    assert (x3 - x2) == pytest.approx(x2 - x1, abs=0.2)


@pytest.mark.parametrize(("top", "marks"), [(3.0, ["0.5", "1", "1.5", "2", "2.5", "3"]), (70.0, ["20", "40", "60"])])
def test_marks_are_round(top: float, marks: list[str]) -> None:
    found = texts(drawn(Series("a", [(1.0, top)])))
    assert set(marks) <= set(found) or set(marks[1::2]) <= set(found)


def test_a_missing_value_interrupts_the_line() -> None:
    (path,) = paths(drawn(Series("a", [(1.0, 1.0), (2.0, math.nan), (3.0, 1.0), (4.0, 2.0)])))
    assert path.count("M") == 2 and path.count("L") == 1


def test_steps_keep_their_height() -> None:
    (path,) = paths(drawn(Series("a", [(1.0, 1.0), (2.0, 2.0)], steps=True)))
    assert re.fullmatch(r"M[\d.]+ [\d.]+H[\d.]+V[\d.]+", path)


def test_labels_stand_beside_dots() -> None:
    picture = drawn(Series("a", [(1.0, 1.0), (2.0, 2.0)], ["one", "two"]))
    assert {"one", "two"} <= set(texts(picture))
    assert len([element for element in picture.iter() if element.tag.endswith("circle")]) == 2


def test_a_mark_has_its_text() -> None:
    assert "knee" in texts(drawn(LINE, marked=(2.0, "knee")))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("points", [[], [(0.0, 0.0)], [(1.0, math.nan)], [(5.0, 5.0)]])
def test_hardly_any_data_is_a_chart_too(points: list[tuple[float, float]], log: bool) -> None:
    text = chart("t", Axis("x", log=log), Axis("y", log=log), [Series("a", points)])
    ElementTree.fromstring(text)
    assert "nan" not in text


def test_a_long_legend_has_rows_above_the_frame() -> None:
    names = [f"a server with a long name, {number} streams" for number in range(5)]
    picture = drawn(*(Series(name, [(1.0, 10.0), (2.0, 20.0)]) for name in names))
    shown = [element.attrib for element in picture.iter() if element.text in names]
    assert all(float(each["x"]) + 6.4 * len(names[0]) < WIDTH for each in shown)
    heights = [float(each["y"]) for each in shown]
    assert len({(each["x"], each["y"]) for each in shown}) == len(names)
    rows = len(set(heights))
    assert picture.attrib["viewBox"] == f"0 0 {WIDTH} {HEIGHT + 16 * (rows - 1)}"
    (plot,) = (element for element in picture if element.tag.endswith("g"))
    assert plot.attrib["transform"] == f"translate(0 {16 * (rows - 1)})"
    tops = [float(height) for path in paths(picture) for height in re.findall(r"[ML][\d.]+ ([\d.]+)", path)]
    assert max(heights) < min(tops) and min(heights) + 16 * (rows - 1) > 20


def test_a_name_longer_than_a_row_has_one() -> None:
    (name,) = (element for element in drawn(Series("n" * 200, [(1.0, 1.0)])).iter() if element.text == "n" * 200)
    assert float(name.attrib["y"]) == 38
