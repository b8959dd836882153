"""A snapshot as a file that training without whale_tf reads: made from the snapshot's files alone, one variable after the other.

::

    session-0, estimator-0, loop-0   a checkpoint of TensorFlow, by the names of the variables; parts of a variable are its slices
    fit-0                            Keras' weights file (``.weights.h5``), at the places that Keras has for the variables

A checkpoint's slices are what partitioned variables have in TensorFlow's own checkpoints: who restores it reads whole variables.
"""
from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from whale_tf._tf_compat import eager_mode, tf, v1
from whale_tf.errors import SnapshotError
from whale_tf.runtime.snapshots.backups import FOLDER
from whale_tf.runtime.snapshots.files import MANIFEST, Piece, Snapshot, Store, opened

SHARD_BYTES = 1 << 26  # of pieces that are read at a time, unless one is larger; TensorFlow copies them twice
UNKNOWN = ""  # key of what is not known
PLACES = "weights"  # in the state of ``fit``: key of a variable -> its place in Keras' file
SUFFIX = ".weights.h5"
_RUN = re.compile(r"^(fit|loop|session|estimator)-\d+$")


class Joined(NamedTuple):
    """Attributes:
    folder: of the snapshot.
    step: after which it was taken.
    variables, bytes: that were written.
    """

    folder: str
    step: int
    variables: int
    bytes: int


def join(path: str, out: str) -> Joined:
    """Writes a snapshot as one file, or as the files of a checkpoint.

    Args:
        path: a snapshot's folder; the folder of a run, or of ``BackupAndRestore``: the newest one that is whole; or
            ``snapshot.path``, if one run has left snapshots there.
        out: where to write; ``.weights.h5``: Keras' weights file, otherwise the name of a checkpoint.

    Raises:
        SnapshotError: there is no such snapshot, or it is not of a training that has such a file.
        OSError: it cannot be written.
    """
    snapshot = find(path)
    state = snapshot.state()[0]
    is_fit = "callbacks" in state
    if is_fit != out.endswith(SUFFIX):
        what, expected = ("fit", f"is a weights file of Keras, so give it a name that ends with {SUFFIX}") if is_fit else (
            "a Session, an Estimator or a loop", f"is a checkpoint of TensorFlow, so give it a name without {SUFFIX}")
        raise SnapshotError(f"{out!r} cannot be made of {snapshot.folder!r}: what is made of a snapshot of {what} {expected}")
    os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
    try:
        with eager_mode(), tf.device("/device:CPU:0"):
            written = _weights_file(snapshot, state.get(PLACES), out) if is_fit else _checkpoint(snapshot, out)
    except tf.errors.OpError as error:
        raise SnapshotError(f"{out!r} cannot be made of {snapshot.folder!r}: {error.message}; if training that goes on has taken "
                            "newer snapshots and deleted this one, try again, with a larger snapshot.keep") from None
    return Joined(snapshot.folder, snapshot.step, len(written), sum(written.values()))


def find(path: str) -> Snapshot:
    """The snapshot that a path means (see :func:`join`).

    Raises:
        SnapshotError: there is none that is whole, or several runs have left some.
    """
    if os.path.exists(os.path.join(path, MANIFEST)):
        try:
            return opened(path)
        except ValueError as error:
            raise SnapshotError(f"snapshot {path!r} does not count: {error}; give the one before") from None
    within = sorted(name for name in (os.listdir(path) if os.path.isdir(path) else ()) if name == FOLDER or _RUN.match(name))
    if len(within) > 1:
        raise SnapshotError(f"{path!r} has snapshots of {len(within)} runs ({', '.join(within)}); give the folder of one of them")
    told: List[str] = []
    found = next(Store(os.path.join(path, *within), 1, told.append).newest(), None)
    if found is None:
        raise SnapshotError(f"there is no snapshot in {path!r} ({'; '.join(told) or 'no folder step-*'}); give the snapshot.path "
                            "of a run, a folder in it, or the backup_dir of BackupAndRestore")
    return found


# ----------------------------------------------------------------------------------------------------- checkpoints
def _checkpoint(snapshot: Snapshot, out: str) -> Dict[str, int]:
    """Writes a checkpoint; returns the bytes of each variable."""
    folder = os.path.dirname(os.path.abspath(out))
    temporary = tempfile.mkdtemp(prefix=os.path.basename(out), dir=folder)
    try:
        written = _merged(snapshot, temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    state = v1.train.get_checkpoint_state(folder)
    known = [] if state is None else [path for path in state.all_model_checkpoint_paths if path != os.path.abspath(out)]
    v1.train.update_checkpoint_state(folder, os.path.abspath(out), [*known, os.path.abspath(out)])
    return written


def _merged(snapshot: Snapshot, temporary: str, out: str) -> Dict[str, int]:
    """Writes a checkpoint's files, piece by piece into a temporary folder first."""
    names, written = _names(snapshot), {}  # type: Dict[str, str], Dict[str, int]
    prefixes: List[str] = []
    shard: List[Tuple[str, str, np.ndarray]] = []

    def flush() -> None:
        if shard:
            prefixes.append(f"{temporary}/part-{len(prefixes)}")
            tf.raw_ops.SaveV2(prefix=prefixes[-1], tensor_names=[name for name, _, _ in shard],
                              shape_and_slices=[where for _, where, _ in shard], tensors=[value for _, _, value in shard])
            shard.clear()

    for piece, value in _pieces(snapshot):
        if sum(one.nbytes for _, _, one in shard) + value.nbytes > SHARD_BYTES:
            flush()
        name = names[piece.variable]
        shard.append((name, "" if piece.is_whole else _slice(piece, value), value))
        written[name] = written.get(name, 0) + value.nbytes
    flush()
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=prefixes, destination_prefix=out, delete_old_dirs=False)
    return written


