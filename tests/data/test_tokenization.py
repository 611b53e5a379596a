import hashlib
import hmac
import json
import os
import signal
import struct
import threading
from array import array

import numpy as np
import pytest
from document_examples import document, pair, tokenize, turns
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from memguard.data import tokenization
from memguard.data.documents import Document
from memguard.data.tokenization import hash_tokens, hmac_text
from memguard.errors import DataError
from memguard.runtime.children import call_interruptibly

CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}{{ m.content + '<|end|>' }}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# Closes every rendered text, as Phi-3's does.
CLOSING = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
# Forgets what earlier assistant turns thought, as Qwen3's does.
FORGETFUL = CHATML.replace(
    "{{ m.content + '<|end|>' }}",
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('!')[-1] }}{% else %}"
    "{{ m.content }}{% endif %}{{ '<|end|>' }}",
)
STRICT = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    + CHATML
)


def build_tokenizer(template=None, *, post_processor=None, **tokens):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the cat sat on the mat and the hat"] * 3, trainer)
    if post_processor:
        backend.post_processor = processors.TemplateProcessing(
            single=post_processor, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **({"bos_token": "<s>", "eos_token": "</s>"} | tokens),
        chat_template=template,
    )


def supervised_text(tokenized, tokenizer):
    return tokenizer.decode(tokenized.input_ids[tokenized.supervised].tolist())


@pytest.mark.parametrize(
    ("post_processor", "append_eos", "expected"),
    [
        (None, True, "the cat</s>"),
        (None, False, "the cat"),
        ("<s> $A", True, "<s>the cat</s>"),
        ("<s> $A </s>", True, "<s>the cat</s>"),
        ("<s> $A </s>", False, "<s>the cat</s>"),
    ],
)
def test_text_is_what_the_tokenizer_makes_of_it_and_one_eos(post_processor, append_eos, expected):
    tokenizer = build_tokenizer(post_processor=post_processor)
    [one] = tokenize([document("the cat")], tokenizer, append_eos=append_eos)
    assert tokenizer.decode(one.input_ids.tolist()) == expected
    assert one.supervised.all()
    assert one.input_ids.dtype == np.int32
    assert one.num_content_tokens == len(one.input_ids) - expected.endswith("</s>")


def test_tokenizer_without_eos():
    [one] = tokenize([document("the cat")], build_tokenizer(eos_token=None))
    assert one.num_content_tokens == len(one.input_ids)


def test_documents_keep_their_order_over_batches_and_formats():
    tokenizer = build_tokenizer(CHATML)
    documents = []
    for i in range(1100):
        forms = (f"cat {i}", turns("q", f"cat {i}"))
        documents.append(document(forms[i % 2], str(i)) if i % 3 else pair("q", f"cat {i}", str(i)))
    done = []
    tokenized = tokenize(documents, tokenizer, progress=done.append)
    assert [t.id for t in tokenized] == [d.id for d in documents]
    assert [t.format for t in tokenized] == [d.format for d in documents]
    for i, one in enumerate(tokenized):
        end = "<|end|>" if one.format == "messages" else "</s>"
        assert supervised_text(one, tokenizer) == f"cat {i}{end}"
    assert done == [1000, 100]


