"""When a run has got somewhere, by hand."""

import pytest

from agents.reach import columns, reached, read_ranges
from segment_env.errors import UserError

RANGES = {"recall": (0.9, 1.0), "rate": (0.18, 0.22)}


def cell(*points: tuple[float, float], total: int = 400) -> dict:
    """A cell's file with a validation every 100 bytes decoded, half as many read: pairs of recall and rate."""
    curve = [
        {"validation_recall": recall, "validation_rate": rate, "bytes_decoded": 100 * n, "bytes_read": 50 * n}
        for n, (recall, rate) in enumerate(points, 1)
    ]
    return {"curve": curve, "bytes_decoded": total, "bytes_read": total // 2}


def test_all_ranges_must_hold_at_once() -> None:
    curve = cell((0.95, 0.3), (0.8, 0.2), (0.9, 0.22), (0.1, 0.2))["curve"]
    assert reached(curve, RANGES) == 2
    assert reached(curve[:2], RANGES) is None and reached([], RANGES) is None


def test_a_row_whose_seeds_all_get_there() -> None:
    """At 100 and 300 bytes: 200 +- 12.7062 * 100. Later validations: 4 and 2, within: 3 and 2; common from the third on."""
    first = cell((0.9, 0.2), (0.8, 0.2), (1.0, 0.2), (1.0, 0.2))
    second = cell((0.0, 0.2), (0.0, 0.2), (0.9, 0.2), (0.9, 0.2))
    assert columns([first, second], RANGES) == ["2 of 2", "200 ± 1,271", "100 ± 635", "83%", "0.917", "0.050"]


def test_a_seed_that_does_not_get_there_makes_a_bound() -> None:
    first, never = cell((0.0, 0.2), (1.0, 0.2), (1.0, 0.3), (1.0, 0.2)), cell(*[(0.0, 0.2)] * 4)
    assert columns([first, never], RANGES) == ["1 of 2", "> 300", "> 150", "67%", "1.000", "-"]
    assert columns([never, never], RANGES) == ["0 of 2", "> 400", "> 200", "-", "-", "-"]


@pytest.mark.parametrize(
    "node, says",
    [
        ([], "reach must map validation figures to ranges, as in {recall: [0.9, 1]}, got []"),
        ({"recall": [0.9]}, "reach must map"),
        ({"recall": [0.9, "1"]}, "reach must map"),
        ({"recall": [1, 0.9]}, "reach.recall=[1, 0.9] is no range"),
        ({"loss": [0, 1]}, "reach.loss=[0, 1] is no range of a validation figure; choose from bits_per_byte, rate, precision, recall"),
    ],
)
def test_ranges_that_are_none(node: object, says: str) -> None:
    with pytest.raises(UserError) as error:
        read_ranges(node)
    assert str(error.value).startswith(says)


def test_ranges_are_read() -> None:
    assert read_ranges({"recall": [0.9, 1]}) == {"recall": (0.9, 1.0)}
