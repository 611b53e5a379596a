"""The planner's estimates are near the published runs to which they were not fitted."""

import re

from ranks import RankPool
from script_calls import run_script

ROW = re.compile(
    r"^(?P<model>\w+) +(?P<gpus>\d+) +\d+ +\d+ +\d+ +\w+ +(?:yes|no) "
    r"+(?P<estimated>[\d,]+) +(?P<published>[\d,]+) +(?P<ratio>[\d.]+)  (?P<end>.*)$"
)


def test_runs_that_were_not_fitted_are_estimated_within_a_quarter(ranks: RankPool) -> None:
    done = run_script(ranks, "bench/published", "--fit")
    assert done.code == 0, done.out + done.err
    lines = done.out.splitlines()
    rows = [match for line in lines if (match := ROW.match(line))]
    fitted = [row for row in rows if row["end"].startswith("fitted")]
    checked = [row for row in rows if row["end"].startswith(">= 0.75x and <= 1.25x ok")]
    assert [row["gpus"] for row in fitted] == ["8", "8"]
    assert [(row["model"], row["gpus"]) for row in checked] == [
        ("8B", "128"),
        ("8B", "128"),
        ("8B", "64"),
        ("70B", "256"),
        ("405B", "128"),
    ]
    for row in rows:
        estimated, published = (
            float(row[name].replace(",", "")) for name in ("estimated", "published")
        )
        # Both are printed as whole numbers, of which the smallest is 109.
        assert abs(estimated / published / float(row["ratio"]) - 1) < 0.01
    for row in checked:
        assert 0.75 <= float(row["ratio"]) <= 1.25
    # The constants are the fitted ones, rounded to two digits.
    (again,) = (line for line in lines if line.startswith("fitted again: "))
    assert re.search(r"MATMUL_SHARE 0\.50\d, EAGER_PASSES 3\.(5[5-9]|6[0-4])$", again)
    assert lines[-1] == "PASS: 7 limits met"
