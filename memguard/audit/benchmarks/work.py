"""What a task costs a model, counted before it runs: forwards, tokens, generated tokens.

log-likelihoods    exactly the rows that will run, by the code that groups them
generation         a row for each item, and at most `max_gen_toks` tokens after each
"""

from typing import Any

from memguard.audit.benchmarks.isolation import isolated
from memguard.audit.benchmarks.tasks import OpenedTask
from memguard.records.record import Record


class TaskWork(Record):
    """The forwards and tokens of one task on one model."""

    task: str
    num_items: int
    num_forwards: int
    """Rows that run: passages that are scored, and prompts that are continued."""
    num_tokens: int
    """Of these rows (tokens)."""
    num_decoded_tokens: int
    """At most: texts may end early (tokens)."""
    num_new: int = 0
    """Most tokens that a prompt is continued by; 0 if nothing is generated."""
    minutes: float | None = None
    """Of all models of the audit together; null where the speed of the machine is not known."""


def count_work(
    opened: OpenedTask, tokenizer: Any, config: Any, *, max_tokens: int | None = None
) -> TaskWork:
    """Return the work of a task on a model, without its weights.

    Args:
        opened: the task.
        tokenizer: of the model.
        config: the model's transformers configuration.
        max_tokens: number of positions of the model; None: what its configuration says.

    Raises:
        ConfigError: an item does not fit this model.
        ModelError: the tokenizer lacks a chat template, or tokens that lm-eval needs.
    """
    settings = opened.settings
    opened.check_chat_template(tokenizer)
    task = opened.task
    with isolated(allow_download=opened.allow_download) as streams:
        from memguard.audit.benchmarks.counting_model import CountingModel  # imports lm-eval

        model = CountingModel(
            tokenizer, config, task=opened.name, max_tokens=max_tokens, streams=streams
        )
        opened.restart_draws()
        # As `lm_eval.evaluator.evaluate` builds them.
        task.build_all_requests(
            limit=settings.limit,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=True,
            chat_template=model.apply_chat_template if settings.chat else None,
        )
        requests = [request for request in task.instances for _ in range(request.repeats)]
        num_items = len({request.doc_id for request in requests})
        getattr(model, requests[0].request_type)(requests)
        task._instances = None
    return TaskWork(
        task=opened.name,
        num_items=num_items,
        num_forwards=model.num_forwards,
        num_tokens=model.num_tokens,
        num_decoded_tokens=model.num_decoded_tokens,
        num_new=model.num_new,
    )
