"""How the rows of a file become documents: format, names of columns, template, tags of roles.

    format              columns it needs            columns it may have
    text                text
    prompt_completion   prompt, completion
    messages            messages
    alpaca              instruction, output         input, system, history
    sharegpt            conversations               system
    input_ids           input_ids

`DataConfig` and the request of an audit have the same settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from memguard.config.settings import Settings

FormatName = Literal["text", "prompt_completion", "messages", "alpaca", "sharegpt", "input_ids"]
FormatChoice = Literal["auto", FormatName]
TemplateName = Literal["stanford", "chat"]
Role = Literal["user", "assistant", "system", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatColumns:
    """The columns of a format, by their usual names."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Both kinds, in the order in which they are read."""
        return (*self.required, *self.optional)


FORMAT_COLUMNS: Mapping[FormatName, FormatColumns] = {
    "text": FormatColumns(required=("text",)),
    "prompt_completion": FormatColumns(required=("prompt", "completion")),
    "messages": FormatColumns(required=("messages",)),
    "alpaca": FormatColumns(
        required=("instruction", "output"), optional=("input", "system", "history")
    ),
    "sharegpt": FormatColumns(required=("conversations",), optional=("system",)),
    "input_ids": FormatColumns(required=("input_ids",)),
}

_Word = Annotated[str, Field(min_length=1)]


class ColumnsConfig(Settings):
    """Columns that have other names than usual; null: the usual name, that of the setting."""

    text: _Word | None = Field(None, description="The text of a document (format text).")
    prompt: _Word | None = Field(None, description="The prompt (prompt_completion).")
    completion: _Word | None = Field(None, description="The completion (prompt_completion).")
    messages: _Word | None = Field(None, description="List of {role, content} (messages).")
    instruction: _Word | None = Field(None, description="The task (alpaca).")
    input: _Word | None = Field(None, description="More about the task, often empty (alpaca).")
    output: _Word | None = Field(None, description="The response (alpaca).")
    system: _Word | None = Field(None, description="The system turn (alpaca, sharegpt).")
    history: _Word | None = Field(None, description="List of earlier [user, assistant] (alpaca).")
    conversations: _Word | None = Field(None, description="List of {from, value} (sharegpt).")
    input_ids: _Word | None = Field(None, description="List of token ids (input_ids).")

    @property
    def given(self) -> dict[str, str]:
        """The columns with another name, by the usual one."""
        return {name: column for name, column in self if column is not None}

    def assign(self, format: FormatName) -> dict[str, str] | None:
        """Return the column of each thing of a format; None if one column would hold two things.

        A thing that a row may lack does not take a column that is named for another thing.
        """
        known = FORMAT_COLUMNS[format]
        named = {thing: column for thing, column in self.given.items() if thing in known.all}
        columns = {
            thing: named.get(thing, thing)
            for thing in known.all
            if thing in named or thing in known.required or thing not in named.values()
        }
        return columns if len(set(columns.values())) == len(columns) else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = list(self.given.values())
        twice = next((column for column in named if named.count(column) > 1), None)
        if twice is not None:
            raise ValueError(f"the column '{twice}' is named twice: each holds one thing")
        return self


_ROLES: Mapping[str, tuple[Role, tuple[str, ...]]] = {
    "user": ("user", ("human", "user")),
    "assistant": ("assistant", ("gpt", "assistant", "model")),
    "system": ("system", ("system",)),
    "tool": ("tool", ("observation", "tool")),
    "function_call": ("assistant", ("function_call",)),
}
"""Setting -> role of its turns in a chat template, and the tags that are known without it."""


class TagsConfig(Settings):
    """Keys and roles of sharegpt's turns; a role that is named here is known besides the usual."""

    role: _Word = Field("from", description="Key of a turn's role.")
    content: _Word = Field("value", description="Key of a turn's text.")
    user: _Word | None = Field(None, description="The user; known: human, user.")
    assistant: _Word | None = Field(
        None, description="The assistant, whose turns are trained; known: gpt, assistant, model."
    )
    system: _Word | None = Field(None, description="The system turn; known: system.")
    tool: _Word | None = Field(None, description="Result of a tool; known: observation, tool.")
    function_call: _Word | None = Field(
        None, description="Call of a tool, trained as the assistant's; known: function_call."
    )

    @property
    def roles(self) -> dict[str, Role]:
        """Role of each tag; a tag that is given has no other role."""
        usual = {tag: role for role, tags in _ROLES.values() for tag in tags}
        given = {getattr(self, name): role for name, (role, _) in _ROLES.items()}
        return usual | {tag: role for tag, role in given.items() if tag is not None}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.role == self.content:
            raise ValueError("'role' and 'content' must be different keys of a turn")
        tags = [tag for name in _ROLES if (tag := getattr(self, name)) is not None]
        twice = next((tag for tag in tags if tags.count(tag) > 1), None)
        if twice is not None:
            raise ValueError(f"the tag '{twice}' has two roles: give it one")
        return self


class FormatConfig(Settings):
    """How rows become documents; text files and arrays of token ids need none of it."""

    format: FormatChoice = Field(
        "auto",
        description="Format of the rows: text, prompt_completion, messages, alpaca, sharegpt or "
        "input_ids (token ids); auto takes it from the names of the columns, and says so.",
    )
    columns: ColumnsConfig = ColumnsConfig()
    template: TemplateName | None = Field(
        None,
        description="Of alpaca. stanford: the published prompt, only the response is trained; "
        "chat: turns of the chat template, 'system' and 'history' included. null: chat where the "
        "tokenizer has a chat template, else stanford.",
    )
    tags: TagsConfig = TagsConfig()
    chat_date: date | None = Field(
        None,
        description="Date that chat templates write as today's (YYYY-MM-DD); null: the day on "
        "which the documents are prepared, which a run keeps.",
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_blocks(cls, values: Any) -> Any:
        """Drop null blocks: in the template all lines of these are comments."""
        if not isinstance(values, dict):
            return values
        return {k: v for k, v in values.items() if not (k in ("columns", "tags") and v is None)}

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        given = self.columns.given
        formats = [
            name
            for name, known in FORMAT_COLUMNS.items()
            if self.format == name or (self.format == "auto" and given.keys() <= set(known.all))
        ]
        if formats and all(self.columns.assign(name) is None for name in formats):
            required = FORMAT_COLUMNS[formats[0]].required
            thing, column = next(pair for pair in given.items() if pair[1] in required)
            raise ValueError(
                f"'columns.{thing}' is '{column}', which is also the usual column of '{column}' "
                f"({formats[0]}): name another column for one of them"
            )
        if self.format == "auto":
            return self
        known = FORMAT_COLUMNS[self.format].all
        others = [name for name in self.columns.given if name not in known]
        if others:
            raise ValueError(
                f"'columns.{others[0]}' is no column of the format '{self.format}', which has "
                f"{', '.join(known)}: remove it, or change 'format'"
            )
        if self.template is not None and self.format != "alpaca":
            raise ValueError(f"'template' is for the format 'alpaca'; 'format' is '{self.format}'")
        if self.tags != TagsConfig() and self.format != "sharegpt":
            raise ValueError(f"'tags' are for the format 'sharegpt'; 'format' is '{self.format}'")
        return self
