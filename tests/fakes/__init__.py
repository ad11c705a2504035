"""Contract fakes: what the real libraries take, ignore, refuse and return, in torch on the CPU.

Each file is one library; its signatures are those of the real version, and
`tests/test_signatures.py` holds them against the extract of the wheels in `ci/signatures.json`.
What a fake claims beyond a signature was read in the library's source and is assumed until a run on
hardware says so.
"""
