"""Made-up results of audits for the verdict, by their counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from result_examples import rate_row

from memguard.audit.verdict import (
    Canaries,
    ControlKind,
    Coverage,
    DocumentResults,
    MethodResults,
)
from memguard.records import ResultRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Documents of one role and bucket; the first of them are extracted."""

    role: str
    """trained, forget, control, or unreached: to be trained, but never fed."""
    num: int
    bucket: str = "trained"
    extracted: int = 0
    of_base: int = 0
    """The first of all documents, which the base model produces in the same ways."""
    copies: int = 1
    """Documents of a cluster."""
    own: int | None = None
    """The first of all documents, whose text is their own; None: all."""
    attacked: int = 0
    by_attack: int = 0
    """Of the attacked ones, which are the last of the documents, the first."""
    generated: int | None = None
    """The first of all documents, by generation; None: it did not run."""
    windows: int | None = None
    """The first of all documents, in another window; None: not tried."""


def trained(extracted: int, num: int, bucket: str = "trained", **fields: int) -> Group:
    return Group(role="trained", num=num, bucket=bucket, extracted=extracted, **fields)


def control(extracted: int, num: int, **fields: int) -> Group:
    return Group(role="control", num=num, bucket="control", extracted=extracted, **fields)


def forget(extracted: int, num: int, **fields: int) -> Group:
    return Group(role="forget", num=num, bucket="forget", extracted=extracted, **fields)


def unreached(extracted: int, num: int) -> Group:
    return Group(role="unreached", num=num, bucket="trained", extracted=extracted)


def build_results(groups: Sequence[Group]) -> DocumentResults:
    """Return the results of all documents of these groups."""
    sizes = [group.num for group in groups]
    number_N = np.concatenate([np.arange(size) for size in [*sizes, 0]])
    place_N = np.repeat(np.arange(len(sizes)), sizes)

    def spread(name: str) -> np.ndarray:
        values = [getattr(group, name) for group in groups]
        return np.array([-1 if value is None else value for value in values] or [0])[place_N]

    role_N = np.array([groups[place].role for place in place_N], dtype=object)
    of_base_N = number_N < spread("of_base")
    own_N = spread("own")
    first_N = spread("num") - spread("attacked")
    tried = {
        "attacked": number_N >= first_N,
        "generated": spread("generated") >= 0,
        "windows": spread("windows") >= 0,
    }
    found = {
        "attacked": tried["attacked"] & (number_N - first_N < spread("by_attack")),
        "generated": number_N < spread("generated"),
        "windows": number_N < spread("windows"),
    }
    extracted_N = number_N < spread("extracted")
    return DocumentResults(
        bucket_N=np.array([groups[place].bucket for place in place_N], dtype=object),
        cluster_N=1000 * place_N + number_N // np.maximum(1, spread("copies")),
        is_trained_N=np.asarray(role_N == "trained", dtype=bool),
        is_forgotten_N=np.asarray(role_N == "forget", dtype=bool),
        is_control_N=np.asarray(role_N == "control", dtype=bool),
        is_own_N=(own_N < 0) | (number_N < own_N),
        is_extracted_N=extracted_N,
        is_new_N=extracted_N & ~of_base_N,
        is_of_base_N=of_base_N,
        others={
            method: MethodResults(
                is_tried_N=tried_N,
                is_extracted_N=found[method],
                is_new_N=found[method] & ~of_base_N,
            )
            for method, tried_N in tried.items()
            if tried_N.any()
        },
    )


def make_canaries(trained: int, num_trained: int, references: int, num_references: int) -> Canaries:
    return Canaries(
        num_trained=num_trained,
        num_trained_extracted=trained,
        num_references=num_references,
        num_references_extracted=references,
    )


def make_coverage(
    documents: DocumentResults,
    *,
    unaudited: int = 0,
    generated: bool = True,
    collapsed: bool = False,
    limited: bool = False,
    control: ControlKind = "drawn",
    other_kind: bool = False,
    base: bool = False,
    weakened: tuple[str, ...] = (),
) -> Coverage:
    return Coverage(
        num_trained=int(documents.is_trained_N.sum()) + unaudited,
        num_unaudited=unaudited,
        was_generated=generated,
        is_collapsed=collapsed,
        is_limited=limited,
        control="other-kind" if other_kind else control,
        has_base=base,
        weakened=weakened,
    )


def make_row(bucket: str, documents: DocumentResults) -> ResultRow:
    """Return a bucket's verbatim rate."""
    here_N = documents.bucket_N == bucket
    num_matched = int((documents.is_extracted_N & here_N).sum())
    return rate_row("extraction", "verbatim", bucket, num_matched, int(here_N.sum()))