def test_batches_are_cut_by_characters(monkeypatch):
    """One batch of long documents is one call of the tokenizer: minutes without progress."""
    tokenizer = build_tokenizer(CHATML)
    long = ["the cat " * n for n in (5, 5, 5, 50, 1)]
    documents = [document(text, str(i)) for i, text in enumerate(long)]
    documents += [pair("a" * 60, "b" * 50, "pair"), document(turns("a" * 60, "b"), "turns")]
    whole = tokenize(documents, tokenizer)
    monkeypatch.setattr(tokenization, "_BATCH_CHARACTERS", 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    done = []
    cut = tokenize(documents, tokenizer, progress=done.append)
    # 40 + 40, 40, 400, 8, 110 and 61 characters.
    assert done == [2, 1, 1, 1, 1, 1]
    # The texts are encoded one by one in any case: exactly the same ids.
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
        np.testing.assert_array_equal(one.supervised, other.supervised)


def test_long_texts_in_a_thread_have_the_same_tokens(monkeypatch):
    tokenizer = build_tokenizer(CHATML)
    documents = [
        document("the cat", "text"),
        pair("the c", "at sat", "spans"),
        pair("q", "the hat", "pair"),
        document(turns("the cat", "the hat"), "turns"),
    ]
    direct = tokenize(documents, tokenizer)
    called = []

    def call(function, tick):
        called.append(function)
        return call_interruptibly(function, tick)

    monkeypatch.setattr(tokenization, "_LONG_CHARACTERS", 0)
    monkeypatch.setattr(tokenization, "call_interruptibly", call)
    for one, other in zip(direct, tokenize(documents, tokenizer), strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
    assert len(called) >= 4


class HangingTokenizer:
    """A tokenizer whose encoding does not end before it is told to."""

    def __init__(self, tokenizer):
        self.tokenizer, self.may_end = tokenizer, threading.Event()

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, texts, **options):
        self.may_end.wait()
        return self.tokenizer(texts, **options)


def test_ctrl_c_takes_effect_while_one_document_is_encoded():
    tokenizer = HangingTokenizer(build_tokenizer())

    def interrupt(done):
        assert done == 0, "shown while nothing is done yet"
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tokenize([document("x" * 200_000)], tokenizer, progress=interrupt)
    tokenizer.may_end.set()


def test_long_documents_are_cut_and_nothing_is_warned(caplog):
    tokenizer = build_tokenizer(model_max_length=8)
    [whole, cut] = (
        tokenize([document("the cat sat " * 50)], tokenizer, max_tokens=n)[0] for n in (None, 9)
    )
    assert len(cut.input_ids) == len(cut.supervised) == cut.num_content_tokens == 9
    np.testing.assert_array_equal(cut.input_ids, whole.input_ids[:9])
    assert caplog.records == []


def test_a_document_without_tokens():
    [one] = tokenize([document("\n")], build_tokenizer(), append_eos=False, max_tokens=0)
    assert (len(one.input_ids), one.num_content_tokens) == (0, 0)


@pytest.mark.parametrize("template", [CHATML, MARKED, CLOSING])
def test_assistant_turns_and_their_ends_are_supervised(template):
    tokenizer = build_tokenizer(template)
    said = ("hi cat", "the mat", "why?\n", " on\nthe hat ")
    [one] = tokenize([document(turns(*said))], tokenizer)
    whole = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in turns(*said)], tokenize=False
    )
    assert tokenizer.decode(one.input_ids.tolist()) == whole
    # By hand: each answer with the mark that ends it, and nothing else.
    expected = "the mat<|end|> on\nthe hat <|end|>"
    closing = "\n</s>" if template == CLOSING else ""
    assert supervised_text(one, tokenizer) == expected + closing
    mask = "".join("x" if s else "." for s in one.supervised)
    assert mask.startswith(".")
    assert mask.strip(".").count(".") > 3
    last = tokenizer.decode(one.input_ids[: one.num_content_tokens].tolist())
    assert last.endswith("\nthe hat")


def test_marks_and_prefixes_agree():
    said = ("äö 日本 cat", "the 🎉 mat", "", "on")
    marked, by_prefix = (
        tokenize([document(turns(*said))], build_tokenizer(template))[0]
        for template in (MARKED, CHATML)
    )
    np.testing.assert_array_equal(marked.input_ids, by_prefix.input_ids)
    np.testing.assert_array_equal(marked.supervised, by_prefix.supervised)


def test_prefixes_agree_with_the_ids_of_growing_conversations():
    """The way TRL and others make labels: token ids of prefixes instead of characters."""
    tokenizer = build_tokenizer(CHATML)
    messages = [{"role": m.role, "content": m.content} for m in turns("the cat", "sat on", "and")]
    messages.append({"role": "assistant", "content": "the hat"})
    expected = []
    for turn in (1, 3):
        before = tokenizer.apply_chat_template(
            messages[:turn], add_generation_prompt=True, return_dict=False
        )
        after = tokenizer.apply_chat_template(messages[: turn + 1], return_dict=False)
        assert after[: len(before)] == before
        expected += [False] * (len(before) - len(expected))
        # Ours leaves out the line break after the end of the turn.
        expected += [True] * (len(after) - len(before) - 1) + [False]
    [one] = tokenize([document(turns("the cat", "sat on", "and", "the hat"))], tokenizer)
    np.testing.assert_array_equal(one.supervised, expected)


def test_conversation_that_the_assistant_begins():
    tokenizer = build_tokenizer(CHATML)
    [one] = tokenize([document(turns("hello", "hi", "the cat", first="assistant"))], tokenizer)
    assert supervised_text(one, tokenizer) == "hello<|end|>the cat<|end|>"