def _names(snapshot: Snapshot) -> Dict[str, str]:
    """The names in the checkpoint by the variables' keys: equal ones (Keras 3) are numbered."""
    found: Dict[str, str] = {}
    taken = set()
    for piece, _ in snapshot.pieces():
        if piece.variable not in found:
            name = first = piece.name.partition(":")[0]
            number = 1
            while name in taken:
                name, number = f"{first}_{number}", number + 1
            taken.add(name)
            found[piece.variable] = name
    return found


def _slice(piece: Piece, value: np.ndarray) -> str:
    """TensorFlow's text for a slice: the sizes of the whole, then the begin and the size in each dimension."""
    return "{} {}".format(" ".join(map(str, piece.shape)), ":".join(f"{at},{size}" for at, size in zip(piece.start, value.shape)))


def _pieces(snapshot: Snapshot) -> Iterator[Tuple[Piece, np.ndarray]]:
    """What the snapshot has of its variables; of one that several processes have whole, the first.

    Raises:
        SnapshotError: a piece is missing.
    """
    left: Dict[str, int] = {}
    for piece, read in snapshot.pieces():
        size = int(np.prod(piece.shape, dtype=np.int64))
        if left.setdefault(piece.variable, size) or not size and piece.is_whole:
            value = np.asarray(read())
            left[piece.variable] -= value.size
            yield piece, value
    missing = sorted({piece.name for piece, _ in snapshot.pieces() if left[piece.variable] > 0})
    if missing:
        raise SnapshotError(f"snapshot {snapshot.folder!r} lacks pieces of {', '.join(missing)}; give the one before")


# ----------------------------------------------------------------------------------------------------- Keras
def _weights_file(snapshot: Snapshot, places: Optional[Dict[str, Sequence[str]]], out: str) -> Dict[str, int]:
    """Writes Keras' weights file; returns the bytes of each variable."""
    import h5py  # type: ignore[import-untyped]  # comes with TensorFlow; takes a while to load

    if not places or UNKNOWN in places:
        what = f"what a layer saves at {', '.join(places[UNKNOWN])} is no variable" if places else "it does not have their places"
        raise SnapshotError(f"snapshot {snapshot.folder!r} does not say what belongs into Keras' weights file: {what}; go on "
                            "with it, and call model.save_weights")
    written: Dict[str, int] = {}
    with h5py.File(f"{out}.new", "w") as file:
        for piece, value in _pieces(snapshot):
            for place in places.get(piece.variable, ()):
                if place not in file:
                    made = file.create_dataset(place, piece.shape, value.dtype)
                    if value.dtype.name == "bfloat16":
                        made.attrs["dtype"] = "bfloat16"
                file[place][tuple(slice(at, at + size) for at, size in zip(piece.start, value.shape))] = value
                written[place] = written.get(place, 0) + value.nbytes
        missing = sorted({place for found in places.values() for place in found} - set(written))
        if missing:
            raise SnapshotError(f"snapshot {snapshot.folder!r} lacks what belongs to {', '.join(missing)}; give another one")
    os.replace(f"{out}.new", out)
    return written


def places_of(model: Any, keys: Dict[int, str]) -> Dict[str, List[str]]:
    """Where Keras' weights file of a model has its variables, by their keys; nothing, if that is not known.  No value is read.

    Args:
        keys: by ``id`` of TensorFlow's variable.
    """
    saving = sys.modules["keras.src.saving.saving_lib"]
    kind = next(kind for kind in sys.modules["keras.src.backend"].Variable.__mro__ if "numpy" in vars(kind))
    found: Dict[str, List[str]] = {}

    class Places(saving.H5IOStore):  # type: ignore[name-defined,misc]
        """Notes variables in place of writing them."""

        def __init__(self) -> None:
            self._path = ""

        def __bool__(self) -> bool:
            return True

        def make(self, path: str, metadata: Any = None) -> Any:
            self._path = path
            return self

        def __setitem__(self, name: str, value: Any) -> None:
            key = keys.get(id(getattr(value, "_value", value)), UNKNOWN)
            found.setdefault(key, []).append("/".join(part for part in (self._path, "vars", name) if part))

    before = vars(kind)["numpy"]
    kind.numpy = lambda variable: variable  # the state of an optimizer is asked for as arrays
    try:
        saving._save_state(model, weights_store=Places(), assets_store=None, inner_path="", visited_saveables=set())
    except Exception:  # a layer that saves something else in its own way; training goes on
        return {}
    finally:
        kind.numpy = before
    return found
