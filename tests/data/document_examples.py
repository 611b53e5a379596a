"""Documents of each format, and their tokens under the usual settings."""

from collections.abc import Sequence
from typing import Any

from memguard.data.documents import Document, Message
from memguard.data.tokenization import TokenizedDocument, tokenize_documents


def turns(*contents: str, first: str = "user") -> tuple[Message, ...]:
    """Return turns of the user and the assistant, by turns."""
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return tuple(Message(role=roles[i % 2], content=content) for i, content in enumerate(contents))


def document(content: str | tuple[Message, ...], name: str = "d") -> Document:
    """Return a text or a conversation."""
    kind: dict[str, Any] = {"format": "text", "text": content}
    if not isinstance(content, str):
        kind = {"format": "messages", "messages": content}
    return Document(id=name, source="s", **kind)


def pair(prompt: Any, completion: Any, name: str = "d") -> Document:
    """Return a prompt with its completion."""
    form: dict[str, Any] = {"format": "prompt_completion"}
    return Document(id=name, source="s", prompt=prompt, completion=completion, **form)


def tokenize(
    documents: Sequence[Document], tokenizer: Any, **settings: Any
) -> list[TokenizedDocument]:
    options = {"append_eos": True, "max_tokens": None, "setting": "data", **settings}
    return list(tokenize_documents(documents, tokenizer, **options))
