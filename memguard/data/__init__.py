"""Documents in, packed rows out; and who is trained how often.

    documents.py     files, folders and hub ids as one form
    sources.py       rows of files, folders, `save_to_disk` folders and hub ids
    file_kinds.py    regular files, and what is not read
    docstrings.py    reference documentation of installed packages, as documents
    tokenization.py  token ids with the supervised positions; a tokenizer trained on documents
    long_texts.py    as much of a long text as decides its first tokens
    chat.py          conversations through the chat template, assistant turns supervised
    duplicates.py    clusters of near-duplicates, and their removal by a mitigation
    buckets.py       which documents are trained how often, drawn over clusters
    canaries.py      random secrets, a fair coin for each: trained or never
    corpus.py        prepared documents on disk: token arrays, manifest and the run's HMAC key
    packing.py       pieces of documents into rows, best fit, and which row is trained when
    loader.py        rows of a step as arrays; counts what was really fed
    given.py         all documents that a run's settings name, and the hash of what they decide
    prepare.py       read, tokenise, cluster, place, write: a run folder's manifest and tokens
    forget_list.py   a finished run's documents read again: which to forget, which to retain

    sources --documents--> Document --tokenization--> ids, supervised
            --duplicates--> clusters --buckets--> bucket, role, repetitions of each document
    canaries --documents, coins-->                the same, beside them
            --packing--> row of each global sample index --loader--> a step's arrays

The loader is a pure function of (seed, global sample index): it does not know how many processes
there are, and a resumed run reads on where it stopped.
"""
