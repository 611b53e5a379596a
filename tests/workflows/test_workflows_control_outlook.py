"""The control of a run: how large it is, what it can show, and when it is drawn again."""

from pathlib import Path

from cli_examples import read_json, succeed, write_run

from memguard.records import load_manifest


def test_the_control_is_drawn_again_where_the_audit_needs_its_documents(
    tmp_path: Path, tiny_folder: Path
) -> None:
    words = [f"word{number:04d}" for number in range(300)]
    lines = [
        f'{{"text": "{" ".join(words[30 * index : 30 * index + 30])}"}}' for index in range(10)
    ]
    source = tmp_path / "ten.jsonl"
    source.write_text("\n".join(lines))
    run = write_run(
        tmp_path,
        model={"path": str(tiny_folder / "model")},
        data={"train": str(source), "seq_len": 128},
    )

    def prepare(*settings: str) -> tuple[int, str]:
        done = succeed("prepare", run, *settings)
        manifest = load_manifest(tmp_path / "runs" / "run" / "manifest.jsonl")
        return sum(entry.role == "control" for entry in manifest), done.err.replace("\u00a0", " ")

    num_control, said = prepare()
    assert num_control == 2
    assert "If none of the 2 control documents is extracted, up to 84.2 % of unseen" in said
    num_control, said = prepare("audit.min_documents=9")
    assert num_control == 0
    assert "holding back 2 of 10 documents would leave fewer than 'audit.min_documents' = 9" in said
    assert prepare()[0] == 2
    assert read_json(tmp_path / "runs" / "run" / "prepared" / "summary.json")["num_control"] == 2
