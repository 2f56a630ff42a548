"""Tables of literal cells, with figures worked out by hand."""

import csv

from agents.grid import Grid
from agents.tables import as_csv, table

TRAINED = (10, 640, 320)  # updates, bytes decoded, bytes read
RULE = (0, 0, 0)


def cell(reward: float, rate: float, budget: tuple[int, int, int] = TRAINED, **others: float) -> dict:
    """What a cell's file holds."""
    update, decoded, read = budget
    figures = {"reward": reward, "rate": rate, "bits_per_byte": 2.0, "precision": 0.5, "recall": 0.25, **others}
    figures |= {"num_bytes": 4096, "boundaries": "sampled, uncapped", "seed": 0}
    return {
        "data": "CountingStream",
        "figures": figures,
        "validation": figures,
        "calibrated": None,
        **{"update": update, "bytes_decoded": decoded, "bytes_read": read, "curve": [], "flops_per_byte": 2e6, "sentence": "|a|bc|"},
        "versions": {"python": "3.11", "torch": "2.13", "device": "cpu"},
        "config": {"agent": {"price": 0.1}},
    }


def grid(*rows: str, **others) -> Grid:
    return Grid({row: [] for row in rows}, **{"seeds": [0, 1], "reference": None, **others})


def test_scores_by_hand() -> None:
    columns = {
        # scores of mine: (1 - 0) / (2 - 0) = 0.5 and (4 - 1) / (3 - 1) = 1.5: mean 1, half-width 12.7062 * 0.5
        "easy": {
            "never": [cell(0, 0.0, RULE), cell(1, 0.0, RULE)],
            "best": [cell(2, 0.25, RULE), cell(3, 0.25, RULE)],
            "mine": [cell(1, 0.2), cell(4, 0.3)],
        },
        # scores of mine: (-2 + 3) / (-1 + 3) = 0.5 twice
        "hard": {
            "never": [cell(-3, 0.0, RULE)] * 2,
            "best": [cell(-1, 0.125, RULE)] * 2,
            "mine": [cell(-2, 0.5), cell(-2, 0.75)],
        },
    }
    assert table(
        grid("never", "best", "mine", columns={"easy": [], "hard": []}, scale=("never", "best"), notes=("First.", "Second.")), columns
    ).splitlines() == [
        "| score |          easy |          hard |",
        "| ----- | ------------: | ------------: |",
        "| never |             0 |             0 |",
        "| best  |             1 |             1 |",
        "| mine  | 1.000 ± 6.353 | 0.500 ± 0.000 |",
        "",
        "| starts per byte |  easy |  hard |",
        "| --------------- | ----: | ----: |",
        "| never           | 0.000 | 0.000 |",
        "| best            | 0.250 | 0.125 |",
        "| mine            | 0.250 | 0.625 |",
        "",
        "| column | R of never | R of best | price | updates | bytes decoded | bytes read | test bytes |           data |",
        "| ------ | ---------: | --------: | ----: | ------: | ------------: | ---------: | ---------: | -------------: |",
        "| easy   |     0.5000 |    2.5000 |   0.1 |      10 |           640 |        320 |      4,096 | CountingStream |",
        "| hard   |    -3.0000 |   -1.0000 |   0.1 |      10 |           640 |        320 |      4,096 | CountingStream |",
        "",
        "Score: (R - R of never) / (R of best - R of never), seed by seed; mean ± half-width of the 95% t-interval over seeds 0, 1.",
        "R: mean reward in nats per byte of the test split, the price of starts paid; boundaries sampled, uncapped, noise seed 0.",
        "Rates and R are means over seeds 0, 1. Updates and bytes: of what learns. Python 3.11, torch 2.13, cpu.",
        "",
        "First.",
        "Second.",
    ]


def test_scores_of_one_seed_and_of_a_scale_without_length() -> None:
    cells = {"zero": [cell(1, 0.0)], "one": [cell(3, 0.5)], "mine": [cell(2, 0.1)]}
    text = table(grid("zero", "one", "mine", seeds=[4], scale=("zero", "one")), {"": cells})
    assert "| score |  grid |" in text and "| mine  | 0.500 |" in text and "±" not in text
    assert "seed by seed; no interval, seed 4 alone." in text
    assert "| grid   |" in text  # a column without a name goes by the experiment's
    flat = {"zero": [cell(1, 0.0)] * 2, "one": [cell(1, 0.5)] * 2, "mine": [cell(2, 0.1)] * 2}
    text = table(grid("zero", "one", "mine", scale=("zero", "one")), {"": flat})
    assert "| mine  |    - |" in text and "nan" not in text


