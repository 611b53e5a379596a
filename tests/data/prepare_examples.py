"""Documents prepared as a run's settings say, without a model."""

import io
from pathlib import Path
from typing import Any

import rich.console

from memguard.config import RunConfig
from memguard.config.mitigations import DeduplicateConfig, find_mitigation
from memguard.data.corpus import Corpus
from memguard.data.prepare import AuditNeeds, prepare
from memguard.runtime import Console


def prepare_as(
    config: RunConfig, run_folder: Path, tokenizer: Any, *, fewest_tokens: int = 21
) -> tuple[Corpus, str]:
    """Prepare a run; return its corpus and what was printed.

    Documents of ``fewest_tokens`` are long enough for the audit.
    """
    printed = io.StringIO()
    corpus = prepare(
        config.data,
        run_folder,
        seed=config.seed,
        epochs=config.train.epochs,
        deduplicate=find_mitigation(config.mitigations, DeduplicateConfig),
        audit=AuditNeeds(
            key=config.audit.model_dump_json(),
            is_auditable=lambda document: len(document.input_ids) >= fewest_tokens,
            min_documents=config.audit.min_documents if config.audit.enabled else 0,
        ),
        load_tokenizer=lambda _: tokenizer,
        has_chat_template=lambda: tokenizer.chat_template is not None,
        cache_dir=run_folder.parent / "cache",
        console=Console(rich.console.Console(file=printed, width=200)),
    )
    return corpus, printed.getvalue()
