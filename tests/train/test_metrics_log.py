"""metrics.jsonl of a run that was started several times."""

from pathlib import Path

from memguard.records import StartLine, save_record
from memguard.runtime.ended import Ended
from memguard.train.metrics import MetricsLog, StepMetrics, read_metrics


def take(log: MetricsLog, *steps: int) -> None:
    for step in steps:
        log.write(
            StepMetrics(
                step=step,
                num_steps=9,
                loss=1.0,
                lr=0.1,
                grad_norm=1.0,
                num_rows=1,
                num_supervised_tokens=1,
                num_kept_tokens=1,
                tokens_per_s=1.0,
                peak_memory_bytes=1,
                elapsed_s=1.0,
            )
        )
    log.close()


def begin(folder: Path, why: str) -> None:
    save_record(Ended(why=why, at_s=0.0), folder / "ended.json")


def read(path: Path) -> list[tuple[str, int, int] | int]:
    return [
        (line.why, line.step, line.num_lost_steps) if isinstance(line, StartLine) else line.step
        for line in read_metrics(path)
    ]


def test_each_start_is_told_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    take(MetricsLog(path, kept=b""), 1, 2)
    kept = path.read_bytes()
    assert read(path) == [("first start", 0, 0), 1, 2]
    (start, *_) = read_metrics(path)
    assert isinstance(start, StartLine)
    assert 0 < start.first_step_s < 24 * 3600
    begin(tmp_path, "one")
    take(MetricsLog(path, kept=kept, step=2), 3, 4, 5)
    # No checkpoint since: its steps are lost, its start is not.
    begin(tmp_path, "two")
    take(MetricsLog(path, kept=kept, step=2), 3)
    assert read(path) == [("first start", 0, 0), 1, 2, ("one", 2, 0), ("two", 2, 3), 3]
    assert path.read_bytes().startswith(kept)
    # An attempt without a step, and a damaged log.
    begin(tmp_path, "three")
    take(MetricsLog(path, kept=kept, step=2))
    path.write_bytes(b"?" + path.read_bytes())
    begin(tmp_path, "four")
    take(MetricsLog(path, kept=kept, step=2), 3)
    assert read(path) == [("first start", 0, 0), 1, 2, ("four", 2, 0), 3]
