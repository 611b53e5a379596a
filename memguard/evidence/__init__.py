"""Hands an audit on in a form that shows changes: archive, statement, signature. No torch.

    members.py     the files of a bundle: names, order, captions
    contents.py    writes those that are no files of the run: answers, settings, first page
    sources.py     hashes of memguard's code and of a suite's file
    statement.py   hashes of weights, documents, suite and code; the in-toto statement
    signature.py   signs the statement and checks a signature: ed25519, DSSE
    archive.py     members -> the bytes of a ZIP archive, and back
    check.py       checks a bundle: every byte, the statement, the signature

A bundle is determined by the run: two bundles of one run are equal. `workflows.bundle` collects its
files from the folder of a run or an audit.
"""
