"""Measure whether reading and judging take time in proportion to what is read.

    python scripts/check_linear.py

CPU seconds of a policy of 1,000 and 10,000 rules (read, and rendered as JUnit XML), of a chat of
200 and 2,000 turns, and of a prompt with 2,000 and 20,000 marks of an input. Exits with 1 if ten
times as much takes more than 12 times as long.
"""

import sys
import time
from collections.abc import Callable, Sequence

from bench.harness import Verdict, build_parser

from memguard.data.documents import Document, Message
from memguard.data.rows import strip_stanford
from memguard.data.tokenization import tokenize_documents, train_bpe
from memguard.gate.policy import read_policy
from memguard.gate.rendered import render_junit
from memguard.records.gate import GateResult, Judgement

MOST = 12.0
"""Largest ratio of the CPU seconds of ten times as much."""
_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
_PROMPT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\nx"
)


def read_rules(count: int) -> None:
    """Read a policy of so many rules, and render a judgement of each."""
    read_policy({"gate": [{"metric": f"m{n}", "at_most": 0.1} for n in range(count)]})
    judgements = [
        Judgement(rule=n, name=f"m{n} at most 10 %", outcome="pass", sentence="It passes.")
        for n in range(1, count + 1)
    ]
    result = GateResult(
        **dict.fromkeys(("tool_version", "created", "audit", "report_sha256", "policy"), "x"),
        **dict.fromkeys(("verdict", "decision"), "x"),
        triage=None,
        release=None,
        level="none-found",
        badges=[],
        outcome="pass",
        judgements=judgements,
        accepted=[],
        num_findings=0,
    )
    render_junit(result)


def read_chat(count: int) -> None:
    """Tokenise a chat of so many turns, by a template without marks of answers."""
    tokenizer = train_bpe(["a"], vocab_size=257)
    tokenizer.chat_template = _TEMPLATE
    turns = zip(("user", "assistant") * (count // 2), range(count), strict=True)
    messages = tuple(Message(role=role, content=f"turn {n}") for role, n in turns)
    document = Document(id="x", source="s", format="messages", messages=messages)
    list(tokenize_documents([document], tokenizer, append_eos=True, max_tokens=None, setting="d"))


def read_marks(count: int) -> None:
    """Read a prompt with so many marks of an input, 200 times."""
    prompt = _PROMPT + "\n\n### Input:\n" * count
    for _ in range(200):
        strip_stanford(prompt)
        strip_stanford(f"{prompt}y\n\n### Response:")


CASES: dict[str, tuple[Callable[[int], None], int]] = {
    "rules of a policy": (read_rules, 1000),
    "turns of a chat": (read_chat, 200),
    "marks in a prompt": (read_marks, 2000),
}
"""What is done with a number of things, and the smaller number."""


def measure(work: Callable[[int], None], count: int) -> float:
    """Return the fewest CPU seconds of seven times."""
    times = []
    for _ in range(7):
        began = time.process_time()
        work(count)
        times.append(time.process_time() - began)
    return min(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return the exit code."""
    build_parser(__doc__).parse_args(arguments)
    verdict = Verdict()
    print(
        "| what | number | CPU s | number | CPU s | ratio | limit |\n|---|---|---|---|---|---|---|"
    )
    for name, (work, count) in CASES.items():
        work(10)
        few, many = measure(work, count), measure(work, 10 * count)
        limit = verdict.check(name, many / few, at_most=MOST)
        cells = (f"{count:,}", f"{few:.3f}", f"{10 * count:,}", f"{many:.3f}", f"{many / few:.1f}x")
        print(f"| {name} | {' | '.join(cells)} | {limit} |")
    return verdict.end()


if __name__ == "__main__":
    sys.exit(main())
