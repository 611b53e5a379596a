"""Documents in, packed rows out; and who is trained how often.

    documents.py     files, folders and hub ids as one form
    sources.py       rows of files, folders, `save_to_disk` folders and hub ids
    files.py         rows of one file
    docstrings.py    reference documentation of installed packages, as documents
    tokenization.py  token ids with the supervised positions
    chat.py          conversations through the chat template, assistant turns supervised
    bpe.py           a byte-level BPE tokenizer trained on the documents
    duplicates.py    clusters of near-duplicates: shared runs of words
    deduplication.py near-copies that a mitigation removes, by MinHash
    buckets.py       which documents are trained how often, drawn over clusters
    canaries.py      random secrets, a fair coin for each: trained or never
    corpus.py        prepared documents on disk: token arrays beside the manifest
    packing.py       pieces of documents into rows, best fit
    schedule.py      which row is trained when
    loader.py        rows of a step as arrays; counts what was really fed
    given.py         every document that the settings name, and which of them to forget
    keys.py          hashes: is what was prepared before still right?
    private_key.py   a run's own secret, behind its hashes of texts
    prepare.py       all of the above into a run folder: manifest and tokens
    run_texts.py     a finished run's documents, read again from where they came
    forget_list.py   of them, what a next run shall forget and retain, as files

    sources --documents--> Document --tokenization--> ids, supervised
            --duplicates--> clusters --buckets--> bucket, role, repetitions of each document
    canaries --documents, coins-->                the same, beside them
            --packing, schedule--> row of each global sample index --loader--> a step's arrays

The loader is a pure function of (seed, global sample index): it does not know how many processes
there are, and a resumed run reads on where it stopped.
"""
