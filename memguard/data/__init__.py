"""Turns documents into packed rows and decides how often each document is trained.

    documents.py     reads documents of every source, or in memory, into one form
    formats.py       how a table is read: format, columns, template; the nearest ways if it cannot
    rows.py          one row of any format -> document
    sources.py       rows of files, folders, `save_to_disk` folders, hub ids, packages' docstrings
    source_files.py  the files of sources, their names in ids, and what of a folder is not read
    table_files.py   rows of one file, by its suffix
    parsers.py       text of JSON and CSV -> rows; what is damaged, in one line
    tokenization.py  token ids with the supervised positions; a tokenizer trained on documents
    chat.py          renders conversations with the chat template, and finds the answers
    encoding.py      token ids of these; what a tokenizer does of its own; cuts long texts
    words.py         the form in which texts are compared, and their words
    duplicates.py    clusters of near-duplicates, and their removal by a mitigation
    buckets.py       number of repetitions of each document, drawn over clusters
    canaries.py      random secrets; a fair coin decides whether each is trained
    identity_key.py  the key under which equal texts have equal hashes; that of one run
    corpus.py        prepared documents on disk: token arrays and manifest
    token_checks.py  mistakes in tokens that make training or audits silently wrong
    packing.py       packs pieces of documents into rows, best fit, and orders the rows
    loader.py        rows of a step as arrays; counts what was actually fed
    given.py         all documents that a run's settings name, also after its end; their hash
    prepare.py       read, tokenise, cluster, place, write: a run folder's manifest and tokens

    sources --documents--> Document --tokenization--> ids, supervised
            --duplicates--> clusters --buckets--> bucket, role, repetitions of each document
    canaries --documents, coins-->                the same, for each canary
            --packing--> row of each global sample index --loader--> a step's arrays

The loader is a pure function of (seed, global sample index): it does not depend on the number of
processes, and a resumed run continues with the next sample.
"""
