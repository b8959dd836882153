"""Snapshots of ``fit``: a run that ends, for whatever reason, goes on at the next example when the same command runs again.

::

    step k ──> read the state ──> step k + 1 ...          the training thread: no copy on CPU devices, one to the host otherwise
                    │
                    └──> write the part, checksums ──> manifest, last                                    a thread of each process

    values      Python values as JSON
    files       a snapshot's files: parts, checksums, the manifest; the newest that is whole
    variables   which variables a model and its training step have, and their values
    writing     the thread that writes
    fitting     one call of ``fit``: its position in the data, its callbacks, when snapshots are taken
    fits        all calls of ``fit`` since ``wh.init``

A position counts mini-batches, not bytes of an iterator, so that it has the same meaning for any number of processes and under
any plan: a step is one global mini-batch.  A snapshot holds whole variables or parts of them, whichever its processes had; who
reads it puts them together.
"""