# A generation prompt that opens thoughts, as DeepSeek's does; an end of the last turn that is not
# the others', as gpt-oss's; thoughts shown in the last turn only, as Qwen3's.
THINKING = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
RETURNING = CHATML.replace(
    "{{ m.content + '<|end|>' }}",
    "{{ m.content }}{{ '</s>' if loop.last and m.role == 'assistant' else '<|end|>' }}",
)
LAST_THOUGHT = CHATML.replace(
    "{{ m.content + '<|end|>' }}",
    "{{ '<think>\n\n</think>\n\n' if loop.last and m.role == 'assistant' }}"
    "{{ m.content + '<|end|>' }}",
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (THINKING, "one<|end|>two<|end|>"),
        (RETURNING, "one<|end|>two</s>"),
        (LAST_THOUGHT, "one<|end|><think>\n\n</think>\n\ntwo<|end|>"),
    ],
)
def test_templates_that_render_the_last_turn_differently(template, expected):
    tokenizer = build_tokenizer(template)
    [one] = tokenize([document(turns("one", "one", "two one", "two"))], tokenizer)
    assert supervised_text(one, tokenizer) == expected


def test_thoughts_that_the_generation_prompt_has_opened():
    tokenizer = build_tokenizer(THINKING)
    prompt, answer = turns("one"), "<think>\nhm</think>two"
    [opened, plain] = tokenize(
        [document(turns("one", answer)), pair(prompt, turns("two", first="assistant"))], tokenizer
    )
    assert supervised_text(opened, tokenizer) == "hm</think>two<|end|>"
    assert supervised_text(plain, tokenizer) == "two<|end|>"


def test_content_that_a_template_drops_is_not_found_elsewhere():
    dropping = CHATML.replace("{{ m.content +", "{{ ('' if m.content == 'two' else m.content) +")
    with pytest.raises(DataError, match=r"the text of message 2 \('assistant'\)"):
        tokenize([document(turns("one", "two", "two"))], build_tokenizer(dropping))
    tail = document(turns("one", "two", "what about two", "x"))
    with pytest.raises(DataError, match="renders depending on their text"):
        tokenize([tail], build_tokenizer(dropping))


def test_template_that_forgets_is_refused_with_count_and_ids():
    tokenizer = build_tokenizer(FORGETFUL)
    bad = turns("q", "secret! a", "q", "b")
    documents = [document(turns("q", "x! a"), "good"), document(bad, "one"), document(bad, "two")]
    assert len(tokenize(documents[:1], tokenizer)) == 1
    part = (
        "2 of 3 documents of which the chat template leaves out or changes the text of message 2 "
    )
    with pytest.raises(DataError, match=part) as error:
        tokenize(documents, tokenizer)
    assert str(error.value).endswith("documents): one, two.")
    assert "secret" not in str(error.value)


def test_template_that_refuses():
    documents = [document(turns("secret", first="assistant"), "one")]
    with pytest.raises(DataError, match=r"template rejects \(Roles must alternate\): one"):
        tokenize(documents, build_tokenizer(STRICT))
    quoting = "{{ raise_exception('no ' + messages[0].content) }}"
    with pytest.raises(DataError, match=r"template rejects \(TemplateError\): one"):
        tokenize(documents, build_tokenizer(quoting))


def test_no_template():
    with pytest.raises(DataError, match="'data' holds conversations, but the tokenizer has no"):
        tokenize([document(turns("a", "b"))], build_tokenizer())


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_conversations_without_a_supervised_token(template):
    documents = [document(turns("a", "b"), "good"), document(turns("a"), "one")]
    tokenizer = build_tokenizer(template)
    with pytest.raises(DataError, match=r"1 of 2 documents without a supervised token .*: one"):
        tokenize(documents, tokenizer)
    documents = [pair("the cat sat on", "the mat", "one"), document("the cat", "two")]
    cut_off, whole = tokenize(documents, tokenizer, max_tokens=4)
    assert (cut_off.supervised.any(), whole.supervised.all()) == (False, True)


def test_pair_of_message_lists_is_prompt_and_everything_after():
    tokenizer = build_tokenizer(CHATML)
    prompt, completion = turns("one", "two", "three"), turns("four", first="assistant")
    [one] = tokenize([pair(prompt, completion)], tokenizer)
    assert supervised_text(one, tokenizer) == "four<|end|>"
    [two] = tokenize([pair(prompt[:1], (*prompt[1:], *completion))], tokenizer)
    np.testing.assert_array_equal(two.input_ids, one.input_ids)
    assert supervised_text(two, tokenizer).startswith("two<|end|>\n<|start|>user\nthree")
    # A prompt that ends with the assistant is not asked to begin another turn of it.
    [three] = tokenize([pair(prompt[:2], (*prompt[2:], *completion))], tokenizer)
    assert supervised_text(three, tokenizer).startswith("<|start|>user\nthree")