def test_budgets_that_differ_are_all_named() -> None:
    cells = {"zero": [cell(1, 0.0, RULE)] * 2, "one": [cell(3, 0.5)] * 2, "mine": [cell(2, 0.1, (10, 640, 640))] * 2}
    assert "|      10 |           640 |   320; 640 |" in table(grid("zero", "one", "mine", scale=("zero", "one")), {"": cells})


def test_a_table_without_a_scale_by_hand() -> None:
    cells = {
        "mine": [cell(0, 0.25, bits_per_byte=2.0), cell(0, 0.25, bits_per_byte=3.0)],
        "never": [cell(0, 0.0, RULE, bits_per_byte=2.5, precision=float("nan")), cell(0, 0.0, RULE, bits_per_byte=3.0)],
    }
    ordinary = [
        "| cell  | bits per byte |  rate | precision | recall | minus never (95% t-interval) | bytes decoded | bytes read |",
        "| ----- | ------------: | ----: | --------: | -----: | ---------------------------: | ------------: | ---------: |",
        "| mine  |         2.500 | 0.250 |     0.500 |  0.250 |               -0.250 ± 3.177 |           640 |        320 |",
        "| never |         2.750 | 0.000 |         - |  0.250 |                    reference |             0 |          0 |",
        "",
        "Means over seeds 0, 1, paired by seed: same data, same initialisation of the model.",
        "Measured on 4,096 test bytes of CountingStream; boundaries sampled, uncapped, noise seed 0. Rate: starts per byte.",
        "Precision and recall: of starts, against the stream's own. Python 3.11, torch 2.13, cpu.",
    ]
    assert table(grid("mine", "never", reference="never"), {"": cells}).splitlines() == ordinary
    columns = grid("mine", "never", reference="never", columns={"a": [], "b": []}, notes=("Note.",))
    expected = ["### a", "", *ordinary, "", "### b", "", *ordinary, "", "Note."]
    assert table(columns, {"a": cells, "b": cells}).splitlines() == expected


def test_a_row_that_is_not_causal_says_so() -> None:
    ones, others = [cell(1, 0.2, causal=False)] * 2, [cell(1, 0.2, causal=True)] * 2
    ordinary = table(grid("bpe", "mine", reference="mine"), {"": {"bpe": ones, "mine": others}})
    assert [line.split("|")[1].strip() for line in ordinary.splitlines()[2:4]] == ["bpe (not causal)", "mine"]
    zero = [cell(0, 0.0, RULE)] * 2
    scores = table(grid("never", "bpe", "mine", scale=("never", "mine")), {"": {"never": zero, "bpe": ones, "mine": others}})
    assert sum(line.startswith("| bpe (not causal) |") for line in scores.splitlines()) == 2


def test_what_rows_cost_by_hand() -> None:
    lengths = {"segment_length_mean": 5.0, "segment_length_std": 1.5}
    cells = {
        "mine": [cell(0, 0.2, **lengths), cell(0, 0.2, **lengths) | {"flops_per_byte": 4e6}],
        "never": [cell(0, 0.0, RULE, **lengths)] * 2,
    }
    cells["never"] = [one | {"flops_per_byte": None} for one in cells["never"]]
    speeds = {
        ("", "mine"): {"time_ratio": 1.25, "bytes_per_second": 12345.6},
        ("", "never"): {"time_ratio": 1.0, "bytes_per_second": 15000.0},
    }
    costs = [
        "| cell  | bytes a segment | standard deviation | MFLOPs a byte | update time / never | bytes a second |",
        "| ----- | --------------: | -----------------: | ------------: | ------------------: | -------------: |",
        "| mine  |           5.000 |              1.500 |         3.000 |                1.25 |         12,346 |",
        "| never |           5.000 |              1.500 |             - |                1.00 |         15,000 |",
        "",
        "Segments of the test split. FLOPs: of training, forward and backward, per byte decoded, at the mean rate of the validations;",
        "the read-out of a linear policy is not counted. Time: median of 7 pairs of updates in turns.",
        "",
        "    mine   |a|bc|",
        "    never  |a|bc|",
    ]
    ordinary = grid("mine", "never", reference="never", costs=7)
    assert table(ordinary, {"": cells}, speeds).splitlines()[-len(costs) :] == costs
    both = {(column, row): speed for column in ("a", "b") for (_, row), speed in speeds.items()}
    scaled = grid("mine", "never", scale=("never", "mine"), columns={"a": [], "b": []}, costs=7)
    lines = table(scaled, {"a": cells, "b": cells}, both).splitlines()
    assert [lines[lines.index(f"### {column}") + 2 :][: len(costs)] for column in ("a", "b")] == [costs, costs]
    first = next(csv.DictReader(as_csv(ordinary, {"": cells}, speeds).splitlines()))
    assert (first["row"], first["time_ratio"], first["flops_per_byte"]) == ("mine", "1.25", "2000000.0")
