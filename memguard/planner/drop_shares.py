"""The share of the labels that goldfish drops, by document, with the target of the document's k.

In total over a run, documents that a mask does not suit are hidden by all others. Mode `random` is
not checked: its mask does not depend on the text.
"""

import numpy as np

from memguard.data.corpus import Corpus
from memguard.data.documents import name_ids
from memguard.errors import ConfigError
from memguard.mitigation.goldfish import Goldfish
from memguard.mitigation.k_schedule import KSchedule
from memguard.planner.dry_run import Remark, note, warn
from memguard.records.texts import format_percent
from memguard.seeds import derive_generator

_MIN_LABELS = 10_000
"""Labels of a run from which on a share other than the target is no chance."""
_FED = ("trained", "background", "canary")


def check_drop_shares(corpus: Corpus, k_schedule: KSchedule) -> list[Remark]:
    """Return the dropped share, and documents of which less than a third of the target is dropped.

    Raises:
        ConfigError: goldfish drops no label of the run, or of one source.
    """
    # Above the last level all labels are dropped.
    by_level = [*(level.goldfish for level in k_schedule.levels), None]
    if by_level[0] is None or by_level[0].config.mode == "random":
        return []
    low, totals = [], dict.fromkeys(["the run", *(e.source for e in corpus.manifest)], np.zeros(3))
    # These modes draw no random numbers.
    generator = derive_generator(0, "drop shares")
    for index, entry in enumerate(corpus.manifest):
        goldfish = by_level[k_schedule.level_of[index]]
        if entry.role not in _FED or goldfish is None:
            continue
        document = corpus.document(index)
        mask = goldfish.drop_mask(document.input_ids, None, generator)
        is_dropped = mask[1:][document.supervised[1:]]
        share, target = is_dropped.mean() if is_dropped.size else 0, 1 / goldfish.config.k
        for name in ("the run", entry.source):
            totals[name] = totals[name] + is_dropped.size * np.array([1, share, target])
        if _is_judged(is_dropped.size, goldfish) and share < target / 3:
            of = f"{format_percent(share)} of {format_percent(target)}"
            low.append(f"{name_ids([entry.id])} ({of})")
    for name, (num_labels, num_dropped, _) in totals.items():
        if not num_dropped:
            of = name if name == "the run" else f"'{name_ids([name])}'"
            refuse_without_drops(by_level[0], int(num_labels), of)
    num_labels, num_dropped, expected = totals["the run"]
    if not num_labels:
        return []
    shares = [format_percent(num / num_labels) for num in (num_dropped, expected)]
    text = f"{shares[0]} of {num_labels:,.0f} labels are dropped; the target is {shares[1]}."
    is_off = num_labels >= _MIN_LABELS and abs(num_dropped - expected) > expected / 10
    remarks = [(warn if is_off else note)("goldfish", text)]
    if low:
        text = (
            f"Less than a third of the target share of labels is dropped in {len(low):,} document"
            f"{'' if len(low) == 1 else 's'}: {', '.join(low[:5])}{', ...' if len(low) > 5 else ''}"
            f". {_way_out(by_level[0])}."
        )
        remarks.append(warn("goldfish", text))
    return remarks


def refuse_without_drops(goldfish: Goldfish | None, num_labels: int, of: str) -> None:
    """Raise ConfigError for labels of which none is dropped, if they are enough to judge."""
    if goldfish is not None and _is_judged(num_labels, goldfish):
        raise ConfigError(
            f"'mitigations': goldfish drops none of the {num_labels:,} labels of {of}, and so does "
            f"not protect it. {_way_out(goldfish)}"
        )


def _is_judged(num_labels: int, goldfish: Goldfish) -> bool:
    # Of fewer labels a low share may be chance.
    return num_labels >= max(200, 50 * goldfish.config.k)


def _way_out(goldfish: Goldfish) -> str:
    if goldfish.letters is not None:
        return "Set 'normalise' to none"
    return f"Set another '{'context_width' if goldfish.config.mode == 'hash' else 'mode'}'"
