"""Snapshots of training: a run that ends, for whatever reason, goes on at the next example when the same command runs again.

::

    step k ──> read the state ──> step k + 1 ...          the training thread: no copy on CPU devices, one to the host otherwise
                    │
                    └──> write the part, checksums ──> manifest, last                                    a thread of each process

    values      Python values as JSON
    files       a snapshot's files: parts, checksums, the manifest; the newest that is whole
    neighbours  copies of parts, where processes have directories of their own
    variables   which variables a model or a loop has, and their values
    writing     the thread that writes
    pace        when a snapshot is taken
    run         one training run: its snapshots, and how its time was spent
    fitting     one call of ``fit``: its position in the data, its callbacks
    backups     Keras' ``BackupAndRestore``, with snapshots beside its files
    loops       one loop over ``wh.resume``: its position in the data
    sessions    training in a Session: its variables, the positions of its iterators
    joining     a snapshot as a checkpoint of TensorFlow, or as Keras' weights file
    runs        all training runs since ``wh.init``

A position counts mini-batches, not bytes of an iterator, so that it has the same meaning for any number of processes and under
any plan: a step is one global mini-batch.  A snapshot holds whole variables or parts of them, whichever its processes had; who
reads it puts them together.
"""