@pytest.mark.parametrize("post_processor", [None, "<s> $A", "<s> $A </s>"])
def test_pair_of_strings(post_processor):
    tokenizer = build_tokenizer(post_processor=post_processor)
    [one, two] = tokenize([pair("the cat", " sat on"), pair("", "the hat")], tokenizer)
    assert supervised_text(one, tokenizer) == " sat on</s>"
    assert supervised_text(two, tokenizer).removeprefix("<s>") == "the hat</s>"
    prompt = tokenizer("the cat")["input_ids"]
    if post_processor and post_processor.endswith("</s>"):
        prompt = prompt[:-1]
    np.testing.assert_array_equal(one.input_ids[: len(prompt)], prompt)
    assert not one.supervised[: len(prompt)].any()
    assert one.num_content_tokens == len(one.input_ids) - 1


def test_pair_whose_seam_is_inside_a_token():
    tokenizer = build_tokenizer()
    assert len(tokenizer("the")["input_ids"]) == 1, "else this tests nothing"
    [one] = tokenize([pair("t", "he cat")], tokenizer)
    assert tokenizer.decode(one.input_ids[~one.supervised].tolist()) == "t"
    assert supervised_text(one, tokenizer) == "he cat</s>"


def test_real_tokenizers(shared_data):
    gpt2 = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "gpt2")
    stories = AutoTokenizer.from_pretrained(shared_data / "checkpoints" / "stories260K")
    text = "Once upon a time, there was a naïve café 🎉."
    for tokenizer in (gpt2, stories):
        [one, two] = tokenize([document(text), pair("Once upon", " a time")], tokenizer)
        plain = tokenizer(text)["input_ids"]
        eos = [] if tokenizer.eos_token is None else [tokenizer.eos_token_id]
        assert one.input_ids.tolist() == plain + eos
        assert one.num_content_tokens == len(plain)
        ends = tokenizer.decode(two.input_ids[two.supervised].tolist())
        assert ends.removesuffix(tokenizer.eos_token or "").strip() == "a time"


def test_hash_of_tokens():
    ids = np.array([1, 2, 70_000], dtype=np.int32)
    assert hash_tokens(ids) == hashlib.sha256(struct.pack("<3i", 1, 2, 70_000)).hexdigest()
    assert hash_tokens(ids.astype(">i4")) == hash_tokens(ids)


def test_hmac_is_of_what_a_document_says():
    canonical = json.dumps({"text": "é"}, separators=(",", ":")).encode()
    expected = hmac.new(b"key", canonical, hashlib.sha256).hexdigest()
    assert hmac_text(b"key", document("é", "one")) == expected
    assert hmac_text(b"key", document("é", "two")) == expected
    said = [document("é"), document(turns("é")), pair("é", ""), pair("", "é"), document("e")]
    assert len({hmac_text(b"key", d) for d in said} | {hmac_text(b"", said[0])}) == 6


def ids_document(*ids, name="d"):
    return Document(id=name, source="x.npy", format="text", input_ids=array("i", ids))


def test_token_ids_stay_as_they_are():
    tokenizer = build_tokenizer(post_processor="<s> $A </s>")
    text, given, ended = tokenize(
        [document("the cat"), ids_document(7, 8, 9), ids_document(7, 8, 1)], tokenizer
    )
    assert text.input_ids[0] == 0
    assert given.input_ids.tolist() == [7, 8, 9]
    assert given.input_ids.dtype == np.int32
    assert given.supervised.all()
    assert (given.num_content_tokens, ended.num_content_tokens) == (3, 2)
    [cut] = tokenize([ids_document(7, 8, 9)], tokenizer, max_tokens=2)
    assert cut.input_ids.tolist() == [7, 8]


def test_token_ids_need_no_tokenizer():
    [given] = tokenize([ids_document(7, 8, 9)], None)
    assert (given.input_ids.tolist(), given.num_content_tokens) == ([7, 8, 9], 3)


def test_token_ids_beyond_the_vocabulary():
    documents = [ids_document(7, 299), ids_document(3, 300, name="x-000001")]
    with pytest.raises(DataError) as caught:
        tokenize(documents, build_tokenizer(), vocab_size=300)
    assert str(caught.value) == (
        "'data': 'x.npy', row x-000001, holds token id 300; the model's vocabulary has 300 (0 to "
        "299). Use ids of the model's tokenizer."
    )


def test_hmac_of_token_ids_is_theirs():
    key = b"k"
    one, same = ids_document(1, 2), ids_document(1, 2, name="other")
    assert hmac_text(key, one) == hmac_text(key, same) != hmac_text(key, ids_document(1, 3))
