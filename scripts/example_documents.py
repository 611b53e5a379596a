"""Write documents of the quickstart as text, to try the commands of README.md on.

    python scripts/example_documents.py

    trained.jsonl     30 documents that the quickstart trained 48 times
    unseen.jsonl      60 of the same kind that it did not train
    documents.jsonl   400 others, to fine-tune on

All are documentation that comes with Python's packages, in the 100 tokens that the quickstart uses.
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

RUN = Path("runs/quickstart/plain")
FILES = {
    "x48": ("trained.jsonl", 30),
    "heldout": ("unseen.jsonl", 60),
    "background": ("documents.jsonl", 400),
}
"""By bucket: file, and its greatest number of documents."""


def main() -> None:
    """Write the three files into the working directory."""
    if not (RUN / "trained.json").is_file():
        raise SystemExit(f"'{RUN}' is no finished run: start 'bash scripts/quickstart.sh' first.")
    tokenizer = Tokenizer.from_file(str(RUN / "model/tokenizer.json"))
    input_ids = np.load(RUN / "prepared/input_ids.npy")
    offsets = np.load(RUN / "prepared/offsets.npy")
    lines = (RUN / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    texts: dict[str, list[str]] = {bucket: [] for bucket in FILES}
    for line, start, end in zip(lines, offsets[:-1], offsets[1:], strict=True):
        bucket = json.loads(line)["bucket"]
        if bucket in texts and len(texts[bucket]) < FILES[bucket][1]:
            texts[bucket].append(tokenizer.decode(input_ids[start:end].tolist()))
    for bucket, (name, _) in FILES.items():
        rows = (json.dumps({"text": text}) + "\n" for text in texts[bucket])
        Path(name).write_text("".join(rows), encoding="utf-8")
        print(f"{name}: {len(texts[bucket])} documents")


if __name__ == "__main__":
    main()
